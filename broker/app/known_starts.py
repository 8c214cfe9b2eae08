"""Plan with start times measured by own jobs, if `setup` is restored from an archive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from broker.errors import StateError

if TYPE_CHECKING:
    from broker.app.container import Context
    from broker.types import Job, Plan, Task


def find_restart_s(context: Context, task: Task, job: Job | None = None) -> float | None:
    """Return the seconds of a start that restores `setup` from an archive; None without archive or state folder."""
    if not task.recovery.caches_setup or not task.setup:
        return None
    from broker.jobs.setup_starts import find_restored_start

    try:
        if not context.has_store:
            return None
        found = find_restored_start(context.store, task, now_s=context.clock.now_s(), job=job)
    except StateError:
        return None  # planning does not depend on it
    return found.start_s if found else None


def plan_with_known_starts(context: Context, task: Task, plan: Callable[[Task], Plan]) -> Plan:
    """Plan a task with measured start times; the returned plan contains the task as it was given."""
    start_s = find_restart_s(context, task)
    if start_s is None:
        return plan(task)
    from broker.jobs.replanning import expect_starts_of

    return replace(plan(expect_starts_of(task, start_s)), task=task)
