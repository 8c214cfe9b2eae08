"""Let the nodes of a job archive the results of `setup` for later starts, if that pays off, and report the outcome.

The agent does the work (`agent/agent_setup_steps.py`), because only a node knows how long `setup` took and how much it
wrote. This module supplies the terms of the decision: the starts that the market model still expects, and prices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from broker.clock import Clock
from broker.config import Config
from broker.errors import NoOfferError
from broker.jobs.acquisition import Planner
from broker.jobs.checkpoints import find_checkpoint_dir, is_here
from broker.jobs.gang import GangReport
from broker.jobs.replanning import cut_to_rest, drop_limits
from broker.jobs.setup_archives import KEPT_DAYS, record_place
from broker.optimizer.data_cost import CHECKPOINTS_KEPT, price_data
from broker.optimizer.egress import EgressTable
from broker.optimizer.forecast import forecast_plan
from broker.state.store import Store
from broker.types import (
    Attempt,
    CheckpointSpec,
    Cluster,
    Event,
    EventKind,
    Job,
    OutcomeKind,
    Placement,
    SetupResult,
    Task,
    make_event,
)

VARIABLE = "BROKER_SETUP_CACHE"  # as in the agent, which does not import broker
NAME = "setups"  # the folder next to those of the jobs' checkpoints
EVENTS = {"used": EventKind.SETUP_RESTORED, "kept": EventKind.SETUP_KEPT, "not_kept": EventKind.SETUP_NOT_KEPT}


class GibPrice(NamedTuple):
    """USD for each GiB of an archive: to write it and keep it until it expires, and to read it at a start."""

    kept: float
    read: float


class SetupCache:
    """The setup archives of one job."""

    def __init__(self, store: Store, planner: Planner, clock: Clock, config: Config) -> None:
        self._store = store
        self._planner = planner
        self._clock = clock
        self._config = config
        self._reported: dict[int, set[str]] = {}  # attempt -> results that were added to the job's events

    def make_envs(self, job: Job, attempt: Attempt, cluster: Cluster) -> dict[str, str]:
        """Return the variable that makes nodes use and keep an archive; empty for a task without `cache_setup`."""
        task = job.task
        if not task.recovery.caches_setup or not task.setup:
            return {}
        place = find_checkpoint_dir(self._config, task, cluster, name=NAME)
        if place is None:
            return {}
        record_place(self._store, place)
        earlier = [each for each in job.attempts if each.number < attempt.number and each.outcome]
        price = price_gib(attempt.placement, place)
        preemptions, hour_value_usd = self._forecast_rest(job)
        order = {
            "place": place,
            "setup_chars": len(task.setup),
            "starts": expect_starts(job, attempt, preemptions),
            "usd_hour": attempt.placement.usd_hour + hour_value_usd,
            "usd_gib_kept": price.kept,
            "usd_gib_read": price.read,
            "mounts": list(task.file_mounts),
            "checks_system": not is_here(cluster),
            "is_fresh": bool(earlier) and _has_failed(earlier[-1]),
        }
        return {VARIABLE: json.dumps(order)}

    def report(self, job: Job, attempt: Attempt, report: GangReport) -> None:
        """Record each new result of this attempt once, combined over all nodes."""
        found = {each.result for each in report.setups}
        if not found:
            return
        known = self._reported.get(attempt.number)
        if known is None:
            kinds = {kind: result for result, kind in EVENTS.items()}
            events = (each for each in self._store.events.list(job_id=job.id) if each.kind in kinds)
            known = {kinds[each.kind] for each in events if each.data.get("number") == attempt.number}
            self._reported[attempt.number] = known
        for result in sorted(found - known):
            known.add(result)
            self._store.events.add(describe_results(attempt, report.setups, result), job_id=job.id)

    def _forecast_rest(self, job: Job) -> tuple[float | None, float]:
        """Return the expected preemptions in the rest of the job, and the value of an hour in USD, as in its plan.

        None without a known amount of work, or if nothing fits. Then the value is that of the task, else 0.
        """
        given_usd = (job.task.goal.hour_value_usd or 0.0) if job.task.goal else 0.0
        if job.task.goal is None or job.task.goal.work_hours is None:
            return None, given_usd
        now_s = self._clock.now_s()
        rest = cut_to_rest(job, now_s=now_s, spent_usd=self._store.bills.spend_usd(job_id=job.id, now_s=now_s))
        if rest.goal is None or not rest.goal.work_hours:
            return 0.0, given_usd  # no start is saved
        try:
            plan = self._planner(drop_limits(rest), None)
        except NoOfferError:
            return None, given_usd
        forecast = forecast_plan(plan)
        return 0.0 if forecast is None else forecast.preemptions, plan.hour_value_usd or 0.0  # None: on-demand


def expect_starts(job: Job, attempt: Attempt, preemptions: float | None) -> float:
    """Return the expected number of starts after this one: one for each preemption.

    Without a forecast, a job on spot is expected to be preempted as often again as it has been, at least once: spot
    that has lasted for a while is likely to last as long again, and spot that was lost often will be lost often again.
    """
    if preemptions is not None:
        return preemptions
    return float(max(1, attempt.number - job.first_attempt)) if attempt.placement.is_spot else 0.0


def price_gib(placement: Placement, place: str) -> GibPrice:
    """Price one GiB as the planner prices checkpoints: storage, and egress between clouds; every node reads it."""
    if "://" not in place or place.startswith("file://"):
        return GibPrice(kept=0.0, read=0.0)
    one = Task(checkpoint=CheckpointSpec(size_gib=1.0, to=place))
    cost = price_data(one, placement.offer.cloud, placement.offer.region, EgressTable())
    storage_usd = cost.storage_usd_hour / CHECKPOINTS_KEPT * KEPT_DAYS * 24
    return GibPrice(kept=cost.checkpoint_usd + storage_usd, read=cost.restore_usd * placement.node_count)


def describe_results(attempt: Attempt, setups: Sequence[SetupResult], result: str) -> Event:
    """Return the event of one kind of result: the slowest node's times, and the additional cost of its start."""
    nodes = [each for each in setups if each.result == result]
    slowest, number = max(nodes, key=lambda each: each.took_s), attempt.number
    if EVENTS[result] is EventKind.SETUP_NOT_KEPT:
        return make_event(EventKind.SETUP_NOT_KEPT, number=number, reason=slowest.reason)
    setup_s, size_gib = slowest.setup_s, slowest.size_bytes / 2**30
    if EVENTS[result] is EventKind.SETUP_KEPT:
        return make_event(EventKind.SETUP_KEPT, number=number, setup_s=setup_s, size_gib=size_gib)
    return make_event(
        EventKind.SETUP_RESTORED,
        number=number,
        setup_s=setup_s,
        size_gib=size_gib,
        took_s=slowest.took_s,
        nodes=len(nodes),
        saved_usd=max(0.0, setup_s - slowest.took_s) / 3600 * attempt.placement.usd_hour,
    )


def _has_failed(attempt: Attempt) -> bool:
    """Return whether the program failed by itself: the results of `setup` may be the reason, so it must run again."""
    return attempt.outcome is not None and attempt.outcome.kind is OutcomeKind.PROGRAM_FAILED
