"""One command at a time brings a cluster up: the kernel drops the claim with the process, however it dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from broker.errors import UsageError
from broker.state.faults import explain_os_error


@contextmanager
def claim_name(folder: Path, name: str) -> Iterator[None]:
    """Raises UsageError while another command holds this name."""
    path = folder / f"{quote(name, safe='')}.lock"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise explain_os_error(error, default=path) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hints = (
                "`broker status` shows when it is up; then `broker exec` runs more on it.",
                "Another name: `-c NAME`.",
            )
            raise UsageError(f"another command is bringing `{name}` up", hints=hints) from None
        yield
    finally:
        os.close(descriptor)
