"""Uploads of local files to the buckets of a task, and the cost of copying buckets to its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from broker.app.container import Context
from broker.app.sources import make_read_error
from broker.errors import AuthError, MissingPackageError, TransientError, UsageError
from broker.formatting import format_usd
from broker.types import Plan, Task

if TYPE_CHECKING:
    from broker.optimizer.egress import EgressTable

MIB = 2**20
# Called with the URL of an upload; the callable that it yields is called with the bytes sent so far and the total.
TrackUpload = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


def fill_buckets(context: Context, tasks: Iterable[Task], *, track: TrackUpload) -> tuple[Task, ...]:
    """Upload local files and replace them with buckets; a repeated call uploads only changes.

    Raises UsageError for a missing path, and the errors of `storage.upload`.
    """
    return tuple(_fill(context, task, track) if task.storage_mounts else task for task in tasks)


def _fill(context: Context, task: Task, track: TrackUpload) -> Task:
    from broker.storage.mounts import find_uploads, plan_mounts
    from broker.storage.upload import send_files

    mounts = list(task.storage_mounts)
    for index, step in enumerate(plan_mounts(task)):
        uploads = find_uploads(mounts[index])
        if uploads is None:
            continue
        with track(step.url) as on_sent:
            try:
                sent = send_files(step.url, collect_files(uploads), on_sent=on_sent)
            except PermissionError as error:
                raise make_read_error(error, field="file_mounts") from error
        made = f"created bucket `{step.url}`" if sent.is_new_bucket else f"bucket `{step.url}`"
        if sent.files:
            made += f": {sent.sent_files} of {sent.files} files uploaded, {sent.sent_bytes / MIB:,.1f} MiB"
        context.note(made)
        mounts[index] = replace(mounts[index], source=(step.url,))
    return replace(task, storage_mounts=tuple(mounts))


def collect_files(sources: tuple[str, ...]) -> Mapping[str, Path]:
    """Map keys to files as SkyPilot does: a single folder's content at the top, several paths under their names.

    Raises UsageError for a missing path, and for paths of the same name: one would replace the other.
    """
    found: dict[str, Path] = {}
    names: dict[str, str] = {}
    for source in sources:
        path = Path(source).expanduser()
        name = path.name if path.name not in ("", "..") else path.resolve().name
        if not path.exists():
            raise UsageError(f"`{source}` does not exist", hints=["paths are relative to the current folder"])
        if name in names:
            raise UsageError(
                f"`{names[name]}` and `{source}` have the same name in the bucket",
                hints=["rename one of them, or write a mount for each"],
            )
        names[name] = source
        found |= _list_folder(path, "" if len(sources) == 1 else f"{name}/") if path.is_dir() else {name: path}
    return found


def _list_folder(folder: Path, prefix: str) -> dict[str, Path]:
    from broker.runtime.skyignore import walk

    return {
        prefix + (place / name).relative_to(folder).as_posix(): place / name
        for place, names in walk(folder)
        for name in names
        if (place / name).is_file()
    }


def note_copies(context: Context, plans: Sequence[Plan]) -> None:
    """Note the cost of each copied bucket before anything is paid for; note a bucket that cannot be queried.

    Raises InvalidRequestError for a missing bucket, and for a mount that is impossible on a node.
    """
    if not any(plan.task.storage_mounts for plan in plans):
        return
    from broker.optimizer.egress import EgressTable
    from broker.storage.mounts import measure_mounts, plan_mounts, price_mounts

    table: EgressTable | None = None
    for plan in plans:
        steps = plan_mounts(plan.task)
        try:
            sizes = measure_mounts(steps)
        except (AuthError, TransientError, MissingPackageError) as error:
            context.note(f"unknown copy cost: {error.message}")
            continue
        table = table or EgressTable.from_prices(context.book.read_egress())
        placement = plan.choice.placement
        for price in price_mounts(sizes, cloud=placement.offer.cloud, node_count=placement.node_count, table=table):
            nodes = f" to {placement.node_count} nodes" if placement.node_count > 1 else ""
            cost = f"{format_usd(price.usd)} USD per start" if price.usd else "free within one cloud"
            context.note(f"copying `{price.url}`{nodes}: {price.gib:,.2f} GiB each, {cost}")
