"""End a process that hangs, and print the stacks of all threads to stderr.

A collective with a lost peer or an unresponsive file system raises no error, and a hung machine costs as much as a busy
one. The exit code makes broker restart the run (`recover_on_exit_codes`).
"""

import faulthandler
import os
import sys
import threading
import time
from dataclasses import dataclass

# EX_TEMPFAIL in sysexits.h: temporary failure.
EXIT_CODE_HUNG = 75
# If even the watching thread does not run, because the GIL is held, faulthandler's C code ends the process after this
# multiple of the limit, with exit code 1.
BACKSTOP_FACTOR = 1.5
PERIOD_S_MAX = 10.0


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The time of the last progress (monotonic seconds), the next activity, and its limit in seconds; 0: no limit.

    `exit_code` is that of a process that hangs in this activity.
    """

    time_s: float
    doing: str
    limit_s: float
    exit_code: int = EXIT_CODE_HUNG

    @property
    def period_s(self) -> float:
        """Return the seconds between checks."""
        return min(PERIOD_S_MAX, self.limit_s / 4 or PERIOD_S_MAX)


class Watchdog:
    """Watches one process from `start` to `stop`; code that makes progress calls `beat`."""

    def __init__(self, timeout_s: float, *, start_s: float | None = None) -> None:
        """End the process after `timeout_s` without a beat, or `start_s` before the first one; 0: no limit.

        If `timeout_s` is 0, the start is not watched either, so that a debugger can stop it.
        """
        self.timeout_s = timeout_s
        self.start_s = timeout_s if start_s is None or not timeout_s else start_s
        self._is_over = threading.Event()
        self._is_due = threading.Event()  # the watching thread checks at once
        self._is_watching = False
        self._beat = Beat(time_s=time.monotonic(), doing="starting", limit_s=self.start_s)

    def start(self) -> None:
        """Start the watching thread."""
        if not self.timeout_s:
            return
        self._is_watching = True
        self.beat("starting", limit_s=self.start_s)
        self._arm_backstop()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str, *, limit_s: float | None = None, exit_code: int = EXIT_CODE_HUNG) -> None:
        """Record progress and the next activity, which may take `limit_s`, by default `timeout_s`.

        `exit_code`: the result of the process, if it hangs in this activity.

        Cheap enough for every step while the limit does not change. Thread-safe.
        """
        limit_s = self.timeout_s if limit_s is None or not self.timeout_s else limit_s
        is_changed = limit_s != self._beat.limit_s
        # One assignment: the watching thread must not see a new limit with an old time.
        self._beat = Beat(time_s=time.monotonic(), doing=doing, limit_s=limit_s, exit_code=exit_code)
        if is_changed and self._is_watching:
            self._arm_backstop()
            self._is_due.set()  # or it would sleep for the period of the longer limit, and the backstop come first

    def stop(self) -> None:
        """Stop watching."""
        self._is_over.set()
        self._is_due.set()
        if not self._is_watching:
            return
        self._is_watching = False
        faulthandler.cancel_dump_traceback_later()

    def find_hang(self) -> Beat | None:
        """Return the last beat if its limit has been exceeded, else None."""
        beat = self._beat
        return beat if beat.limit_s and time.monotonic() - beat.time_s > beat.limit_s else None

    def _arm_backstop(self) -> None:
        if limit_s := self._beat.limit_s:
            faulthandler.dump_traceback_later(BACKSTOP_FACTOR * limit_s + self._beat.period_s, exit=True)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while True:
            self._is_due.wait(self._beat.period_s)
            self._is_due.clear()
            if self._is_over.is_set():
                break
            self._arm_backstop()  # while this thread still runs
            if hang := self.find_hang():
                end_hung(hang)
        faulthandler.cancel_dump_traceback_later()


def end_hung(beat: Beat) -> None:
    """Print the stacks of all threads and end the process."""
    rank = os.environ.get("RANK", "0")
    print(
        f"error: rank {rank} hangs: no progress for {time.monotonic() - beat.time_s:.0f} s while {beat.doing}; its "
        f"threads were here (the limit is {beat.limit_s:g} s; `--watchdog.timeout_s`, `.start_s` and `.checkpoint_s` "
        "set it)",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(all_threads=True)
    os._exit(beat.exit_code)  # the only way to end a process with a blocked main thread
