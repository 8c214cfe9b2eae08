"""The gateways of one service: their jobs, the files that they receive, and the sum of their reports.

A gateway is a managed job like a replica, without a row of its own: its request id names the service, its number and
the try, so that a restarted controller finds it. Its machine's agent replaces files and returns the load
(`gateway_link.py`); a gateway that the controller cannot reach keeps serving with its last files.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from broker.clock import Clock
from broker.errors import StateError
from broker.frozen import frozen
from broker.provision.refusals import draw_backoff_s
from broker.serve.files import GatewayBook, Load, LoadTotals, Routing, ServiceFolder, encode, read_file, write_file
from broker.serve.gateway_link import OTHER_USAGE, Exchange, GatewayLink
from broker.serve.gateway_task import find_listener, find_places, make_files, make_gateway_task
from broker.serve.keys import UsageBook, add_usage
from broker.serve.merging import find_largest, merge_loads, merge_totals
from broker.serve.observing import LOAD_AGE_S_MAX, name_region
from broker.serve.replicas import LOCAL
from broker.serve.scaling import Demand
from broker.state.jobs import REPLICA_REQUEST
from broker.state.store import Store
from broker.types import GATEWAYS_MAX, Cluster, GatewaySpec, Job, JobStatus, Service, ServiceEventKind, Task

NUMBERS = range(1, GATEWAYS_MAX + 1)
ANSWER_S = 0.2  # a step waits this long for answers: those of an open session take a few milliseconds
FAILURES_MAX = 3  # in a row, before any gateway was reached
BACKOFF_S_MAX = 300.0
SAVE_EVERY_S = 1.0
# After this time, a silent gateway counts with its last load. Until then, its load is unknown, and no replica is
# removed. Its machine answers the job's controller meanwhile: otherwise, it would have been replaced.
SILENT_S_MAX = 600.0

WriteProgram = Callable[..., Path]  # `gateway_task.write_program`


@frozen
class GatewayTry:
    """The newest job of a gateway. `count` is the number of its tries, `is_over` whether its machines are gone."""

    number: int
    job: Job | None
    count: int
    is_over: bool

    @property
    def may_serve(self) -> bool:
        """Return whether its balancer may have requests: it was started, and its machine is not confirmed gone."""
        attempts = self.job.attempts if self.job is not None and not self.is_over else ()
        return any(each.running_s is not None and each.ended_s is None for each in attempts)


def list_tries(store: Store, service: Service) -> Sequence[GatewayTry]:
    """Return the newest try of each gateway that the service may have."""
    unfinished = frozenset(store.jobs.list_unfinished_ids())
    return [_find_try(store, service, number, unfinished) for number in NUMBERS]


def _find_try(store: Store, service: Service, number: int, unfinished: frozenset[int]) -> GatewayTry:
    ids = store.jobs.list_request_ids(_name_request(service, number))
    job = store.jobs.get(max(ids)) if ids else None
    is_over = job is None or (job.status.is_terminal and job.id not in unfinished)
    return GatewayTry(number=number, job=job, count=len(ids), is_over=is_over)


def _name_request(service: Service, number: int) -> str:
    return f"{REPLICA_REQUEST}{service.name}/{service.uid}/gateway-{number}/"


def list_service_jobs(store: Store, service: Service) -> Sequence[int]:
    """Return the jobs of all replicas and gateways of a service, including those that were replaced."""
    return store.jobs.list_request_ids(f"{REPLICA_REQUEST}{service.name}/{service.uid}/")


def find_cluster(store: Store, job: Job | None) -> Cluster | None:
    """Return the machine of a gateway whose program runs."""
    if job is None or job.status is not JobStatus.RUNNING or not job.attempts:
        return None
    cluster = store.clusters.get(job.attempts[-1].cluster)
    return cluster if cluster is not None and cluster.nodes else None


def read_loads(folder: ServiceFolder, *, now_s: float) -> Mapping[int, Load]:
    """Return the recent loads of gateways that a controller saved last; none if they cannot be read."""
    loads = read_book(folder).loads
    return {number: each for number, each in loads.items() if now_s - each.time_s <= LOAD_AGE_S_MAX}


def read_book(folder: ServiceFolder) -> GatewayBook:
    """Return the loads that a controller saved last, however old; empty if they cannot be read."""
    with suppress(StateError):
        return read_file(folder.gateways, GatewayBook) or GatewayBook()
    return GatewayBook()


def read_merged_load(folder: ServiceFolder, *, now_s: float) -> Load | None:
    """Return the joint load of the gateways that report.

    Its totals are those of all gateways that ever did, so that they never fall: Prometheus would take that for a
    restart of all of them, and count what is left once more.
    """
    load = merge_loads(list(read_loads(folder, now_s=now_s).values()), is_complete=False)
    book = read_book(folder)
    totals = merge_totals([*book.ended.values(), *(each.totals for each in book.loads.values())])
    return load and replace(load, totals=totals)


class Gateways:
    """Starts, replaces and instructs the gateways of a service. All methods may be repeated."""

    def __init__(
        self, *, store: Store, clock: Clock, exchange: Exchange, write_program: WriteProgram, folder: ServiceFolder
    ) -> None:
        self._store, self._clock, self._folder = store, clock, folder
        self._exchange, self._write_program = exchange, write_program
        self._links: dict[int, GatewayLink] = {}
        self._tries: Sequence[GatewayTry] = ()
        self._failures = {number: 0 for number in NUMBERS}
        self._failed: set[int] = set()  # jobs that are counted
        self._next_start_s = {number: -math.inf for number in NUMBERS}
        self._silent_since_s: dict[int, float] = {}
        self._saved_s = -math.inf
        self._saved_usage: dict[int, UsageBook] = {}

    def count_balancers(self) -> int:
        """Return how many balancers may have requests, at least one."""
        return max(1, sum(each.may_serve for each in self._tries))

    def merge(self) -> Load | None:
        """Return the load of the service; None if no gateway reports."""
        heard = {number: link.load for number, link in self._links.items() if link.is_heard()}
        is_complete = all(each.number in heard for each in self._tries if each.may_serve)
        return merge_loads([load for load in heard.values() if load is not None], is_complete=is_complete)

    def measure(self) -> Demand:
        """Return the demand at all gateways."""
        serving = [each.number for each in self._tries if each.may_serve]
        silent, long_silent = self._find_silent(serving)
        found = [link.last if number in long_silent else link.measure() for number, link in self._links.items()]
        return Demand(
            qps=sum(each.qps for each in found),
            in_flight=sum(each.in_flight for each in found),
            ttft_p95_s=find_largest(each.ttft_p95_s for each in found),
            tpot_p95_s=find_largest(each.tpot_p95_s for each in found),
            settled_count=max((each.settled_count for each in found), default=0),
            ready_count=max((each.ready_count for each in found), default=0),
            is_known=bool(serving) and silent <= long_silent,
        )

    def _find_silent(self, serving: Sequence[int]) -> tuple[set[int], set[int]]:
        """Return the serving gateways that do not report, and those that have not reported for a long time."""
        now_s = self._clock.now_s()
        silent = {number for number in serving if number not in self._links or not self._links[number].is_heard()}
        self._silent_since_s = {number: self._silent_since_s.get(number, now_s) for number in silent}
        return silent, {number for number in silent if now_s - self._silent_since_s[number] >= SILENT_S_MAX}

    async def follow(self, service: Service, task: Task, spec: GatewaySpec) -> None:
        """Observe the gateways, push the newest routing file, and adopt their reports."""
        self._tries = list_tries(self._store, service)
        with suppress(StateError):  # damaged: the controller writes another
            calls = self.push(service, task, spec, read_file(self._folder.routing, Routing))
            if calls:
                await asyncio.wait(calls, timeout=ANSWER_S)
        self._save()

    def push(
        self, service: Service, task: Task, spec: GatewaySpec, routing: Routing | None
    ) -> Sequence[asyncio.Task[None]]:
        """Begin to bring each gateway that runs up to date; return the calls, which need not be awaited."""
        calls = []
        for each in self._tries:
            cluster = find_cluster(self._store, each.job)
            if cluster is None or routing is None or each.number > spec.count:
                continue
            listener = find_listener(service, task, spec, each.number)
            others = self._add_usage_but(each.number)
            files = {OTHER_USAGE: encode(others).decode()} if others.keys else {}
            own = replace(routing, region=name_region(cluster.placement.offer))
            files |= make_files(self._folder, own, listener, each.number)
            calls.append(self._find_link(each.number).push(cluster, files))
        return [call for call in calls if call is not None]

    def reconcile(self, service: Service, task: Task, spec: GatewaySpec) -> None:
        """Start missing gateways, and end surplus ones."""
        for each in self._tries:
            if each.number > spec.count:
                self._end(each)
            elif each.is_over:
                self._replace(service, task, spec, each)
            elif (link := self._links.get(each.number)) is not None and link.is_heard():
                self._failures[each.number] = 0

    def take_down(self, service: Service) -> bool:
        """End all gateways; return whether their machines are gone."""
        self._tries = list_tries(self._store, service)
        for each in self._tries:
            self._end(each)
        return all(each.is_over for each in self._tries)

    def _end(self, gateway: GatewayTry) -> None:
        if (link := self._links.pop(gateway.number, None)) is not None:
            link.stop()
        if gateway.job is not None and not gateway.job.status.is_terminal:
            self._store.jobs.request_cancel(gateway.job.id)

    def _replace(self, service: Service, task: Task, spec: GatewaySpec, last: GatewayTry) -> None:
        """Start a gateway whose machine is gone, later after each failure; give up if none was ever reached."""
        number, now_s = last.number, self._clock.now_s()
        if last.job is not None and last.job.id not in self._failed:
            self._failed.add(last.job.id)
            self._failures[number] += 1
            self._next_start_s[number] = now_s + draw_backoff_s(self._failures[number], cap_s=BACKOFF_S_MAX)
        reason = (last.job.failure or "its program ended") if last.job is not None else ""
        if self._failures[number] >= FAILURES_MAX and not self._folder.gateways.exists():
            if not service.failure:
                with self._store.transaction():
                    self._store.services.set_failure(service.name, f"gateway {number}: {reason}")
                    self._add_event(service, ServiceEventKind.FAILED, f"gateway {number}: {reason}")
                self._failures[number] = 0  # an update clears the failure, and is tried again
            return
        if service.failure and not self._folder.gateways.exists():
            return
        if now_s < self._next_start_s[number]:
            return
        is_here = find_places(task, spec)[number - 1].cloud == LOCAL
        program = self._write_program(self._folder, is_here=is_here)
        made = make_gateway_task(service, task, spec, number, program)
        with self._store.transaction():
            if last.job is not None:
                self._add_event(service, ServiceEventKind.GATEWAY_LOST, f"{number} was lost: {reason}")
            request = f"{_name_request(service, number)}{last.count + 1}"
            self._store.jobs.add(made.name or "", made, request)
            self._add_event(service, ServiceEventKind.GATEWAY_STARTED, str(number))

    def _add_event(self, service: Service, kind: ServiceEventKind, detail: str) -> None:
        self._store.services.add_event(service.name, kind, detail=detail)

    def _find_link(self, number: int) -> GatewayLink:
        if number not in self._links:
            usage = None
            with suppress(StateError):
                usage = read_file(self._folder.gateway_usage(number), UsageBook)
            book = read_book(self._folder)
            self._links[number] = GatewayLink(
                self._exchange, usage=usage or UsageBook(), load=book.loads.get(number),
                ended=book.ended.get(number, LoadTotals()), clock=self._clock,
            )  # fmt: skip
        return self._links[number]

    def _add_usage_but(self, number: int) -> UsageBook:
        return add_usage(self._find_link(other).usage for other in NUMBERS if other != number)

    def _save(self) -> None:
        """Save usage, then loads, for commands and for the next controller."""
        usage = {number: self._find_link(number).usage for number in NUMBERS}
        if usage != self._saved_usage:
            for number, book in usage.items():
                if book.keys and book != self._saved_usage.get(number):
                    write_file(self._folder.gateway_usage(number), book)
            if any(book.keys for book in usage.values()):
                write_file(self._folder.usage, add_usage(usage.values()))
            self._saved_usage = usage
        loads = {number: link.load for number, link in self._links.items() if link.load is not None}
        if loads and self._clock.now_s() - self._saved_s >= SAVE_EVERY_S:
            self._saved_s = self._clock.now_s()
            ended = {number: link.ended for number, link in self._links.items() if link.ended.responses}
            write_file(self._folder.gateways, GatewayBook(loads=loads, ended=ended))
