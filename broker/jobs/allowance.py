"""Compute the lease of a job's nodes: how long they may run without the broker.

Pure; `job_limits.py` supplies the facts.

While the broker is unavailable, only the lease limits the cost. It ends with the user's allowance, the budget, the
deadline or `max_duration`, whichever comes first; on machines that cannot terminate themselves, nothing ends it. A
running broker renews the lease every `LEASE_EVERY_S`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from broker.clouds import WITHOUT_SELF_TERMINATION
from broker.config import SETTINGS, Config, find_unattended
from broker.errors import UsageError
from broker.jobs.checkpoints import HERE
from broker.jobs.monitor import LEASE_EVERY_S
from broker.task.measures import UNATTENDED_S_MIN, Duration
from broker.types import Plan, Task

UNATTENDED_S = 12 * 3600.0
# A running broker lets a late job finish, so the deadline alone never shortens the lease below this.
LATE_S = 3600.0
# Added after the budget is used up: a running broker then ends the program and still reads its log.
BUDGET_MARGIN_S = LEASE_EVERY_S / 2


def measure_allowance_s(
    task: Task,
    *,
    usd_hour: float,
    spent_usd: float = 0.0,
    submitted_s: float = 0.0,
    now_s: float = 0.0,
    used_s: float = 0.0,
) -> float:
    """Return the seconds for which a gang that costs `usd_hour` may run from now without the broker.

    Examples: 12 h allowed, 6 USD of budget remaining at 2 USD/h -> 3 h; deadline in 30 minutes -> 1 h. The lease
    outlasts the renewal interval unless the budget or `max_duration` (of which `used_s` have passed) ends before the
    next renewal.
    """
    allowed_s = get_unattended_s(task)
    goal = task.goal
    if goal is not None and goal.deadline_hours is not None:
        left_s = submitted_s + goal.deadline_hours * 3600 - now_s
        allowed_s = min(allowed_s, max(left_s, LATE_S))
    if goal is not None and goal.budget_usd is not None and usd_hour > 0:
        left_usd = max(0.0, goal.budget_usd - spent_usd)
        allowed_s = min(allowed_s, left_usd / usd_hour * 3600 + BUDGET_MARGIN_S)
    if task.max_duration_s is not None:
        allowed_s = min(allowed_s, max(0.0, task.max_duration_s - used_s))
    return allowed_s


def get_unattended_s(task: Task) -> float:
    """Return the seconds for which a task's machines may continue unattended, 12 h by default."""
    return UNATTENDED_S if task.unattended_s is None else task.unattended_s


def apply_unattended_default(tasks: Iterable[Task], default_s: float) -> tuple[Task, ...]:
    """Return the tasks with an explicit allowance, so that a later change of the default does not affect a live job."""
    return tuple(task if task.unattended_s is not None else replace(task, unattended_s=default_s) for task in tasks)


def read_unattended_s(config: Config) -> float:
    """Return the user's default in seconds. Raises UsageError, which names the setting."""
    value = find_unattended(config)
    if value is None:
        return UNATTENDED_S
    found_s = Duration(bare_unit="h").read_value(value)
    if found_s is None or found_s < UNATTENDED_S_MIN:
        raise UsageError(
            f"{config.home / SETTINGS}: `unattended` is `{value}`",
            hints=('write a duration of at least 15m: `unattended = "12h"`',),
        )
    return float(found_s)


def describe_allowances(plans: Sequence[Plan]) -> Sequence[str]:
    """Return one sentence for the user, or one per task if they differ; none for tasks that only run locally."""
    sentences: dict[str, str] = {}  # sentence -> the first task that it applies to
    for plan in plans:
        clouds = {estimate.placement.offer.cloud for estimate in plan.estimates}
        if clouds <= {HERE}:
            continue
        choice = plan.choice.placement
        allowed_s = measure_allowance_s(plan.task, usd_hour=choice.usd_hour)
        sentence = describe_allowance(allowed_s, choice.offer.cloud, others=clouds)
        sentences.setdefault(sentence, plan.task.name or "the task")
    if len(sentences) == 1:
        return list(sentences)
    return [f"{name}: {sentence}" for sentence, name in sentences.items()]


def describe_allowance(allowed_s: float, cloud: str, *, others: Collection[str] = ()) -> str:
    """Describe what this cloud's machines do while this machine is unavailable.

    `others`: clouds that may be used too.
    """
    waits = "preemptions are handled when it is back"
    if cloud in WITHOUT_SELF_TERMINATION:
        return (
            "continues, and costs money, while this machine is unavailable, even beyond budget and deadline, because "
            f"machines of {cloud} cannot terminate themselves; {waits}"
        )
    if unending := ", ".join(sorted({*others} & {*WITHOUT_SELF_TERMINATION})):
        waits = f"as long as it is unavailable on {unending}, whose machines cannot terminate themselves; {waits}"
    return f"continues for up to {show_hours(allowed_s)} without this machine; {waits}"


def show_hours(duration_s: float) -> str:
    """Format as `12 h`, `1.5 h` or `45 min`."""
    minutes = math.floor(duration_s / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes / 60:.3g} h"
