"""Where to try next. Pure: the plan's order, changed only by where the job has just been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker.types import Attempt, JobRecovery, Plan, Task

LEAVE_REGION = "EAGER_NEXT_REGION"  # SkyPilot's name


def order_plan(plan: Plan, attempts: Sequence[Attempt]) -> Plan:
    """By default the same place first, then the plan's order; EAGER_NEXT_REGION puts the last region at the end."""
    if not attempts:
        return plan
    last = attempts[-1].placement
    if get_recovery(plan.task).strategy == LEAVE_REGION:
        region = (last.offer.cloud, last.offer.region)
        ordered = sorted(plan.estimates, key=lambda e: (e.placement.offer.cloud, e.placement.offer.region) == region)
    else:
        place = (last.offer.cloud, last.offer.zone, last.offer.instance_type, last.is_spot, last.node_count)
        ordered = sorted(
            plan.estimates,
            key=lambda e: (
                (
                    e.placement.offer.cloud,
                    e.placement.offer.zone,
                    e.placement.offer.instance_type,
                    e.placement.is_spot,
                    e.placement.node_count,
                )
                != place
            ),
        )
    return replace(plan, estimates=tuple(ordered))


def get_recovery(task: Task) -> JobRecovery:
    """The first alternative that asks for anything speaks for the task."""
    asked = (resources.job_recovery for resources in task.resources)
    return next((recovery for recovery in asked if recovery != JobRecovery()), JobRecovery())
