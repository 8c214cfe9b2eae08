"""Pure mathematics of the spot market."""
