"""Job groups: the roles of tasks that start together, from the header and from `on_loss` of each task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from broker.task.reading import Reader, suggest
from broker.task.tables import Section
from broker.types import GroupRole, OnLoss, Task
from broker.types.groups import name_variable

ADDRESS_FILE = "BROKER_GROUP_FILE"
DELAY_OF_OTHERS = "default"  # SkyPilot's key in a mapping of delays


def join_group(reader: Reader, header: Section, documents: Sequence[tuple[Section, Task]]) -> tuple[Task, ...]:
    """Return the tasks with their roles in the group; report names that do not identify one task."""
    sections, tasks = [section for section, _ in documents], [task for _, task in documents]
    names = _check_names(reader, header, sections, tasks)
    primaries: Sequence[str] = header.get("primary_tasks") or names
    for name in primaries:
        _check_task(reader, header, "primary_tasks", name, names)
    delays = header.get("termination_delay", 0.0)
    if isinstance(delays, Mapping):
        for name in delays:
            _check_task(reader, header, "termination_delay", name, [*names, DELAY_OF_OTHERS])
    else:
        delays = {DELAY_OF_OTHERS: delays}
    return tuple(
        replace(
            task,
            group=GroupRole(
                name=header.get("name") or "group",
                is_primary=task.name in primaries,
                on_loss=_read_on_loss(section, task, tasks),
                termination_delay_s=delays.get(task.name, delays.get(DELAY_OF_OTHERS, 0.0)),
                is_connected=header.get("inter_connection", True),
            ),
        )
        for section, task in zip(sections, tasks, strict=True)
    )


def _check_names(reader: Reader, header: Section, sections: Sequence[Section], tasks: Sequence[Task]) -> list[str]:
    """Report a group or task without a name, and names that map to the same variables.

    Tasks find each other by name.
    """
    if not header.get("name"):
        reader.fault(header.marked, "a job group requires a `name`", "add `name: NAME` to the header")
    counts = Counter(name_variable(task.name) for task in tasks if task.name)
    for section, task in zip(sections, tasks, strict=True):
        if task.name is None:
            reader.fault(section.marked, "a task of a job group requires a `name`", "add `name: NAME` to the task")
        elif counts[name_variable(task.name)] > 1:
            marked = section.marks.get("name", section.marked)
            reader.fault(
                marked, f"another task of the group has the name `{task.name}`, or one that differs only in punctuation"
            )
        if "needs" in section.values:
            hint = "remove `needs`, or remove `execution: parallel`"
            reader.note(*section.find_key("needs"), "`needs`: the tasks of a job group start together", hint)
    return [task.name for task in tasks if task.name]


def _check_task(reader: Reader, header: Section, field: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        hint = suggest(name, names) or f"tasks of this file: {', '.join(names)}"
        reader.note(*header.find_key(field), f"`{field}`: unknown task `{name[:40]}`", hint)


def _read_on_loss(section: Section, task: Task, tasks: Sequence[Task]) -> OnLoss:
    if given := section.get("on_loss"):
        return OnLoss(given)
    return derive_on_loss(task, tasks)


def derive_on_loss(task: Task, tasks: Sequence[Task]) -> OnLoss:
    """Return the effect of a task's loss if its file does not specify it.

    A program that reads this task's addresses from variables keeps the addresses from its start, so it is restarted
    when they change. The address file and the host names are updated.
    """
    prefix = f"BROKER_GROUP_{name_variable(task.name or '')}_"
    for other in tasks:
        text = f"{other.setup or ''}\n{other.run or ''}"
        if other is not task and prefix in text and ADDRESS_FILE not in text:
            return OnLoss.RESTART_GROUP
    return OnLoss.KEEP_GOING
