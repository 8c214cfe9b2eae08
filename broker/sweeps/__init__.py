"""Hyperparameter sweeps: runs of one task with different variables, some of them stopped early."""
