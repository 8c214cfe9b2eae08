"""`resources.priority`, in SkyPilot's spelling and in words."""

from __future__ import annotations

import pytest

from broker.errors import TaskError
from broker.task.loader import load_tasks_text


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ("{}", 0),
        ("{priority: 7}", 7),
        ("{priority: -1000}", -1000),
        ("{priority: low}", -100),
        ("{priority: normal}", 0),
        ("{priority: High}", 100),
        ("{priority: 3, any_of: [{cpus: 2}, {cpus: 4}]}", 3),
    ],
)
def test_priority_is_read(resources: str, expected: int) -> None:
    (task,) = load_tasks_text(f"run: x\nresources: {resources}", "task.yaml")
    assert task.priority == expected and task.notices == ()


@pytest.mark.parametrize("priority", ["1001", "-1001", "urgent", "1.5", "[1]"])
def test_other_priorities_are_refused(priority: str) -> None:
    with pytest.raises(TaskError, match="priority"):
        load_tasks_text(f"run: x\nresources: {{priority: {priority}}}", "task.yaml")
