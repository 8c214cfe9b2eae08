"""The door: speech, wiring, exit codes."""
