"""Send notifications about managed jobs from the daemon, for events that the store has recorded."""
