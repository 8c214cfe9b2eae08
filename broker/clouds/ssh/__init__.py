"""SSH pools: hosts of your own, each claimed by one gang at a time."""
