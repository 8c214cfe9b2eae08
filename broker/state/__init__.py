"""Persistent state: everything that broker records about clusters, jobs, bills and events."""
