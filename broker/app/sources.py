"""The files and folders of this machine that tasks send: checked before anything is paid for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from broker.errors import UsageError
from broker.types import Task

if TYPE_CHECKING:
    from broker.app.container import Context


def note_state_folder(context: Context, tasks: Sequence[Task]) -> None:
    """Note once that the state folder is excluded, if a folder to upload contains it."""
    home = context.config.home
    for field, source in list_sources(tasks):
        if home.is_relative_to(Path(source).resolve()):
            context.note(f"`{field}` contains broker's state folder {home}, which is not uploaded")
            return


def list_sources(tasks: Sequence[Task]) -> Iterator[tuple[str, str]]:
    """Yield the field and path of every local folder or file that the tasks upload."""
    for task in tasks:
        if task.workdir:
            yield "workdir", task.workdir
        yield from (("file_mounts", source) for source in task.file_mounts.values())


def check_sources(tasks: Sequence[Task]) -> None:
    """Raise UsageError for a file or folder that the tasks send and this user cannot read: nodes would wait for it."""
    from broker.runtime.skyignore import walk

    for field, source in dict.fromkeys(list_sources(tasks)):
        path = Path(source).expanduser()
        if "://" in source:
            continue
        try:
            for folder, names in walk(path) if path.is_dir() else [(path.parent, [path.name])]:
                for file in (folder / name for name in names):
                    if not os.access(file, os.R_OK) and file.is_file() and not file.is_symlink():
                        raise PermissionError(None, "Permission denied", str(file))
        except PermissionError as error:
            raise make_read_error(error, field=field) from error


def make_read_error(error: OSError, *, field: str) -> UsageError:
    """Return the error for a file that `field` of a task names or contains, and that this user cannot read."""
    return UsageError(
        f"`{field}`: cannot read {error.filename}: {error.strerror or error}",
        hints=["make it readable, or exclude it from the files that are sent by a line in `.skyignore`"],
    )
