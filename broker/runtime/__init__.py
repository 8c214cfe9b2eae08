"""Cluster -> Run."""
