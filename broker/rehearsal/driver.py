"""Drive a rehearsal to its end in this process: the daemon's loop, forced preemptions, and progress output."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from broker.clock import SystemClock, within
from broker.errors import CloudError
from broker.formatting import format_duration
from broker.jobs.daemon import run_daemon
from broker.rehearsal.cloud import NOTICE_S, NOTICE_S_MAX
from broker.rehearsal.context import RehearsalContext
from broker.state.events import EventRow
from broker.types import Cluster

POLL_S = 0.25
LINE_EVERY_S = 2.0
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Rehearsed = TypeVar("Rehearsed", bound=RehearsalContext)


@dataclass(frozen=True, kw_only=True)
class ForcedPreemption:
    """A forced preemption of all nodes. `step` is the newest known step, `notice_s` the length of the warning."""

    attempt: int
    step: int | None
    notice_s: float


class ProgressBar(Protocol):
    """A progress bar with a text."""

    def describe(self, text: str) -> None:
        """Set the text next to the bar."""

    def update(self, completed: float, *, total: float | None = None) -> None:
        """Set the progress, and the total if it is given."""


@dataclass
class Driver(ABC, Generic[Rehearsed]):
    """Drive the controllers of one rehearsal until they end, and preempt nodes `preemptions` times."""

    context: Rehearsed
    preemptions: int
    notice_s: float | None  # None: first no warning, then alternately the cloud's and none
    write: Callable[[str], None]
    bar: ProgressBar | None = None  # shows progress instead of lines, on a terminal
    forced_preemptions: list[ForcedPreemption] = field(default_factory=list)
    real_s: float = 0.0
    _line_s: float = 0.0
    _reported: int = 0  # the newest event

    async def run(self) -> None:
        """Run to the end. An interrupt terminates all nodes, then raises KeyboardInterrupt."""
        context = self.context
        self.submit()
        driving = asyncio.ensure_future(self._run_daemon())
        begin_s, interrupted = SystemClock().now_s(), asyncio.Event()
        _listen(interrupted)
        try:
            while not driving.done() and not interrupted.is_set():
                for cloud in context.rehearsed.values():
                    with contextlib.suppress(CloudError):
                        await cloud.take_due()
                await self.poll()
                with contextlib.suppress(TimeoutError):
                    await within(interrupted.wait(), POLL_S)
            if interrupted.is_set() or not self.is_over():
                interrupted.set()  # the daemon itself exits on SIGTERM: the next one terminates the nodes
                self.write("interrupted: terminating the nodes ...")
                self.request_end()
                await driving
                _listen(interrupted)
                await self._run_daemon()
            await driving
            await self.check_end()
        finally:
            for cloud in context.rehearsed.values():
                await cloud.end_all(context.config.owner)
        self.report_events()
        self.real_s = SystemClock().now_s() - begin_s
        if interrupted.is_set():
            raise KeyboardInterrupt

    @abstractmethod
    def submit(self) -> None:
        """Record the job or service in the store."""

    @abstractmethod
    async def poll(self) -> None:
        """Report progress, set the pace of the clock, and preempt nodes when it is time."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the controllers have ended."""

    @abstractmethod
    def request_end(self) -> None:
        """Request the end of the job or service; repeated calls change nothing."""

    async def check_end(self) -> None:
        """Inspect the clouds after the controllers have ended, before any orphans are terminated."""

    @abstractmethod
    def report_events(self) -> None:
        """Print the events since the last call."""

    def _run_daemon(self) -> Coroutine[Any, Any, None]:
        context = self.context
        return run_daemon(
            store=context.store,
            make_controller=context.make_any_controller,
            provisioner=context.provisioner,
            clock=context.clock,
            config=context.config,
            idle_s=0,
        )

    def report_market(self, message: str) -> None:
        """Print an event of the market with its simulated time."""
        self.write(f"{self.stamp()} ! {message}")

    def list_new_events(self, jobs: Collection[int]) -> Sequence[EventRow]:
        """List the events of these jobs since the last call."""
        events = self.context.store.events.list(after=self._reported)
        self._reported = max((each.id for each in events), default=self._reported)
        return [each for each in events if each.job_id in jobs]

    def report_event(self, time_s: float, message: str) -> None:
        """Print an event with its simulated time."""
        self.write(f"{self.stamp(time_s)} * {message}")

    def is_line_due(self) -> bool:
        """Return whether to show progress now: always with a bar, otherwise once every LINE_EVERY_S."""
        real_s = SystemClock().now_s()
        if self.bar is None and real_s - self._line_s < LINE_EVERY_S:
            return False
        self._line_s = real_s
        return True

    async def preempt(self, clusters: Sequence[Cluster], *, attempt: int, step: int | None = None) -> None:
        """Preempt all nodes of these clusters, which are in one market."""
        first = clusters[0]
        cloud = self.context.rehearsed[first.placement.offer.cloud]
        notice_s = self._choose_notice_s(first)
        self.forced_preemptions.append(ForcedPreemption(attempt=attempt, step=step, notice_s=notice_s))
        warning = f"with {format_duration(min(notice_s, NOTICE_S_MAX))} notice" if notice_s else "without notice"
        place = first.placement.offer.zone or first.placement.offer.region
        self.report_market(f"the spot market of {place} preempts all nodes {warning}")
        try:
            await cloud.preempt_nodes([node.id for each in clusters for node in each.nodes], notice_s=notice_s)
        except CloudError as error:  # killing a process tree is slow on a busy machine; later polls find it gone
            self.report_market(f"the preemption is slow: {error.message}")

    def _choose_notice_s(self, cluster: Cluster) -> float:
        if self.notice_s is not None:
            return self.notice_s
        return NOTICE_S.get(cluster.placement.offer.cloud, 30.0) if len(self.forced_preemptions) % 2 else 0.0

    def stamp(self, time_s: float | None = None) -> str:
        """Format the simulated time since the start: `  4h 07m`."""
        now_s = self.context.clock.now_s() if time_s is None else time_s
        minutes = int(max(0.0, now_s - self.context.start_s) // 60)
        return f"{minutes // 60:3d}h {minutes % 60:02d}m"


def _listen(interrupted: asyncio.Event) -> None:
    for number in INTERRUPTS:
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
