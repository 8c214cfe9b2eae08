"""Refuse the requests of a server that was replaced. Standard library only.

A restored server has a higher epoch than every server before it. Each request carries the epoch of its server, 0
without one; the node keeps the highest that it has seen, and refuses lower ones. A request is carried out under the
lock, so that none of a replaced server takes effect after the first one of its successor.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # `typing` would take a tenth of the time of a request
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from broker.agent import agent_files as files

    Verb = Callable[[dict[str, Any]], dict[str, Any]]
else:
    import agent_files as files

FIELD = "server_epoch"  # a gang has an epoch of its own, of its head
NAME = "epoch.json"
LOCK = "epoch.lock"
EXIT_CODE = 77  # the code of a refused call, and of no other


class SupersededError(OSError):
    """The request came from a server that another one has replaced."""


def guard(verb: Verb) -> Verb:
    """Return `verb`, which then raises SupersededError for a request of a lower epoch than the node has seen."""

    def carry_out(request: dict[str, Any]) -> dict[str, Any]:
        epoch = int(request.pop(FIELD, 0))
        # Before the first server with an epoch, requests need not wait for each other, only that server for them.
        is_shared = not epoch and not (files.STATE / NAME).exists()
        lock = files.wait_lock(files.STATE / LOCK, is_shared=is_shared)
        try:
            admit(epoch)
            return verb(request)
        finally:
            os.close(lock)

    return carry_out


def admit(epoch: int) -> None:
    """Record the epoch if it is the highest so far. Raises SupersededError for a lower one."""
    known = read_highest()
    if epoch < known:
        raise SupersededError(f"the server of epoch {epoch} was replaced by that of epoch {known}")
    if epoch > known:
        files.write_json(files.STATE / NAME, {FIELD: epoch})


def read_highest() -> int:
    """Return the highest epoch that the node has seen, 0 without one. Raises OSError for a damaged file."""
    if not (files.STATE / NAME).exists():
        return 0
    known = files.read_json(files.STATE / NAME)
    try:
        return int((known or {})[FIELD])
    except (KeyError, TypeError, ValueError):
        raise OSError(f"{files.STATE / NAME} cannot be read") from None
