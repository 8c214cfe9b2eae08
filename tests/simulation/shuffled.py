"""A loop on virtual time: a seed shuffles what is ready, and whole processes can be stopped."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Collection, Coroutine
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, Protocol

from tests.simulation.virtual import START_S


class Host(Protocol):
    """A process whose tasks this loop runs: stopped by SIGSTOP, it keeps everything and does nothing."""

    is_stopped: bool
    tasks: list[asyncio.Task[Any]]


CURRENT: ContextVar[Host | None] = ContextVar("process", default=None)


class ShuffledLoop(asyncio.BaseEventLoop):
    """A loop that never waits: when nothing is ready, time jumps to the next timer. Ready handles run in any order."""

    def __init__(self, random: Random, start_s: float = START_S) -> None:
        super().__init__()
        self._random = random
        self._time_s = start_s
        self._parked: list[asyncio.Handle] = []
        self._frozen: list[tuple[asyncio.TimerHandle, float]] = []  # and how long each still had to run
        self.stopped_count = 0  # stopped processes: only then every handle must be examined
        self.set_task_factory(_make_task)
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        return self._time_s

    def begin(self, work: Coroutine[Any, Any, Any], host: Host | None) -> asyncio.Task[Any]:
        """Start a task of `host`, or of the universe itself; everything it starts belongs to the same."""
        context = Context()
        context.run(CURRENT.set, host)
        return self.create_task(work, context=context)

    def call_world(self, delay_s: float, call: Any, *arguments: Any) -> None:
        """Act as `call_later`, whatever happens to the calling process."""
        self.call_later(delay_s, call, *arguments, context=Context())

    def freeze(self, hosts: Collection[Host]) -> None:
        """Freeze the timers of these processes, as on a machine that is suspended; see `thaw`."""
        going = []
        for handle in self._scheduled:
            if handle._context.get(CURRENT) in hosts:
                self._frozen.append((handle, handle._when - self._time_s))
            else:
                going.append(handle)
        heapq.heapify(going)
        self._scheduled = going

    def thaw(self) -> None:
        for handle, left_s in self._frozen:
            handle._when = self._time_s + left_s
            heapq.heappush(self._scheduled, handle)
        self._frozen = []

    def unpark(self) -> None:
        """Make handles parked for a resumed process ready again, in the order they came."""
        parked, self._parked = self._parked, []
        self._ready.extend(parked)

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        """Ignore handlers: processes are killed and stopped, which they cannot catch, and SIGTERM is never sent."""

    def remove_signal_handler(self, sig: int) -> bool:
        return True

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready and not self._stopping:
            if not scheduled:
                raise RuntimeError("nothing will ever happen: every task waits for another")
            self._time_s = max(self._time_s, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._time_s + 1e-6:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            if not handle._cancelled:
                ready.append(handle)
        if self.stopped_count:
            self._park()
        if len(ready) > 1:
            turn = list(ready)
            self._random.shuffle(turn)
            ready.clear()
        else:
            turn = list(ready)
            ready.clear()
        for handle in turn:
            if not handle._cancelled:
                handle._run()

    def _park(self) -> None:
        ready: deque[asyncio.Handle] = deque()
        for handle in self._ready:
            host = handle._context.get(CURRENT)
            (self._parked if host is not None and host.is_stopped else ready).append(handle)
        self._ready.clear()
        self._ready.extend(ready)

    def _process_events(self, event_list: Any) -> None:
        """Do nothing: there are no sockets here."""

    def _write_to_self(self) -> None:
        """Do nothing: there are no threads here."""


def _make_task(
    loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None, **named: Any
) -> asyncio.Task[Any]:
    context = context if context is not None else copy_context()
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context, **named)
    host = context.get(CURRENT)
    if host is not None:
        host.tasks.append(task)
    return task
