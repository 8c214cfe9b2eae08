"""Find the names, dependencies and order of execution of a pipeline's tasks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from broker.errors import UsageError
from broker.types import Task


def order_tasks(tasks: Sequence[Task]) -> tuple[str, ...]:
    """Return names in topological order, ties in the order of the file.

    Tasks without a name are called `task-1`, `task-2`, ... by position. Raises UsageError for a cycle, an unknown name
    or an ambiguous name.
    """
    names = name_tasks(tasks)
    return tuple(names[i] for i in order_indexes(tasks))


def name_tasks(tasks: Sequence[Task]) -> tuple[str, ...]:
    """Give every task a distinct name: its own, or one by position; a duplicate gets its position as a suffix."""
    own = [each.name or f"task-{place}" for place, each in enumerate(tasks, start=1)]
    taken = set(own)
    names, seen = list[str](), set[str]()
    for place, name in enumerate(own, start=1):
        unique = name
        while unique in seen or (unique != name and unique in taken):
            unique = f"{unique}-{place}"
        seen.add(unique)
        names.append(unique)
    return tuple(names)


def find_needs(tasks: Sequence[Task]) -> list[dict[int, float]]:
    """Return, for every task, the GiB that it needs from other tasks by their index. Raises UsageError."""
    own = [each.name or f"task-{place}" for place, each in enumerate(tasks, start=1)]
    needs_of = list[dict[int, float]]()
    for i, task in enumerate(tasks):
        needs = dict[int, float]()
        for name, gib in task.needs.items():
            places = [j for j, each in enumerate(own) if each == name]
            if not places:
                raise UsageError(
                    f"`needs` of task `{own[i]}`: unknown task `{name}`",
                    hints=[f"known tasks: {', '.join(f'`{each}`' for each in own)}"],
                )
            if len(places) > 1:
                raise UsageError(
                    f"`needs` of task `{own[i]}`: {len(places)} tasks are named `{name}`",
                    hints=["give every task a unique `name`"],
                )
            needs[places[0]] = gib
        needs_of.append(needs)
    return needs_of


def order_indexes(tasks: Sequence[Task]) -> list[int]:
    """Return the indexes of the tasks in the order of `order_tasks`. Raises UsageError."""
    needs = find_needs(tasks)
    followers: list[list[int]] = [[] for _ in tasks]
    missing = [len(each) for each in needs]
    for i, each in enumerate(needs):
        for j in each:
            followers[j].append(i)
    ready = [i for i, count in enumerate(missing) if count == 0]
    order = list[int]()
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for follower in followers[i]:
            missing[follower] -= 1
            if missing[follower] == 0:
                heapq.heappush(ready, follower)
    if len(order) < len(tasks):
        names = name_tasks(tasks)
        circle = " -> ".join(f"`{names[i]}`" for i in _find_circle(needs, missing))
        raise UsageError(f"`needs` contains a cycle: {circle}", hints=["remove one of these `needs`"])
    return order


def _find_circle(needs: Sequence[dict[int, float]], missing: Sequence[int]) -> list[int]:
    """Walk back along unsatisfied needs until a task repeats."""
    at = next(i for i, count in enumerate(missing) if count)
    trail = list[int]()
    while at not in trail:
        trail.append(at)
        at = next(j for j in needs[at] if missing[j])
    return [*trail[trail.index(at) :], at]
