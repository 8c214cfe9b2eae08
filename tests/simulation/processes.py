"""A broker's process as its host sees it: it can be killed, stopped and resumed, and its disk may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from broker.state.store import Store
from tests.simulation.shuffled import CURRENT, ShuffledLoop

if TYPE_CHECKING:
    from tests.simulation.disk import SimulatedConnection


class Crash(BaseException):
    """A kill -9: no handler of the product may catch it."""


class Process:
    """A process. Once dead it has no effect, whichever of its tasks still wakes up: every port calls `check` first."""

    def __init__(
        self,
        name: str,
        loop: ShuffledLoop,
        *,
        on_point: Callable[[Process, str], None],
        on_fault: Callable[[str], None],
    ) -> None:
        self.name = name
        self.loop = loop
        self.account = ""  # that it is logged in to, from its start to its end
        self.is_alive = True
        self._held: set[str] = set()  # why it is stopped
        self.tasks: list[asyncio.Task[Any]] = []
        self.dead: asyncio.Future[None] = loop.create_future()
        self.was_killed = self.was_stopped = False
        self.main: asyncio.Task[Any] | None = None
        self.store: Store | None = None  # of a broker: the one that knows its epoch
        self.connections: list[SimulatedConnection] = []
        self.statements_left: int | None = None  # until one fails with `statement_fault`
        self.statement_fault = "sqlite:busy"
        self.is_fault_sticky = False
        self._on_point = on_point
        self.on_fault = on_fault

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        self.main = self.loop.begin(work, self)

    def check(self) -> None:
        if not self.is_alive:
            raise Crash(self.name)

    def pass_by(self, point: str) -> None:
        """Mark the instant just before or after an effect or commit: the process may be killed here."""
        self.check()
        self._on_point(self, point)
        self.check()

    def kill(self) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self.was_killed = True
        for connection in self.connections:
            connection.abandon()  # at once: the next writer finds no lock held by the dead process
        self.release()
        self.loop.call_world(0.0, self._terminate)

    @property
    def is_stopped(self) -> bool:
        return bool(self._held)

    def stop(self, why: str = "stop") -> None:
        """Send SIGSTOP, or suspend the whole machine; each reason has to end."""
        if self.is_alive:
            self.loop.stopped_count += not self._held
            self._held.add(why)
            self.was_stopped = True

    def resume(self, why: str = "stop") -> None:
        if why in self._held:
            self._held.discard(why)
            if not self._held:
                self.loop.stopped_count -= 1
                self.loop.unpark()

    def release(self) -> None:
        """Resume, whatever the reason for the stop was."""
        for why in sorted(self._held):
            self.resume(why)

    def kill_rest(self) -> None:
        """Kill what the exited process left running."""
        self.is_alive = False
        self._terminate()

    def mend(self) -> None:
        """Make the disk work again."""
        self.statements_left = None

    def prune(self) -> None:
        self.tasks = [task for task in self.tasks if not task.done()]

    def _terminate(self) -> None:
        for task in self.tasks:
            task.cancel()
        if not self.dead.done():
            self.dead.set_result(None)


def get_process() -> Process | None:
    process = CURRENT.get()
    assert process is None or isinstance(process, Process)
    return process


class ProcessClock:
    """The host's wall clock: it may jump, run fast or slow, and differ from the cloud's.

    A dead process cannot read it.
    """

    def __init__(self, loop: ShuffledLoop, *, offset_s: float = 0.0, drift: float = 0.0) -> None:
        self._loop = loop
        self._start_s = loop.time()
        self._drift = drift
        self.offset_s = offset_s

    def now_s(self) -> float:
        process = CURRENT.get()
        if process is not None and not process.is_alive:  # type: ignore[attr-defined]
            raise Crash
        now_s = self._loop.time()
        return now_s + self._drift * (now_s - self._start_s) + self.offset_s

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
