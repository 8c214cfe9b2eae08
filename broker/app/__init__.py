"""Wire the parts together for the command line and the Python API."""
