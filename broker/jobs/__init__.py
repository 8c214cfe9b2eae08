"""Run -> Recovery."""
