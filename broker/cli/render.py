"""Render tables that fit 80 columns, money, durations and errors. Data goes to stdout, the rest to stderr."""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from broker.cli import terminal
from broker.config import find_home
from broker.errors import BrokerError, StateError, TaskError
from broker.formatting import format_share, strip_control

if TYPE_CHECKING:
    from broker.types import JobUsage

WIDTH_DEFAULT = 80
COLUMN_MIN = 4
STATES = "STATUS"  # the column whose words have colours


def print_error(error: Exception) -> int:
    """Print what happened, why and what to do next; return the exit code."""
    if isinstance(error, TaskError):
        from broker.task.diagnostics import render_issue

        for issue in error.issues:
            _write_error(f"{_error()} {render_issue(issue)}\n")
        return error.exit_code
    if isinstance(error, BrokerError):
        _write_error(f"{_error()} {error.message}")
        for detail in error.details:
            _write_error(f"  {detail}")
        for hint in error.hints:
            _write_error(f"\n{_hint()} {hint}")
        return error.exit_code
    if isinstance(error, OSError) and error.strerror:
        return _print_os_error(error)
    _write_error(f"{_error()} {type(error).__name__}: {error}")
    _write_error(f"\n{_hint()} this is a bug in broker; run `broker --debug ...` for the stack trace")
    return 1


def _error() -> str:
    return terminal.paint("error:", terminal.ERROR, stream=sys.stderr)


def _hint() -> str:
    return terminal.paint("hint:", terminal.HEADING, stream=sys.stderr)


def _print_os_error(error: OSError) -> int:
    """Print an unusable file or disk, which is not a bug; the exit code shows whether it is the state folder's."""
    if _is_from_typer(error):
        _write_error(f"{_error()} cannot write the output: {error.strerror}")
        return BrokerError.exit_code
    home = find_home()
    path = Path(str(error.filename)) if isinstance(error.filename, str | bytes | Path) else None
    is_ours = path is not None and (path == home or home in path.parents)
    _write_error(f"{_error()} cannot use {path or 'a file'}: {error.strerror}")
    _write_error(f"\n{_hint()} check the disk, the folder and its permissions{f' below {home}' if is_ours else ''}")
    return StateError.exit_code if is_ours or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) else 1


def _is_from_typer(error: OSError) -> bool:
    """Return whether Typer wrote the output: help, usage and completions, which do not pass `print_line`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("typer.")


def note_damage(error: BrokerError) -> None:
    """Warn about one damaged row; the others are still shown."""
    print_note(f"warning: {error.message}")
    for hint in error.hints:
        print_note(f"hint: {hint}")


def _write_error(text: str) -> None:
    sys.stderr.write(text + "\n")


def print_line(text: str = "") -> None:
    """Write a line to stdout and flush it. Raises BrokerError if it cannot be written, BrokenPipeError."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BrokerError(f"cannot write the output: {error.strerror or error}") from None


def print_wrapped(text: str, *, indent: int) -> None:
    """Print a sentence wrapped to the width, with a hanging indent."""
    import textwrap

    print_line(
        textwrap.fill(strip_control(text), WIDTH_DEFAULT, subsequent_indent=" " * indent, break_on_hyphens=False)
    )


def print_wrapped_note(text: str) -> None:
    """Print several lines of progress or advice, each wrapped."""
    import textwrap

    for line in text.splitlines():
        print_note(textwrap.fill(strip_control(line), WIDTH_DEFAULT, subsequent_indent="  ", break_on_hyphens=False))


def print_note(text: str) -> None:
    """Print progress or advice to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def print_json(value: Any) -> None:
    """Write a value to stdout as indented JSON."""
    import json

    print_line(json.dumps(value, indent=2, default=str))


def measure_width() -> int:
    """Return the width of the terminal, or the value of `COLUMNS`; 80 in a pipe."""
    import os
    import shutil

    is_known = os.getenv("COLUMNS") is not None or sys.stdout.isatty()
    return max(WIDTH_DEFAULT, shutil.get_terminal_size().columns) if is_known else WIDTH_DEFAULT


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    firm: Sequence[str] = (),
    least: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Print the table that `format_table` makes."""
    for line in format_table(columns, rows, right=right, firm=firm, least=least):
        print_line(line)


def fits(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the terminal is wide enough to print this table without cutting cells."""
    columns, cells, _ = _drop_until_it_fits(columns, [[strip_control(cell) for cell in row] for row in rows])
    return _measure_table(_measure_columns(columns, cells)) <= measure_width()


def drop_shared(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, names: Sequence[str]
) -> tuple[list[str], list[list[str]], dict[str, str]]:
    """Drop the columns in `names` whose cells are all the same.

    Return the other columns, their rows, and the common cell of each dropped column.
    """
    shared = {name: rows[0][i] for i, name in enumerate(columns) if rows and name in names and _is_shared(rows, i)}
    kept = [i for i, name in enumerate(columns) if name not in shared]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows], shared


def _is_shared(rows: Sequence[Sequence[str]], index: int) -> bool:
    return len({row[index] for row in rows}) == 1


def show_usage(usage: JobUsage | None) -> tuple[str, str]:
    """Show the shares of CPU and GPU in use on a job's nodes; `-` if no node reports them."""
    return ("-", "-") if usage is None else (format_share(usage.cpu_ratio), format_share(usage.gpu_ratio))


def format_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    firm: Sequence[str] = (),
    least: Mapping[str, int] = MappingProxyType({}),
) -> list[str]:
    """Format a table no wider than the terminal.

    In a table that is too wide, a line above the header replaces columns whose cells are all the same; then the widest
    column that is not `firm` shrinks. Columns in `least` keep that width until no other can shrink. Different cells are
    never cut to the same text.
    """
    cells = [[strip_control(cell) for cell in row] for row in rows]
    columns, cells, shared = _drop_until_it_fits(columns, cells)
    widths = _measure_columns(columns, cells)
    soft = [i for i, name in enumerate(columns) if name not in firm] or list(range(len(columns)))
    width_max = measure_width()
    while _measure_table(widths) > width_max:
        widest = max(soft, key=lambda i: (widths[i] > max(least.get(columns[i], 0), COLUMN_MIN), widths[i]))
        if widths[widest] <= COLUMN_MIN:
            break
        widths[widest] -= 1
    fitted = [_fit_column([row[i] for row in cells], width) for i, width in enumerate(widths)]
    header = [[_fit(name, width)] for name, width in zip(columns, widths, strict=True)]
    lines: list[str] = []
    for row in [header, *([column[number] for column in fitted] for number in range(len(cells)))]:
        for parts in zip_longest(*row, fillvalue=""):
            aligned = [
                part.rjust(width) if name in right else part.ljust(width)
                for part, width, name in zip(parts, widths, columns, strict=True)
            ]
            if lines:
                aligned = [
                    terminal.paint_state(part) if name == STATES else part
                    for part, name in zip(aligned, columns, strict=True)
                ]
            lines.append("  ".join(aligned).rstrip())
    above = [f"All rows: {', '.join(f'{name} {cell}' for name, cell in shared.items())}"] if shared else []
    return [*above, terminal.paint(lines[0], terminal.HEADING), *lines[1:]]


def _drop_until_it_fits(
    columns: Sequence[str], cells: list[list[str]]
) -> tuple[list[str], list[list[str]], dict[str, str]]:
    """Drop shared columns, the widest first, until the table fits. The first column and unnamed ones stay."""
    kept, shared = list(columns), dict[str, str]()
    while len(cells) > 1 and _measure_table(widths := _measure_columns(kept, cells)) > measure_width():
        droppable = [i for i in range(1, len(kept)) if _is_shared(cells, i) and kept[i] and kept.count(kept[i]) == 1]
        if not droppable:
            break
        widest = max(droppable, key=lambda i: widths[i])
        kept, cells, found = drop_shared(kept, cells, names=[kept[widest]])
        shared |= found
    return kept, cells, {name: shared[name] for name in columns if name in shared}


def _measure_columns(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]


def _measure_table(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _fit_column(cells: Sequence[str], width: int) -> list[list[str]]:
    """Fit cells: cut them at the end if different cells stay different, else in the middle, else wrap them.

    Instance types share their first letters: `Standard_ND96isr_H100_v5`, `Standard_ND96isr_H200_v5`.
    """
    if all(len(cell) <= width for cell in cells):  # includes a column without name and text, of width 0
        return [[cell] for cell in cells]
    for head in range(width - 1, -1, -1):
        fitted = {cell: _fit(cell, width, head=head) for cell in cells}
        if len(set(fitted.values())) == len(fitted):
            return [[fitted[cell]] for cell in cells]
    return [[cell[start : start + width] for start in range(0, max(1, len(cell)), width)] for cell in cells]


def _fit(cell: str, width: int, *, head: int | None = None) -> str:
    """Cut a cell to `width` characters: its first `head`, an ellipsis and its end."""
    if len(cell) <= width:
        return cell
    head = width - 1 if head is None else head
    return f"{cell[:head]}…{cell[len(cell) - (width - 1 - head) :]}"
