"""Explain why placements with a lower hourly price were not chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from broker.formatting import format_usd
from broker.frozen import frozen
from broker.types import Estimate, Goal, Plan, Task


@frozen
class Rejected:
    """A placement with a lower hourly price than the choice, and why it was rejected.

    It is the best one of its kind: cloud, instance type and pricing model.

    `others` counts placements of the same kind elsewhere.
    """

    estimate: Estimate
    reason: str
    others: int


def lift_limits(task: Task) -> Task:
    """Return the task without its budget and required confidence, to plan what would fit without these limits.

    The deadline stays, so that each estimate keeps its chance of meeting it.
    """
    return replace(task, goal=replace(task.goal, budget_usd=None, keeps_late=True)) if task.goal else task


def list_losers(plan: Plan, unlimited: Plan) -> list[Rejected]:
    """List rejected placements by cost to finish. `unlimited` is the plan of `lift_limits(plan.task)`."""
    goal = plan.task.goal
    if goal is None or goal.work_hours is None:
        return []  # the choice has the lowest hourly price
    best = plan.choice
    first = dict[tuple[object, ...], Estimate]()
    count = dict[tuple[object, ...], int]()
    for each in unlimited.estimates:
        offer = each.placement.offer
        if each.placement.usd_hour >= best.placement.usd_hour:
            continue
        kind = (offer.cloud, offer.instance_type, each.placement.is_spot)
        first.setdefault(kind, each)
        count[kind] = count.get(kind, 0) + 1
    return [
        Rejected(estimate=each, reason="; ".join(_list_reasons(best, each, goal)), others=count[kind] - 1)
        for kind, each in first.items()
    ]


def _list_reasons(best: Estimate, loser: Estimate, goal: Goal) -> Iterator[str]:
    """List the violated limit, else the causes of the higher cost, the largest difference in dollars first."""
    chance = loser.deadline_chance
    if chance is not None and chance < goal.confidence:
        yield f"meets the deadline with {show_chance(chance)}; {show_chance(goal.confidence)} is required"
    if goal.budget_usd is not None and (loser.expected_usd or 0.0) > goal.budget_usd:
        yield f"{format_usd(loser.expected_usd or 0)} USD expected, which exceeds the budget"
        return
    if chance is not None and chance < goal.confidence:
        return
    one, other = best.breakdown, loser.breakdown
    if one is None or other is None:
        return
    price = loser.placement.usd_hour
    waste = (other.stall_hours + other.lost_hours + other.recovery_hours) - (
        one.stall_hours + one.lost_hours + one.recovery_hours
    )
    causes = [
        ((other.work_hours - one.work_hours) * price, _describe_slowdown(one.work_hours, other.work_hours)),
        (waste * price, f"preemptions and checkpoints cost {waste:.1f} h more"),
        (
            other.ondemand_hours * other.ondemand_usd_hour - one.ondemand_hours * one.ondemand_usd_hour,
            f"{other.ondemand_hours:.1f} h run on-demand",
        ),
        (other.egress_usd - one.egress_usd, f"data transfer costs {format_usd(other.egress_usd)} USD"),
    ]
    usd, words = max(causes)
    if usd > 0:
        yield words
    yield f"{format_usd(loser.expected_usd or 0)} USD to finish"


def _describe_slowdown(own: float, its: float) -> str:
    return f"{its / own:.1f} times slower" if own > 0 and its >= 1.05 * own else "slower"


def show_chance(chance: float) -> str:
    """Format a probability as a percentage, never as 0 or 100 % unless it is certain."""
    percent = chance * 100
    if 99.95 <= percent < 100:
        return ">99.9 %"
    if 0 < percent < 0.05:
        return "<0.1 %"
    return f"{percent:.1f} %"
