"""Create, observe and terminate clusters: Plan -> Cluster."""
