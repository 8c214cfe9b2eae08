"""One line on a terminal that says how far a long computation is; nothing where stderr is not one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CLEAR = "\r\x1b[2K"


@contextmanager
def watch_progress() -> Iterator[Callable[[int, int, str], None] | None]:
    """Yield a function of (steps done, steps in all, step) that rewrites the line; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    last = ""

    def tell(done: int, total: int, name: str) -> None:
        nonlocal last
        line = f"{done / total:4.0%}  {name}"
        if line != last:
            last = line
            sys.stderr.write(CLEAR + line)
            sys.stderr.flush()

    try:
        yield tell
    finally:
        sys.stderr.write(CLEAR)
        sys.stderr.flush()
