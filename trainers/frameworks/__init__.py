"""Small programs of other frameworks, one for each template, to copy for your own.

Each learns the same function of eight numbers, on two nodes, and shows how its framework meets the broker: addresses of
the nodes, checkpoints, progress and notices. docs/FRAMEWORKS.md has what was measured.
"""
