"""Replays of recorded spot markets to compare policies."""
