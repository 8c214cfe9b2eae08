"""Small programs for other frameworks, one per template. Copy one as a starting point for your own.

Each fits the same function of eight numbers on two nodes, and shows how its framework works with broker: node
addresses, checkpoints, progress and preemption notices. docs/FRAMEWORKS.md has the measurements.
"""
