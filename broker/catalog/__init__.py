"""Keep offers with dated prices: the book, its sources and its updates."""
