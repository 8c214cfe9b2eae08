"""How long nodes may run while the broker is away, as the lease that they are given. Pure but for `find_lease_s`.

While the broker is away, the lease alone bounds the bill: it ends when the user's allowance, the budget or the time to
the deadline does, whichever is first. While the broker is there it renews the lease every `LEASE_EVERY_S`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from broker.clock import Clock
from broker.config import SETTINGS, Config, find_unattended
from broker.errors import UsageError
from broker.jobs.checkpoints import HERE
from broker.jobs.monitor import LEASE_EVERY_S
from broker.state.store import Store
from broker.task.measures import UNATTENDED_S_MIN, Duration
from broker.types import Cluster, Job, Plan, Task

UNATTENDED_S = 12 * 3600.0
# A late job still wants to finish, and a broker that is there lets it: past its deadline, and just before, it has this.
LATE_S = 3600.0
# Past the second when the budget is used up: a broker that is there ends the program then, and reads its log.
BUDGET_MARGIN_S = LEASE_EVERY_S / 2


def measure_allowance_s(
    task: Task, *, usd_hour: float, spent_usd: float = 0.0, submitted_s: float = 0.0, now_s: float = 0.0
) -> float:
    """Return the seconds that the nodes of a gang at `usd_hour` may run from now without their broker.

    12 h, 6 USD of the budget left, 2 USD/h -> 3 h. The deadline in 30 minutes -> 1 h. The lease is longer than the
    renewals are apart, except where the budget ends before the next one is due.
    """
    allowed_s = get_unattended_s(task)
    goal = task.goal
    if goal is not None and goal.deadline_hours is not None:
        left_s = submitted_s + goal.deadline_hours * 3600 - now_s
        allowed_s = min(allowed_s, max(left_s, LATE_S))
    if goal is not None and goal.budget_usd is not None and usd_hour > 0:
        left_usd = max(0.0, goal.budget_usd - spent_usd)
        allowed_s = min(allowed_s, left_usd / usd_hour * 3600 + BUDGET_MARGIN_S)
    return allowed_s


def find_lease_s(job: Job, cluster: Cluster, store: Store, clock: Clock) -> float:
    """The allowance of a job's gang now. Priced as a whole gang: a lost node may be replaced within the lease."""
    now_s = clock.now_s()
    has_budget = job.task.goal is not None and job.task.goal.budget_usd is not None
    return measure_allowance_s(
        job.task,
        usd_hour=cluster.placement.usd_hour,
        spent_usd=store.bills.spend_usd(job_id=job.id, now_s=now_s) if has_budget else 0.0,
        submitted_s=job.submitted_s,
        now_s=now_s,
    )


def get_unattended_s(task: Task) -> float:
    return UNATTENDED_S if task.unattended_s is None else task.unattended_s


def settle_unattended(tasks: Iterable[Task], default_s: float) -> tuple[Task, ...]:
    """Each with its allowance written down: what was told at launch may not change while a job lives."""
    return tuple(each if each.unattended_s is not None else replace(each, unattended_s=default_s) for each in tasks)


def read_unattended_s(config: Config) -> float:
    """The user's default. Raises UsageError that names the setting."""
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
    """One sentence for the user, or one a task where they differ; none for what runs on this machine only."""
    sentences: dict[str, str] = {}  # sentence -> the first task it is true of
    paid = [plan for plan in plans if any(each.placement.offer.cloud != HERE for each in plan.estimates)]
    for plan in paid:
        allowed_s = measure_allowance_s(plan.task, usd_hour=plan.choice.placement.usd_hour)
        sentences.setdefault(describe_allowance(allowed_s), plan.task.name or "the task")
    if len(sentences) == 1:
        return list(sentences)
    return [f"{name}: {sentence}" for sentence, name in sentences.items()]


def describe_allowance(allowed_s: float) -> str:
    return f"continues for up to {show_hours(allowed_s)} without this machine; a preemption meanwhile waits for it"


def show_hours(duration_s: float) -> str:
    """`12 h`, `1.5 h`, `45 min`."""
    minutes = math.floor(duration_s / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes / 60:.3g} h"
