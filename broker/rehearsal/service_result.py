"""The result of the rehearsal of a service: times, requests, the bill, and findings for the real service."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from broker.app.services import find_ondemand_usd_hour
from broker.jobs.log_files import get_log_path
from broker.rehearsal.cloud import NOTICE_S_MAX
from broker.rehearsal.request_load import RequestTally
from broker.rehearsal.result import find_gang_hazard, find_missing_module, name_place, read_last_words
from broker.rehearsal.service_run import ServiceDriver
from broker.rehearsal.service_verdict import (
    Orphans,
    judge_availability,
    judge_recoveries,
    judge_requests,
    judge_start,
    judge_teardown,
    judge_warned,
)
from broker.rehearsal.uptime import ReadyCount, Uptime, measure_uptime
from broker.rehearsal.verdict import Finding
from broker.types import JobStatus


@dataclass(frozen=True, kw_only=True)
class ServiceRehearsal:
    """The result. Times and money are simulated, except `start_s`, `real_s`, `grace_s` and the times of requests."""

    service: str
    failure: str
    uptime: Uptime
    requests: RequestTally
    preemptions: int
    forced_preemptions: int  # of them
    refusals: int
    notices: int
    notices_ignored: int
    places: tuple[str, ...]  # of the machines that were ready, in that order
    has_spot: bool
    availability: float | None
    hazard: float  # preemptions per hour of one replica where the first one ran, by the market model
    total_s: float
    paid_usd: float
    ondemand_usd: float | None  # of the wanted replicas over the whole time; None if there is no such offer
    start_s: float | None  # median, from the start of a program to its readiness
    left: Orphans
    real_s: float
    has_exited: bool = False  # the program of the newest replica
    last_words: str = ""  # of its log, if not all replicas became ready
    missing_module: str = ""  # that Python could not import, if not all replicas became ready
    grace_s: float = NOTICE_S_MAX  # real seconds from a warning to the end

    @property
    def findings(self) -> tuple[Finding, ...]:
        """List findings, most important first."""
        return (
            *judge_start(
                self.uptime,
                failure=self.failure,
                has_exited=self.has_exited,
                last_words=self.last_words,
                missing_module=self.missing_module,
            ),
            *judge_recoveries(self.uptime, has_spot=self.has_spot),
            *judge_availability(self.uptime, availability=self.availability, hazard=self.hazard),
            *judge_requests(self.requests, self.uptime, availability=self.availability),
            *judge_warned(given=self.notices, ignored=self.notices_ignored, grace_s=self.grace_s),
            *judge_teardown(self.left),
        )

    def describe(self) -> dict[str, Any]:
        """Return everything, JSON-ready."""
        from broker.formatting import to_plain

        data = {name: to_plain(getattr(self, name)) for name in self.__dataclass_fields__}
        return {**data, "findings": to_plain(self.findings)}


def make_service_rehearsal(driver: ServiceDriver) -> ServiceRehearsal:
    """Collect the result from the driver, the store and the clouds before the state folder is deleted."""
    context, watch = driver.context, driver.watch
    task, clouds = context.stage.task, list(context.rehearsed.values())
    uptime = measure_uptime(watch.counts, watch.losses)
    first = watch.placements[0] if watch.placements else None
    has_started = uptime.start_s is not None
    newest = context.store.jobs.get(max(watch.jobs, default=0))
    log = get_log_path(context.config.logs, newest.id) if newest is not None and not has_started else None
    return ServiceRehearsal(
        service=context.service,
        failure="" if has_started else driver.failure,
        uptime=uptime,
        requests=driver.requests.tally,
        preemptions=sum(cloud.preemptions for cloud in clouds),
        forced_preemptions=len(driver.forced_preemptions),
        refusals=sum(cloud.refusals for cloud in clouds),
        notices=sum(each.notice_s > 0 for each in driver.forced_preemptions),
        notices_ignored=sum(cloud.ignored_notices for cloud in clouds),
        places=tuple(name_place(each) for each in watch.placements),
        has_spot=any(each.is_spot for each in watch.placements),
        availability=driver.spec.availability,
        hazard=find_gang_hazard(first, task.num_nodes) if first is not None else 0.0,
        total_s=watch.counts[-1].time_s - watch.counts[0].time_s if watch.counts else 0.0,
        paid_usd=context.store.bills.spend_usd(now_s=context.clock.now_s()),
        ondemand_usd=price_ondemand(watch.counts, find_ondemand_usd_hour(context, task)),
        start_s=median(watch.starts_s) if watch.starts_s else None,
        left=driver.left,
        real_s=driver.real_s,
        has_exited=newest is not None and newest.status is JobStatus.FAILED,
        last_words=read_last_words(log) if log else "",
        missing_module=find_missing_module(log) if log else "",
        grace_s=min(max((each.notice_s for each in driver.forced_preemptions), default=NOTICE_S_MAX), NOTICE_S_MAX),
    )


def price_ondemand(counts: Sequence[ReadyCount], usd_hour: float) -> float | None:
    """Return the on-demand price of the wanted replicas over the whole time, in USD; None without a price."""
    if math.isinf(usd_hour):
        return None
    return sum((after.time_s - each.time_s) / 3600 * each.wanted * usd_hour for each, after in pairwise(counts))
