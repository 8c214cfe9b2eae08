"""Which of a task's alternatives a place answers: what it says of images, disks and ports holds there."""

from __future__ import annotations

from broker.optimizer.filters import apply_filters
from broker.types import Placement, Resources, Task

CONTAINER = "docker:"  # SkyPilot's word before an image that is run, not booted


def find_asked(task: Task, placement: Placement) -> Resources:
    """The first alternative that admits the place; the task's first where its price has moved out of all of them."""
    for resources in task.resources:
        if resources.use_spot in (None, placement.is_spot) and apply_filters(resources, [placement.offer])[0]:
            return resources
    return task.resources[0]


def find_container(task: Task, placement: Placement) -> str | None:
    """The image that the program is to run in."""
    image = find_asked(task, placement).image_id or ""
    return image.removeprefix(CONTAINER) if image.startswith(CONTAINER) else None
