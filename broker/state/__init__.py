"""Our own memory."""
