"""broker from Python: tasks in, plans out.

import broker
plan = broker.plan("train.yaml")            # or YAML text, a mapping, or a Task
plan.choice.placement.offer.region, plan.choice.expected_usd
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from broker.app.market import Market, find_cache
from broker.app.planning import TaskLike, read_task
from broker.types import Plan

__all__ = ["TaskLike", "plan", "read_task"]


def plan(task: TaskLike, *, clouds: Collection[str] | None = None, cache: Path | None = None) -> Plan:
    """Rank every placement that fits, cheapest to finish first (per hour where no work is given). Starts nothing.

    `task` is as `read_task` takes it. `clouds` limits the plan to some clouds. Prices come from the book in `cache`, by
    default the one that the command line uses. Money is USD, time is hours.

    Raises TaskError for a wrong task, NoOfferError (with hints that were tried) where nothing fits, StateError where
    the price book does not open.
    """
    return Market(cache or find_cache()).plan(
        read_task(task), usable_clouds=None if clouds is None else frozenset(clouds)
    )
