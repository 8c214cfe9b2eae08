"""The installation that owns a state folder, and the lock that keeps its daemon stopped during a restore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.config import Config, find_state_url, read_guarded_owner, read_owner, write_owner
from broker.errors import StateError
from broker.frozen import frozen


@frozen
class RestoredOwner:
    """The ID of an installation, and the file to which it was restored."""

    owner: str
    path: Path


def find_owner(database: Path) -> str | None:
    """Read the owner ID from its file, else from the guard or the state file."""
    from broker.state.restoring import examine

    try:
        owner = read_owner(database.parent / "owner")
    except OSError:
        owner = None
    return owner or read_guarded_owner(database.parent) or examine(database).installation


def restore_owner(database: Path) -> RestoredOwner:
    """Restore the lost `owner` file from the state or its copies. Raises StateError if none of them contains the ID."""
    from broker.state.restoring import examine

    url = find_state_url(database.parent)
    if url is not None:
        known = _read_server_owner(url, database.parent)
    else:
        found = examine(database)
        known = found.installation or read_guarded_owner(database.parent)
        for copy in found.copies:
            known = known or examine(copy.path).installation
    path = database.parent / "owner"
    if not known:
        raise StateError(
            "the ID of this installation is in neither the state file nor a copy",
            hints=(f"find it in the tag `broker-owner` of your nodes, then run `echo ID > {path}`",),
        )
    try:
        write_owner(database.parent, known)
    except OSError as error:
        from broker.state.faults import explain_os_error

        raise explain_os_error(error, default=path) from error
    return RestoredOwner(owner=known, path=path)


def _read_server_owner(url: str, home: Path) -> str | None:
    from broker.clock import SystemClock
    from broker.state.postgres_store import PostgresStore

    store = PostgresStore(url, home=home, clock=SystemClock())
    try:
        return store.meta.get("installation")
    finally:
        store.close()


@contextmanager
def hold_daemon(database: Path) -> Iterator[None]:
    """Hold the daemon's lock, so that no daemon starts. Raises StateError while one is running."""
    from broker.jobs.daemon_process import hold_lock

    with hold_lock(Config(home=database.parent, owner="")) as is_held:
        if not is_held:
            raise StateError(
                "the jobs daemon of this state folder is running",
                hints=(
                    "it exits a minute after the last job has ended, or on SIGTERM; "
                    f"find its process with `fuser {database.parent / 'daemon.lock'}`",
                ),
            )
        yield
