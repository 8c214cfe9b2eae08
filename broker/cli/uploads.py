"""Upload local files to the buckets of a task, before its nodes are created."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from broker.cli.render import print_note
from broker.cli.terminal import show_progress
from broker.errors import UsageError
from broker.types import Task

MIB = 2**20


def fill_buckets(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Replace local files by buckets, and upload them; a repeated call uploads only changes.

    Raises UsageError for a path that is not there, and what `storage.sending` raises.
    """
    return tuple(_fill(task) if task.storage_mounts else task for task in tasks)


def _fill(task: Task) -> Task:
    from broker.storage.mounts import find_uploads, plan_mounts
    from broker.storage.upload import send_files

    mounts = list(task.storage_mounts)
    for index, step in enumerate(plan_mounts(task)):
        uploads = find_uploads(mounts[index])
        if uploads is None:
            continue
        with show_progress(f"uploading to {step.url}", is_bytes=True) as bar:
            sent = send_files(
                step.url, collect_files(uploads), on_sent=lambda done, total: bar.update(done, total=total)
            )
        made = f"created bucket `{step.url}`" if sent.is_new_bucket else f"bucket `{step.url}`"
        if sent.files:
            made += f": {sent.sent_files} of {sent.files} files uploaded, {sent.sent_bytes / MIB:,.1f} MiB"
        print_note(made)
        mounts[index] = replace(mounts[index], source=(step.url,))
    return replace(task, storage_mounts=tuple(mounts))


def collect_files(sources: tuple[str, ...]) -> Mapping[str, Path]:
    """Map keys to files as SkyPilot does: the content of a single folder at the top, several paths each by name."""
    found: dict[str, Path] = {}
    for source in sources:
        path = Path(source).expanduser()
        if not path.exists():
            raise UsageError(f"`{source}` is not there", hints=["paths count from the current folder"])
        found |= (
            _list_folder(path, "" if len(sources) == 1 else f"{path.name}/") if path.is_dir() else {path.name: path}
        )
    return found


def _list_folder(folder: Path, prefix: str) -> dict[str, Path]:
    from broker.runtime.skyignore import walk

    return {
        prefix + (place / name).relative_to(folder).as_posix(): place / name
        for place, names in walk(folder)
        for name in names
        if (place / name).is_file()
    }
