"""Keep tasks from writing where this state folder has its backups.

A key in `epochs/` there stops the server for good, as a restore does, and tasks write with the server's own login.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from broker.app.container import Context
from broker.config import find_backup_url
from broker.errors import UsageError
from broker.types import Task

if TYPE_CHECKING:
    from broker.access.base import Need


def check_backups(context: Context, tasks: Sequence[Task]) -> None:
    """Raise UsageError for a task that may write to the backups of this state folder."""
    home = context.market.home
    url = None if home is None else find_backup_url(home)
    if url is None:
        return
    from broker.access.needs import list_needs
    from broker.app.backup_files import PREFIX
    from broker.app.backups import EPOCHS, STATES

    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    folders = [f"{path.strip('/')}/{name}/".lstrip("/") for name in (EPOCHS, STATES, PREFIX)]
    for need in (need for task in tasks for need in list_needs(task, context.config.owner)):
        is_written = not need.is_read_only or need.is_made_later  # local files are uploaded for a mount that is read
        is_there = (need.scheme, need.bucket) == (scheme, bucket) and any(_overlaps(need, each) for each in folders)
        if is_written and is_there:
            raise UsageError(
                f"`{need.source}` could write to the backups of this server, in {url}",
                hints=["name another bucket or folder, or mount it read-only"],
            )


def _overlaps(need: Need, folder: str) -> bool:
    start = need.path if need.is_open or not need.path else f"{need.path}/"
    return folder.startswith(start) or start.startswith(folder)
