"""Report progress: a line or a bar on stdout, and a JSON line in the progress file."""

import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

BAR_WIDTH = 20
# The details of a step that the screen shows; the files contain all of them.
SCREEN_DETAILS = ("validation_loss", "mfu")
FILE_DETAILS = ("busy_s",)  # for broker: no new step is expected for this time


class Progress:
    """Reports progress on the first rank; a silent instance (any other rank) does nothing, except in `note_node`."""

    def __init__(
        self, file: Path | None, *, total: int, is_silent: bool, unit: str = "tokens", screen: TextIO = sys.stdout
    ) -> None:
        """Append to `file`, if given, for a run of `total` steps. On a terminal, show steps as a progress bar."""
        self._file, self._total, self._unit = file, total, unit
        self._is_silent = is_silent
        self._screen, self._has_bar = screen, screen.isatty()
        self._first_step: int | None = None
        self._begin_s = time.monotonic()
        self._has_failed = False

    def report(
        self,
        *,
        step: int,
        event: str | None = None,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        checkpoint_step: int | None = None,
        **details: Any,
    ) -> None:
        """Report on stdout and in the file. Floats keep all digits, so that runs can be compared bit for bit."""
        if self._is_silent:
            return
        values = {"loss": loss, "tokens_per_s": tokens_per_s, "event": event, "checkpoint_step": checkpoint_step}
        self.note(step=step, **values, **details)
        words = [] if loss is None else [f"loss {loss:.4f}"]
        words += [] if tokens_per_s is None else [f"{tokens_per_s:,.0f} {self._unit}/s"]
        words += [] if event is None else [event]
        is_step = loss is not None
        shown = SCREEN_DETAILS if is_step else details.keys() - FILE_DETAILS
        words += [f"{name} {_short(value)}" for name, value in details.items() if name in shown]
        if self._has_bar and is_step:
            self._draw_bar(step, words)
        else:
            self._write_line("  ".join([f"step {step}/{self._total}", *words]))

    def note(self, *, step: int, **values: Any) -> None:
        """Append one line to the file only."""
        if not self._is_silent:
            self.note_node(step=step, **values)

    def note_node(self, *, step: int, **values: Any) -> None:
        """Append one line to this node's file, also on a silent instance: each node reports its own time."""
        if self._file is None:
            return
        line = {"time": time.time(), "step": step, "total": self._total}
        line |= {name: _or_null(value) for name, value in values.items()}
        try:
            append_line(self._file, line)
        except OSError as error:  # a full disk must not end a run whose checkpoints are in a bucket
            if not self._has_failed:
                print(f"warning: progress is not recorded: {error}", file=sys.stderr, flush=True)
            self._has_failed = True

    def print_text(self, text: str) -> None:
        """Print text on stdout only."""
        if not self._is_silent:
            self._write_line(text)

    def _write_line(self, text: str) -> None:
        clear = "\r\x1b[K" if self._has_bar else ""
        print(f"{clear}{text}", file=self._screen, flush=True)

    def _draw_bar(self, step: int, words: list[str]) -> None:
        done = BAR_WIDTH * step // max(1, self._total)
        words = [f"step {step}/{self._total}", "=" * done + "-" * (BAR_WIDTH - done), *words, self._estimate_end(step)]
        columns = shutil.get_terminal_size().columns
        print(f"\r\x1b[K{'  '.join(words)[: columns - 1]}", end="", file=self._screen, flush=True)
        if step >= self._total:
            print(file=self._screen)

    def _estimate_end(self, step: int) -> str:
        """Return the remaining time at the pace of this attempt, which may have begun at a later step."""
        if self._first_step is None:
            self._first_step, self._begin_s = step, time.monotonic()
            return ""
        steps = max(1, step - self._first_step)
        left_s = round((time.monotonic() - self._begin_s) / steps * (self._total - step))
        return f"{left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d} left"


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a JSON line to a file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A single small write in append mode: a reader, or a kill, leaves the line whole or absent.
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def _or_null(value: Any) -> Any:
    """Return None for non-finite floats, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
