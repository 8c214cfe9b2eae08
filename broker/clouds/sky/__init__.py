"""Every other cloud, through SkyPilot."""
