"""One command at a time brings a cluster up: the kernel drops the claim with the process, however it dies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from broker.errors import UsageError
from broker.locks import try_lock
from broker.state.faults import explain_os_error


@contextlib.contextmanager
def claim_name(folder: Path, name: str) -> Iterator[None]:
    """Raises UsageError while another command holds this name."""
    path = folder / f"{quote(name, safe='')}.lock"
    with contextlib.ExitStack() as stack:
        try:
            is_held = stack.enter_context(try_lock(path))
        except OSError as error:
            raise explain_os_error(error, default=path) from error
        if not is_held:
            hints = (
                "`broker status` shows when it is up; then `broker exec` runs more on it.",
                "Another name: `-c NAME`.",
            )
            raise UsageError(f"another command is bringing `{name}` up", hints=hints)
        yield
