"""Ends a process that hangs, after telling where: the stacks of all threads go to stderr.

A collective whose peer is gone, a file system that does not answer: neither raises, and a hung machine costs as much
as a busy one. The exit code asks the broker to start the run again (`recover_on_exit_codes`).
"""

import faulthandler
import os
import sys
import threading
import time

# sysexits.h: temporary failure, try again.
EXIT_CODE_HUNG = 75
# Where even the watching thread gets no turn, because the interpreter itself is held, torch-independent C code ends
# the process after so many times the limit, with exit code 1.
BACKSTOP_FACTOR = 1.5


class Watchdog:
    """Watches one process from `start` to `stop`; whoever makes headway calls `beat`."""

    def __init__(self, timeout_s: float) -> None:
        """End the process when `timeout_s` pass without a beat; 0 watches nothing."""
        self._timeout_s = timeout_s
        self._beat_s = time.monotonic()
        self._is_over = threading.Event()
        self._doing = "starting"

    def start(self) -> None:
        """Begin to watch."""
        if self._timeout_s:
            self.beat("starting")
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str) -> None:
        """Note headway and what comes next. Costs nothing, and may be called at every step."""
        self._doing = doing
        self._beat_s = time.monotonic()

    def stop(self) -> None:
        """Watch no longer."""
        self._is_over.set()
        if self._timeout_s:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        period_s = min(10.0, self._timeout_s / 4)
        while not self._is_over.is_set():
            # Set anew while this thread still gets its turn.
            faulthandler.dump_traceback_later(BACKSTOP_FACTOR * self._timeout_s + period_s, exit=True)
            if self._is_over.wait(period_s):
                break
            silence_s = time.monotonic() - self._beat_s
            if silence_s > self._timeout_s:
                self._end(silence_s)
        faulthandler.cancel_dump_traceback_later()

    def _end(self, silence_s: float) -> None:
        rank = os.environ.get("RANK", "0")
        print(
            f"error: rank {rank} hangs: no headway for {silence_s:.0f} s while {self._doing}; its threads were here "
            f"(`--watchdog.timeout_s` is {self._timeout_s:g})",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(all_threads=True)
        os._exit(EXIT_CODE_HUNG)  # nothing softer ends a process whose main thread is stuck
