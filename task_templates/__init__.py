"""Ready tasks. The first lines of each file show how to launch it."""
