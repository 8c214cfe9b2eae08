"""Google Compute Engine. One file a resource; `cloud.py` joins them, and none imports Google's library by itself."""
