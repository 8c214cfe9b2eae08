"""Run a map worker in a child process, so that a shard that ends the process (memory, a crash) is its shard's failure.

The parent imports nothing of the program and opens no connection: it stays small, so the kernel ends the child when
memory is short, and it may fork again. The next child records the failure, as the parent has no access to the output.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import sys
from dataclasses import dataclass
from types import FrameType

from trainers.map_leases import Lease
from trainers.preemption import EXIT_CODE_PREEMPTED, PreemptionNotice

SIZE_BYTES = 4096  # a lease has about 200
SET_PARENT_DEATH_SIGNAL = 1  # from linux/prctl.h
# Signals that end a process which exceeds its memory or crashes; others are sent on purpose.
FAULTS = {
    *(signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS),
    *(signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP),
}


@dataclass(frozen=True)
class Death:
    """The lease that a child held when it was ended by a signal, and the reason to report."""

    lease: Lease
    reason: str


class CurrentShard:
    """The shard that the child works on, in memory that it shares with the parent."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SIZE_BYTES)
        self.commits = 0
        self.note(None)

    def note(self, lease: Lease | None) -> None:
        """Record the lease that is worked on, or that there is none."""
        held = None if lease is None else [lease.number, lease.epoch, lease.content.decode()]
        text = json.dumps([self.commits, held]).encode()
        self._memory[: len(text) + 1] = text + b"\0"

    def read(self) -> tuple[int, Lease | None]:
        """Return how many shards the child has committed, and the lease that it held when it ended."""
        commits, held = json.loads(self._memory[:].split(b"\0", 1)[0])
        return commits, Lease(held[0], held[1], held[2].encode()) if held else None


def guard(current: CurrentShard, notice: PreemptionNotice, *, failures_max: int) -> Death | None:
    """Return in a child process, with the death of the child before it; in the parent, exit with the last child's code.

    The parent starts another child after a fault on a shard, until this has happened on `failures_max` different
    shards without a commit in between.
    """
    death: Death | None = None
    failed: set[int] = set()
    while True:
        current.note(None)
        parent = os.getpid()
        child = os.fork()
        if not child:
            _end_with(parent)
            return death
        code = _wait(child, notice)
        if code >= 0:
            sys.exit(code)
        if notice.is_given():  # ended because it did not stop in time
            sys.exit(EXIT_CODE_PREEMPTED)
        commits, lease = current.read()
        if -code not in FAULTS or lease is None:
            sys.exit(128 - code)
        cause = " (out of memory?)" if -code == signal.SIGKILL else ""
        death = Death(lease, f"the worker was ended by {signal.Signals(-code).name}{cause}")
        print(f"shard {lease.number}: {death.reason}", file=sys.stderr, flush=True)
        if commits:
            failed.clear()
        failed.add(lease.number)
        if len(failed) == failures_max:
            sys.exit(128 - code)


def _wait(child: int, notice: PreemptionNotice) -> int:
    """Return the exit code of the child, or minus its signal. A SIGTERM for the parent alone is passed on."""
    given = signal.getsignal(signal.SIGTERM)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if callable(given):
            given(number, frame)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    try:
        if notice.is_given():  # perhaps by a signal that came before the line above
            os.kill(child, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        signal.signal(signal.SIGTERM, given)


def _end_with(parent: int) -> None:
    """Let the kernel end this process with its parent, where it can (Linux)."""
    if sys.platform == "linux":
        import ctypes  # only needed here

        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
