"""A state folder whose jobs were moved to a server is no longer written to.

The file `moved.json` is the fence. It is written before anything is sent, and every transaction checks for it, so the
daemon of this folder stops at its next heartbeat, and no command starts anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from broker.clock import Clock
from broker.config import Config, find_backup_url
from broker.errors import FencedError, StateError
from broker.frozen import frozen
from broker.state.copies import sync_file

if TYPE_CHECKING:
    from broker.state.store import Store

MOVED = "moved.json"


@frozen
class MoveDestination:
    """The destination of a state folder's jobs. `word` identifies the move; a repeated move has the same word."""

    url: str
    word: str
    is_complete: bool = False


def read_moved(home: Path) -> MoveDestination | None:
    """Return the destination of the jobs; None if they are here. Raises StateError for a damaged file."""
    path = home / MOVED
    try:
        data = json.loads(path.read_bytes())
        return MoveDestination(url=str(data["url"]), word=str(data["word"]), is_complete=bool(data["is_complete"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{path} cannot be read: {error}", hints=("repeat `broker server import-local`, which replaces it",)
        ) from None


def write_moved(home: Path, moved: MoveDestination) -> None:
    """Write the fence durably: if a power cut could undo it, this machine would drive jobs that the server drives."""
    aside = home / f".{MOVED}-{os.urandom(8).hex()}"
    data = {"url": moved.url, "word": moved.word, "is_complete": moved.is_complete}
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(home / MOVED)
    sync_file(home)


def forget_moved(home: Path) -> None:
    """Remove the fence of a move that the server has refused, or of one to a server that was removed."""
    (home / MOVED).unlink(missing_ok=True)


def explain_moved(moved: MoveDestination) -> FencedError:
    """Make the error for a command that would change moved jobs."""
    if not moved.is_complete:
        return FencedError(
            f"the jobs of this state folder are being moved to {moved.url}",
            hints=("complete the move: `broker server import-local`",),
        )
    return FencedError(
        f"the jobs of this state folder were moved to {moved.url}",
        hints=(
            f"log in there: `broker login {moved.url}`",
            "to start jobs from this machine, set `BROKER_HOME` to another folder; after `broker server down`, "
            "`broker state reset` empties this one",
        ),
    )


def guard(store: Store, config: Config, *, clock: Clock, note: Callable[[str], None]) -> None:
    """Check before each write to the state file that this folder may still write; print where moved jobs are."""
    if store.is_shared:
        return
    if find_backup_url(config.home) is not None:
        from broker.app import backups

        store.confirm = backups.make_confirm(config.home, clock=clock)
    store.fence = make_fence(config.home)
    if (moved := read_moved(config.home)) is not None:
        note(f"note: {explain_moved(moved).message}; this shows the state before the move")


def make_fence(home: Path) -> Callable[[], None]:
    """Return the check to run in each transaction: the jobs were not moved."""
    path = str(home / MOVED)

    def check() -> None:
        if os.path.exists(path):  # noqa: PTH110 - in every transaction: faster than a Path
            moved = read_moved(home)
            if moved is not None:
                raise explain_moved(moved)

    return check
