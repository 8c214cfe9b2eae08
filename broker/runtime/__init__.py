"""Runs on clusters: Cluster -> Run."""
