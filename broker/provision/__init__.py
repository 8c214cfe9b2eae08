"""Plan -> Cluster."""
