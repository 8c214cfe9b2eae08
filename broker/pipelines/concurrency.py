"""The highest price per hour of the tasks of a file, some of which run at the same time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache

from broker.types import Plan

EXACT_TASKS_MAX = 40  # the search takes time that grows exponentially with wide pipelines


def find_usd_hour_max(plans: Sequence[Plan]) -> float:
    """Return the highest price per hour of tasks that run at the same time.

    These are all tasks of a group; of a pipeline, those of which none needs another, directly or through others. With
    prices a: 3, b: 2, c: 2, where b and c need a, it is 4, while b and c run.
    """
    tasks = {str(plan.task.name): plan for plan in plans}
    if any(plan.task.group is not None for plan in plans) or len(tasks) < len(plans):
        return sum(plan.choice.placement.usd_hour for plan in plans)
    needed = {name: _find_needed(name, tasks) for name in tasks}
    if len(tasks) > EXACT_TASKS_MAX:
        return _bound_usd_hour(tasks, needed)

    @cache  # branches are independent, so the same rest is reached by many ways
    def search(names: tuple[str, ...]) -> float:
        if not names:
            return 0.0
        first, others = names[0], names[1:]
        apart = tuple(each for each in others if first not in needed[each] and each not in needed[first])
        taken = tasks[first].choice.placement.usd_hour + search(apart)
        return taken if len(apart) == len(others) else max(taken, search(others))

    return search((*tasks,))


def _bound_usd_hour(tasks: Mapping[str, Plan], needed: Mapping[str, AbstractSet[str]]) -> float:
    """Return an upper bound: of a chain of tasks, each of which needs the one before it, one runs at a time."""
    chains: list[list[str]] = []
    for name in sorted(tasks, key=lambda each: len(needed[each])):
        chain = next((each for each in chains if each[-1] in needed[name]), None)
        if chain is None:
            chains.append([name])
        else:
            chain.append(name)
    return sum(max(tasks[name].choice.placement.usd_hour for name in chain) for chain in chains)


def _find_needed(name: str, tasks: Mapping[str, Plan]) -> set[str]:
    """Return the tasks that must end before a task, directly or through others."""
    found: set[str] = set()
    rest = [name]
    while rest:
        new = [each for each in tasks[rest.pop()].task.needs if each in tasks and each not in found]
        found.update(new)
        rest += new
    return found
