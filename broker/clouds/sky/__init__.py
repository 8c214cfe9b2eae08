"""All other clouds, through SkyPilot."""
