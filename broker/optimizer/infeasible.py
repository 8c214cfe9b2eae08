"""Explain an infeasible task: what each filter rejected, and which small changes make an offer fit.

Each suggested change is verified by another plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from broker.errors import NoOfferError
from broker.formatting import format_usd
from broker.frozen import frozen
from broker.types import Estimate, Goal, Plan, Quantity, Resources, Task

HINTS_MAX = 3
PAIRS_MAX = 40
DOUBLINGS_MAX = 12
HALVINGS_MAX = 12

Planner = Callable[[Task], Plan]  # raises NoOfferError


@frozen
class Relaxation:
    """One change of a task. `words` start with a verb such as "drop"; `fields` are the fields that it touches."""

    words: str
    change: Callable[[Task], Task]


def loosen_places(task: Task) -> Task:
    """Return the same request for any place, size and number of nodes, in which to look for the nearest misses."""
    loose = []
    for each in task.resources:
        if each.accelerator:
            loose.append(Resources(accelerator=each.accelerator))
        elif each.instance_type:
            loose.append(Resources(instance_type=each.instance_type))
        else:
            loose.append(Resources(cpus=_at_least(each.cpus), memory_gib=_at_least(each.memory_gib)))
    return replace(task, resources=tuple(loose))


def explain_infeasible(error: NoOfferError, task: Task, make_plan: Planner) -> NoOfferError:
    """Make the error with hints: single changes that help, the cheapest outcome first, otherwise a pair of changes.

    `make_plan` is called with changed tasks, on the widest set of offers.
    """
    goal, changes = task.goal, list(_list_relaxations(task))
    hints = sorted(_try_all([(change,) for change in changes], task, make_plan))
    if not hints:
        if goal and goal.deadline_hours is not None:
            changes.append(Relaxation(words="extend `deadline`", change=_set_goal(deadline_hours=None)))
        pairs = list(combinations(changes, 2))[:PAIRS_MAX]
        hints = sorted(_try_all(pairs, task, make_plan))
    if goal and goal.deadline_hours is not None and goal.work_hours is not None:
        least = _find_deadline(task, goal, make_plan)
        if least is not None:
            hints.insert(0, (0.0, f"extend the deadline: `deadline: {least:g}h` can be met"))
    texts = [text for _, text in hints[:HINTS_MAX]]
    return NoOfferError(error.message, hints=texts or ["list accelerators and prices with `broker gpus`"])


def _try_all(groups: Sequence[tuple[Relaxation, ...]], task: Task, make_plan: Planner) -> Iterator[tuple[float, str]]:
    """Return (cost, hint) for each group of changes that makes an offer fit."""
    for group in groups:
        changed = task
        for each in group:
            changed = each.change(changed)
        try:
            plan = make_plan(changed)
        except NoOfferError:
            continue
        best = plan.choice
        count = len(plan.estimates)
        words = " and ".join(each.words for each in group)
        fits = f"{count} placement{'s' if count > 1 else ''} fit{'' if count > 1 else 's'}"
        yield _cost(best), f"{words}: {fits}, cheapest {_show(best, task.num_nodes)}"


def _cost(best: Estimate) -> float:
    return best.placement.usd_hour if best.expected_usd is None else best.expected_usd


def _show(best: Estimate, node_count: int) -> str:
    offer = best.placement.offer
    price = f"{format_usd(best.placement.usd_hour / node_count)} USD/h per node"
    total = "" if best.expected_usd is None else f", {format_usd(best.expected_usd)} USD expected"
    return f"{offer.cloud} {offer.region} {offer.instance_type} at {price}{total}"


def _list_relaxations(task: Task) -> Iterator[Relaxation]:
    """List the request's conditions, each dropped in every alternative; dropping a region also drops its zone."""
    for field, also in (("zone", ()), ("region", ("zone",)), ("cloud", ("region", "zone"))):
        value = _find_requested(task, field)
        if value is not None:
            yield Relaxation(words=f"drop `{field}: {value}`", change=_drop(field, *also))
    yield from _list_size_relaxations(task)
    if (ratio := _find_requested(task, "memory_gib_per_vcpu")) is not None:
        yield Relaxation(words=f"drop `memory: {ratio:g}x`", change=_drop("memory_gib_per_vcpu"))
    if any(each.accelerator for each in task.resources):
        for count in (1.0, 2.0, 4.0, 8.0, 16.0):
            if all(each.accelerator_count != count for each in task.resources):
                yield Relaxation(
                    words=f"request {count:g} of the accelerator per node", change=_set(accelerator_count=count)
                )
    use_spot = _find_requested(task, "use_spot")
    if use_spot is not None:
        yield Relaxation(words=f"set `use_spot: {str(not use_spot).lower()}`", change=_set(use_spot=not use_spot))
    if _find_requested(task, "usd_hour_max") is not None:
        yield Relaxation(words="raise the price limit (`max_hourly_cost`, `--max-price`)", change=_drop("usd_hour_max"))
    if task.goal is not None:
        yield from _list_goal_relaxations(task.goal, is_spot_only=use_spot is True)


def _list_size_relaxations(task: Task) -> Iterator[Relaxation]:
    """List the sizes: exact ones as a minimum, and each dropped."""
    for field, name in (("instance_type", "instance_type"), ("cpus", "cpus"), ("memory_gib", "memory")):
        value = _find_requested(task, field)
        is_named = any(each.accelerator for each in task.resources) or field != "instance_type"
        if isinstance(value, Quantity) and not value.is_minimum:
            yield Relaxation(words=f"accept more: `{name}: {value}+`", change=_loosen(field))
        if value is not None and is_named:
            yield Relaxation(words=f"drop `{name}: {value}`", change=_drop(field))


def _list_goal_relaxations(goal: Goal, *, is_spot_only: bool) -> Iterator[Relaxation]:
    if is_spot_only and goal.deadline_hours is not None:
        words = "drop `use_spot: true`, so that on-demand can take over in time"
        yield Relaxation(words=words, change=_drop("use_spot"))
    if goal.budget_usd is not None:
        yield Relaxation(words="raise `budget`", change=_set_goal(budget_usd=None))
    if goal.confidence > 0.5 and goal.deadline_hours is not None:
        yield Relaxation(words="lower `confidence` to 0.5", change=_set_goal(confidence=0.5))


def _loosen(field: str) -> Callable[[Task], Task]:
    """Return a change that turns an exact size into a minimum."""

    def loosen(each: Resources) -> Resources:
        values: dict[str, Any] = {field: _at_least(getattr(each, field))}
        return replace(each, **values)

    def change(task: Task) -> Task:
        return replace(task, resources=tuple(loosen(each) for each in task.resources))

    return change


def _at_least(size: Quantity | None) -> Quantity | None:
    return None if size is None else replace(size, is_minimum=True)


def _find_requested(task: Task, field: str) -> Any:
    """Return the field's value in the first alternative that sets it."""
    return next((value for each in task.resources if (value := getattr(each, field)) is not None), None)


def drop_fields(task: Task, *fields: str) -> Task:
    """Return the task without these fields of Resources in any alternative."""
    return _drop(*fields)(task)


def _drop(*fields: str) -> Callable[[Task], Task]:
    return _set(**dict.fromkeys(fields))


def _set(**values: object) -> Callable[[Task], Task]:
    def change(task: Task) -> Task:
        return replace(task, resources=tuple(replace(each, **values) for each in task.resources))  # type: ignore[arg-type]

    return change


def _set_goal(**values: object) -> Callable[[Task], Task]:
    def change(task: Task) -> Task:
        return replace(task, goal=replace(task.goal or Goal(), **values))  # type: ignore[arg-type]

    return change


def _find_deadline(task: Task, goal: Goal, make_plan: Planner) -> float | None:
    """Return the shortest feasible deadline in hours, rounded up to a tenth, with all else unchanged.

    None if the deadline is not the obstacle.
    """

    def fits(hours: float) -> bool:
        try:
            make_plan(_set_goal(deadline_hours=hours)(task))
        except NoOfferError:
            return False
        return True

    low = goal.deadline_hours or 0.1
    high = low
    for _ in range(DOUBLINGS_MAX):
        high *= 2
        if fits(high):
            break
    else:
        return None
    for _ in range(HALVINGS_MAX):
        if high - low <= 0.1:
            break
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    rounded = math.ceil(high * 10) / 10
    return rounded if rounded > (goal.deadline_hours or 0) else None
