"""Replay recorded spot markets to compare policies."""
