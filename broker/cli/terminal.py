"""Progress, live views and colour on a terminal; plain lines in a pipe, with `NO_COLOR` and with `TERM=dumb`.

All drawing goes through this module. `rich` is imported when the first bar or view opens; colour needs no library, so
`broker plan` starts as fast on a terminal as in a pipe. Output goes to stderr, except views that replace a table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

STEPS_PRINTED = 4  # lines per bar in a pipe
RESET = "\x1b[0m"
HEADING = "\x1b[1m"
GOOD, WAITING, BAD, FAINT, ERROR = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[2m", "\x1b[1;31m"
# States of clusters, jobs and runs.
COLOURS = {
    **dict.fromkeys(("UP", "RUNNING", "SUCCEEDED"), GOOD),
    **dict.fromkeys(("INIT", "STARTING", "SETTING_UP", "RECOVERING", "CANCELLING", "TERMINATING"), WAITING),
    **dict.fromkeys(("FAILED", "FAILED_SETUP", "FAILED_PRECHECKS", "FAILED_NO_RESOURCE", "FAILED_CONTROLLER"), BAD),
    **dict.fromkeys(("STOPPED", "CANCELLED", "PENDING"), FAINT),
}


def is_drawing(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that allows colour and redrawing."""
    return stream.isatty() and os.getenv("TERM") not in ("dumb", "unknown") and not os.getenv("NO_COLOR")


def paint(text: str, colour: str, *, stream: TextIO | None = None) -> str:
    """Colour text for a stream, stdout by default, if the stream allows it."""
    return f"{colour}{text}{RESET}" if text and is_drawing(stream or sys.stdout) else text


def paint_state(part: str) -> str:
    """Colour a padded cell by the state that it begins with."""
    text = part.strip()
    colour = COLOURS.get(text.partition(" ")[0])
    return part if colour is None else part.replace(text, paint(text, colour), 1)


class Bar:
    """The progress of one piece of work. Text printed in the meantime appears above it."""

    def __init__(self, report: Callable[[float, float | None, str], None], *, text: str, total: float | None) -> None:
        self._report = report
        self._text = text
        self._total = total
        self._done = 0.0

    def advance(self, amount: float = 1) -> None:
        self.update(self._done + amount)

    def update(self, done: float, *, total: float | None = None) -> None:
        """Set the progress; `done` counts from the start, `total` may become known later."""
        self._done = done
        self._total = self._total if total is None else total
        self._report(done, self._total, self._text)

    def describe(self, text: str) -> None:
        self._text = text
        self._report(self._done, self._total, text)


@contextmanager
def show_progress(text: str, *, total: float | None = None, is_bytes: bool = False) -> Iterator[Bar]:
    """Show a bar on a terminal, a spinner while the total is unknown, and a line per quarter in a pipe."""
    if not is_drawing(sys.stderr):
        yield Bar(_print_quarters(), text=text, total=total)
        return
    progress = _make_progress(is_bytes=is_bytes)
    with progress:
        task = progress.add_task(text, total=total)

        def report(done: float, total: float | None, text: str) -> None:
            progress.update(task, completed=done, total=total, description=text)

        yield Bar(report, text=text, total=total)


def _print_quarters() -> Callable[[float, float | None, str], None]:
    printed = 0

    def report(done: float, total: float | None, text: str) -> None:
        nonlocal printed
        if total and (step := int(done / total * STEPS_PRINTED)) > printed:
            printed = step
            sys.stderr.write(f"{text}: {step / STEPS_PRINTED:.0%}\n")
            sys.stderr.flush()

    return report


@contextmanager
def show_wait(text: str, *, is_printed: bool = True) -> Iterator[Bar]:
    """Show a spinner with the elapsed time; in a pipe, print the text once if `is_printed`."""
    if is_printed and not is_drawing(sys.stderr):
        sys.stderr.write(f"{text} ...\n")
        sys.stderr.flush()
    with show_progress(text) as bar:
        yield bar


def _make_progress(*, is_bytes: bool) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class WhenKnown(ProgressColumn):
        """Another column, shown once the total is known."""

        def __init__(self, column: ProgressColumn) -> None:
            super().__init__()
            self._column = column

        def render(self, task: Task) -> object:  # type: ignore[override]  # whatever the column makes
            return self._column(task) if task.total else Text("")

    amount = DownloadColumn() if is_bytes else MofNCompleteColumn()
    known = [WhenKnown(each) for each in (BarColumn(bar_width=20), amount, TimeRemainingColumn(compact=True))]
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), *known, TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
        redirect_stdout=sys.stdout.isatty(),  # never touch data in a pipe
    )  # fmt: skip


class View:
    """Lines that are replaced as a whole."""

    def __init__(self, show: Callable[[Sequence[str]], None]) -> None:
        self.show = show


@contextmanager
def show_view() -> Iterator[View | None]:
    """Show a view on stdout, cut to the screen, that stays when it ends; None where redrawing is not possible."""
    if not is_drawing(sys.stdout):
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:

        def show(lines: Sequence[str]) -> None:
            text = Text("\n").join(Text.from_ansi(line, no_wrap=True, overflow="ellipsis") for line in lines)
            live.update(text, refresh=True)

        yield View(show)
