"""Ends a process that hangs, and prints the stacks of all threads to stderr.

A collective whose peer is gone, a file system that does not answer: neither raises, and a hung machine costs as much
as a busy one. The exit code asks the broker to start the run again (`recover_on_exit_codes`).
"""

import faulthandler
import os
import sys
import threading
import time
from dataclasses import dataclass

# sysexits.h: temporary failure, try again.
EXIT_CODE_HUNG = 75
# Where even the watching thread gets no turn, because the interpreter itself is held, torch-independent C code ends
# the process after this many times the limit, with exit code 1.
BACKSTOP_FACTOR = 1.5
PERIOD_S_MAX = 10.0


@dataclass(frozen=True, kw_only=True)
class Beat:
    """When progress was made (monotonic seconds), what came next, and how long that may take; 0 means no limit."""

    time_s: float
    doing: str
    limit_s: float

    @property
    def period_s(self) -> float:
        """Return the seconds between two checks."""
        return min(PERIOD_S_MAX, self.limit_s / 4 or PERIOD_S_MAX)


class Watchdog:
    """Watches one process from `start` to `stop`; code that makes progress calls `beat`."""

    def __init__(self, timeout_s: float, *, start_s: float | None = None) -> None:
        """End the process when `timeout_s` pass without a beat, or `start_s` before the first one; 0 is no limit.

        Without a limit for steps nothing is watched: a debugger may stop a start as well.
        """
        self.timeout_s = timeout_s
        self.start_s = timeout_s if start_s is None or not timeout_s else start_s
        self._is_over = threading.Event()
        self._is_watching = False
        self._beat = Beat(time_s=time.monotonic(), doing="starting", limit_s=self.start_s)

    def start(self) -> None:
        """Begin to watch."""
        if not self.timeout_s:
            return
        self._is_watching = True
        self.beat("starting", limit_s=self.start_s)
        self._arm_backstop()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str, *, limit_s: float | None = None) -> None:
        """Note progress and what comes next, which may take `limit_s`, by default `timeout_s`.

        May be called at every step: it costs nothing while the limit stays. Called by any thread.
        """
        limit_s = self.timeout_s if limit_s is None or not self.timeout_s else limit_s
        is_changed = limit_s != self._beat.limit_s
        # One assignment: the watching thread must not see a new limit with an old time.
        self._beat = Beat(time_s=time.monotonic(), doing=doing, limit_s=limit_s)
        if is_changed and self._is_watching:
            self._arm_backstop()

    def stop(self) -> None:
        """Watch no longer."""
        self._is_over.set()
        if not self._is_watching:
            return
        self._is_watching = False
        faulthandler.cancel_dump_traceback_later()

    def find_hang(self) -> Beat | None:
        """Return the last beat, if more time has passed since than its limit."""
        beat = self._beat
        return beat if beat.limit_s and time.monotonic() - beat.time_s > beat.limit_s else None

    def _arm_backstop(self) -> None:
        if limit_s := self._beat.limit_s:
            faulthandler.dump_traceback_later(BACKSTOP_FACTOR * limit_s + self._beat.period_s, exit=True)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._is_over.wait(self._beat.period_s):
            self._arm_backstop()  # while this thread still gets its turn
            if hang := self.find_hang():
                end_hung(hang)
        faulthandler.cancel_dump_traceback_later()


def end_hung(beat: Beat) -> None:
    """Tell where every thread is, and end the process."""
    rank = os.environ.get("RANK", "0")
    print(
        f"error: rank {rank} hangs: no progress for {time.monotonic() - beat.time_s:.0f} s while {beat.doing}; its "
        f"threads were here (the limit is {beat.limit_s:g} s; `--watchdog.timeout_s`, `.start_s` and `.checkpoint_s` "
        "set it)",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_CODE_HUNG)  # nothing softer ends a process whose main thread is stuck
