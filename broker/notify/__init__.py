"""Notifications about managed jobs, from the events that the store has recorded; delivered by the daemon."""
