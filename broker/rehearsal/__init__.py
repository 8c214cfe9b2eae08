"""Run a job on this machine against a simulated spot market."""
