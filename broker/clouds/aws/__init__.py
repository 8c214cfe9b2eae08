"""Amazon EC2, split by what is made or asked there; `cloud.py` joins it."""
