"""Where prices come from, one file a source."""
