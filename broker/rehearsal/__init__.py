"""Run a job or a service on this machine against a simulated spot market."""
