"""Amazon EC2. One file per resource; `cloud.py` joins them."""
