"""Several documents of one file: header, names and dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from broker.task.fields import HEADER
from broker.task.groups import join_group
from broker.task.reading import Reader, suggest
from broker.task.tables import Section
from broker.task.yaml_reader import Marked
from broker.types import Task

TASKS_MAX = 1_000
_SHOWN_MAX = 6  # names of a cycle
Document = tuple[Section, Task]  # a task with the section that it was read from


def split_header(reader: Reader, documents: Sequence[Marked]) -> tuple[Section | None, list[Marked]]:
    """Return the header, if the first of several documents has only a header's fields, and the tasks."""
    filled = [document for document in documents if document.value is not None]
    if len(filled) > TASKS_MAX + 1:
        reader.fault(
            filled[TASKS_MAX + 1], f"the file contains more than {TASKS_MAX:,} tasks", "split it into several files"
        )
        return None, filled[:1]
    first = filled[0].value if len(filled) > 1 else None
    if isinstance(first, dict) and first and (set(first) <= set(HEADER.fields) or _is_group_header(first)):
        return HEADER.read(reader, filled[0], "header"), filled[1:]
    return None, filled


def _is_group_header(fields: Mapping[str, Marked]) -> bool:
    """Return whether a document with unknown fields is a header, which specifies how tasks run, and not a task."""
    return "execution" in fields and not {"run", "setup", "resources"} & set(fields)


def join_tasks(reader: Reader, header: Section | None, documents: Sequence[Document]) -> tuple[Task, ...]:
    """Return the tasks of a job group, or the tasks with `needs` resolved; by default, each needs the previous one."""
    if header is not None and header.get("execution") == "parallel" and len(documents) > 1:
        return join_group(reader, header, documents)
    has_needs = any("needs" in section.values for section, _ in documents)
    tasks = _name_tasks(reader, documents, has_needs=has_needs) if len(documents) > 1 or has_needs else None
    if tasks is None:
        return tuple(task for _, task in documents)
    if has_needs:
        return _read_needs(reader, [section for section, _ in documents], tasks)
    chain = [tasks[0]]
    for task in tasks[1:]:
        name = chain[-1].name
        assert name is not None
        chain.append(replace(task, needs={name: _measure_outputs(chain[-1])}))
    return tuple(chain)


def _name_tasks(reader: Reader, documents: Sequence[Document], *, has_needs: bool) -> list[Task]:
    """Give each task a name: SkyPilot allows missing and duplicate names, but `needs` does not."""
    taken = {task.name for _, task in documents}
    seen: set[str] = set()
    tasks = []
    for number, (section, task) in enumerate(documents, start=1):
        wanted = name = task.name or f"task-{number}"
        if name in seen and has_needs:
            reader.fault(section.marks.get("name", section.marked), f"duplicate task name `{name}`")
        count = 2
        while name in seen or (name != task.name and name in taken):
            name, count = f"{wanted}-{count}", count + 1
        seen.add(name)
        tasks.append(replace(task, name=name))
    return tasks


def _read_needs(reader: Reader, sections: Sequence[Section], tasks: Sequence[Task]) -> tuple[Task, ...]:
    by_name = {task.name: task for task in tasks if task.name}
    found = []
    for section, task in zip(sections, tasks, strict=True):
        needs = {}
        for name, (marked, gib) in _list_needs(section).items():
            if name not in by_name:
                hint = suggest(name, by_name) or f"tasks of this file: {', '.join(by_name)}"
                reader.fault(marked, f"`needs`: unknown task `{name[:40]}`", hint)
            else:
                needs[name] = _measure_outputs(by_name[name]) if gib is None else gib
        found.append(replace(task, needs=needs))
    edges = {task.name: list(task.needs) for task in found if task.name}
    if circle := _find_circle(edges):
        section = next(section for section, task in zip(sections, found, strict=True) if task.name == circle[0])
        shown = circle if len(circle) <= _SHOWN_MAX else [*circle[: _SHOWN_MAX - 2], "...", circle[-1]]
        reader.note(*section.find_key("needs"), f"`needs` contains a cycle: {' -> '.join(shown)}", "remove one of them")
    return tuple(found)


def _list_needs(section: Section) -> dict[str, tuple[Marked, Any]]:
    """Return name -> position in the file, and GiB or None."""
    value = section.get("needs", [])
    if "needs" not in section.values:
        return {}
    marked = section.marks["needs"]
    if isinstance(value, str):
        return {value: (marked, None)}
    if isinstance(value, dict):
        places = {key: marked.keys[key] for key in value}
        return {key: (Marked(value=key, line=places[key][0], column=places[key][1]), gib) for key, gib in value.items()}
    return {each.value: (each, None) for each in marked.value if each.value in value}


def _measure_outputs(task: Task) -> float:
    return sum(output.size_gib for output in task.outputs)


def _find_circle(edges: Mapping[str, Sequence[str]]) -> list[str] | None:
    """Return a cycle, from its first task in file order back to itself. Not recursive, because chains may be long."""
    state: dict[str, int] = {}  # 1: on the path, 2: done
    for start in edges:
        trail: list[tuple[str, list[str]]] = [(start, list(edges[start]))] if start not in state else []
        while trail:
            name, rest = trail[-1]
            state[name] = 1
            if not rest:
                state[name] = 2
                trail.pop()
            elif state.get(target := rest.pop(0)) == 1:
                names = [each for each, _ in trail]
                circle = names[names.index(target) :]
                first = min(circle, key=list(edges).index)
                turned = circle[circle.index(first) :] + circle[: circle.index(first)]
                return [*turned, first]
            elif target not in state:
                trail.append((target, list(edges[target])))
    return None
