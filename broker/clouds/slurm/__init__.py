"""Slurm clusters: one allocation per gang."""
