"""The application layer, which wires the parts together for the command line and the Python API."""
