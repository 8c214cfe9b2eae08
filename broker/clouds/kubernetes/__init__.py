"""Kubernetes: pods as nodes, through the user's kubectl."""
