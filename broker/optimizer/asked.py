"""The alternative of a task that a place satisfies: its images, disks and ports apply there."""

from __future__ import annotations

from broker.optimizer.filters import apply_filters
from broker.types import Placement, Resources, Task

CONTAINER = "docker:"  # SkyPilot's prefix of an image to run in, not to boot


def find_asked(task: Task, placement: Placement) -> Resources:
    """Return the first alternative that admits the place; the task's first if no alternative matches its price any
    more."""
    for resources in task.resources:
        if resources.use_spot in (None, placement.is_spot) and apply_filters(resources, [placement.offer])[0]:
            return resources
    return task.resources[0]


def find_container(task: Task, placement: Placement) -> str | None:
    """Return the container image that the program runs in."""
    image = find_asked(task, placement).image_id or ""
    return image.removeprefix(CONTAINER) if image.startswith(CONTAINER) else None
