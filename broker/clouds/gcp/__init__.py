"""Google Compute Engine.

One file per resource; `cloud.py` joins them. Importing them does not import Google's library.
"""
