"""Roles of the tasks of a job group."""

from __future__ import annotations

import pytest

from broker.errors import TaskError
from broker.task.codec import decode_task, encode_task
from broker.task.loader import load_tasks_text
from broker.types import GroupRole, OnLoss

HEADER = "name: rl\nexecution: parallel\n"


def load(header: str, *tasks: str) -> dict[str | None, GroupRole | None]:
    return {task.name: task.group for task in load_tasks_text("\n---\n".join([header, *tasks]), "task.yaml")}


def find_faults(header: str, *tasks: str) -> list[str]:
    with pytest.raises(TaskError) as raised:
        load(header, *tasks)
    return [issue.message for issue in raised.value.issues]


def test_header_of_skypilot_gives_each_task_its_role_and_delay() -> None:
    header = HEADER + "primary_tasks: [a]\ntermination_delay: {default: 30s, b: 0s, c: 1m}\ninter_connection: false"
    roles = load(header, "name: a\nrun: x", "name: b\nrun: x", "name: c\nrun: x")
    found = {name: (role.is_primary, role.termination_delay_s) for name, role in roles.items() if role}
    assert found == {"a": (True, 30.0), "b": (False, 0.0), "c": (False, 60.0)}
    assert all(role and role.name == "rl" and not role.is_connected for role in roles.values())


def test_all_tasks_are_primary_and_end_at_once_where_the_header_does_not_say() -> None:
    roles = load(HEADER, "name: a\nrun: x", "name: b\nrun: x")
    assert all(role and role.is_primary and role.termination_delay_s == 0 for role in roles.values())


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("python w.py $BROKER_GROUP_THE_HEAD_IPS", OnLoss.RESTART_GROUP),
        ("python w.py $BROKER_GROUP_THE_HEAD_IPS $BROKER_GROUP_FILE", OnLoss.KEEP_GOING),
        ("python w.py the-head-0.$SKYPILOT_JOBGROUP_NAME:80", OnLoss.KEEP_GOING),
    ],
)
def test_a_task_whose_addresses_another_has_from_its_start_restarts_the_group(run: str, expected: OnLoss) -> None:
    roles = load(HEADER, "name: the-head\nrun: x", f"name: b\nrun: {run}")
    assert (head := roles["the-head"]) is not None and head.on_loss is expected
    assert (other := roles["b"]) is not None and other.on_loss is OnLoss.KEEP_GOING
    given = load(HEADER, "name: the-head\non_loss: keep-going\nrun: x", f"name: b\non_loss: restart-group\nrun: {run}")
    assert [role and role.on_loss for role in given.values()] == [OnLoss.KEEP_GOING, OnLoss.RESTART_GROUP]


def test_names_that_identify_no_task_are_reported() -> None:
    (fault,) = find_faults(HEADER + "primary_tasks: [aa]", "name: a\nrun: x", "name: b\nrun: x")
    assert fault == "`primary_tasks`: unknown task `aa`"
    (fault,) = find_faults(HEADER + "termination_delay: {d: 1s}", "name: a\nrun: x", "name: b\nrun: x")
    assert fault == "`termination_delay`: unknown task `d`"
    assert "requires a `name`" in find_faults(HEADER, "run: x", "name: b\nrun: x")[0]
    assert "requires a `name`" in find_faults("execution: parallel", "name: a\nrun: x", "name: b\nrun: x")[0]
    assert all("another task" in each for each in find_faults(HEADER, "name: a-b\nrun: x", "name: a_b\nrun: x"))
    (fault,) = find_faults(HEADER, "name: a\nrun: x", "name: b\nneeds: [a]\nrun: x")
    assert fault == "`needs`: the tasks of a job group start together"


def test_a_role_survives_the_store() -> None:
    task = load_tasks_text(f"{HEADER}---\nname: a\nrun: x\n---\nname: b\nrun: x\n", "task.yaml")[0]
    assert decode_task(encode_task(task), {}) == task
