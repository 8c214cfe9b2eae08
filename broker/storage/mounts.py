"""Plan the steps that make a task's buckets visible on a node, and the cost of copying them.

Pure, except `measure_mounts`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from broker.errors import InvalidRequestError
from broker.frozen import frozen
from broker.optimizer.data_cost import FREE_TO_LEAVE, find_bucket_cloud
from broker.optimizer.egress import GB_PER_GIB, EgressTable
from broker.storage import open_bucket
from broker.storage.base import StoredKey
from broker.types import StorageMount, Task

PROGRAM = "~/.broker/node_mount.py"
FUTURE = "from __future__ import annotations\n"
# SkyPilot's store names -> schemes that nodes support; `gcs://` is an alias of `gs://`.
STORE_SCHEMES = {"s3": "s3", "gcs": "gs", "azure": "az", "r2": "r2"}
SCHEMES = ("s3", "gs", "az", "r2", "file")
MODES = ("COPY", "MOUNT", "MOUNT_CACHED")
GIB = 2**30


@frozen
class MountStep:
    """One bucket mounted at, or copied to, one folder."""

    target: str
    url: str
    mode: str
    uploads: tuple[str, ...] | None = None  # local paths to upload first; if empty, only the bucket must exist
    is_read_only: bool = False  # of a mount: writes to it fail


@frozen
class MountPrice:
    """Cost of copying one bucket to all nodes once: each node downloads it, and its cloud bills the egress."""

    url: str
    gib: float
    usd: float


def plan_mounts(task: Task) -> tuple[MountStep, ...]:
    """Return the steps in the order of the task file. Raises InvalidRequestError for an unsupported mount."""
    return tuple(
        MountStep(
            target=mount.target,
            url=_find_url(mount),
            mode=_find_mode(mount),
            uploads=find_uploads(mount),
            is_read_only=mount.is_read_only,
        )
        for mount in task.storage_mounts
    )


def add_mounts(task: Task) -> Task:
    """Return the task with its mounts at the start of `setup`.

    The agent runs them there: they survive a lost connection, their output is in the run's log, and their failure fails
    the setup. The task still lists its mounts, because granting bucket access requires them; so call this once per
    start.
    """
    steps = plan_mounts(task)
    if not steps:
        return task
    return replace(task, setup=make_script(steps) + (task.setup or ""))


def make_script(steps: Sequence[MountStep]) -> str:
    """Make a bash script that contains `node_mount.py` and runs it once per step, up to the first failure."""
    lines = [f"mkdir -p {PROGRAM.rpartition('/')[0]}", f"cat > {PROGRAM} <<'END_OF_NODE_MOUNT'", read_program()]
    lines.append("END_OF_NODE_MOUNT")
    for step in steps:
        arguments = shlex.join((step.mode, step.url, step.target, *(("read-only",) if step.is_read_only else ())))
        lines.append(f"python3 {PROGRAM} {arguments} || exit $?")
    return "\n".join(lines) + "\n"


@cache
def read_program() -> str:
    """Return the program that is sent to nodes as one file: `node_objects.py`, continued by `node_mount.py`."""
    objects, program = (
        (Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("node_objects.py", "node_mount.py")
    )
    program = program.partition(FUTURE)[2]  # which Python accepts at the start only
    program = re.sub(r"^from broker\.storage\.node_objects import .*\n", "", program, flags=re.MULTILINE)
    return f"{objects}\n{program}".rstrip("\n")


def measure_mounts(steps: Sequence[MountStep]) -> Mapping[str, float]:
    """Measure the GiB of each copied URL by querying the buckets. Raises the errors of `Bucket.list_keys`.

    Data that is still to be uploaded is excluded: the upload reports its own size.
    """
    urls = {step.url for step in steps if step.mode == "COPY" and step.uploads is None}
    return {url: sum(each.size_bytes for each in _list(url)) / GIB for url in sorted(urls)}


def price_mounts(
    sizes_gib: Mapping[str, float], *, cloud: str, node_count: int, table: EgressTable
) -> tuple[MountPrice, ...]:
    """Price the copies on `node_count` nodes of `cloud`, most expensive first.

    As in the planner (`data_cost.py`), copies are free within one cloud, because a URL does not name the bucket's
    region; across clouds they have the price of egress to the internet.
    """
    prices = []
    for url, gib in sizes_gib.items():
        seller = find_bucket_cloud(url)
        is_free = seller is None or seller == cloud or seller in FREE_TO_LEAVE
        usd_per_gb = 0.0 if is_free or seller is None else table.find(seller, "*").internet
        prices.append(MountPrice(url=url, gib=gib, usd=gib * GB_PER_GIB * usd_per_gb * node_count))
    return tuple(sorted(prices, key=lambda each: (-each.usd, each.url)))


def _list(url: str) -> Sequence[StoredKey]:
    scheme, _, rest = url.partition("://")
    place, _, prefix = rest.rstrip("/").partition("/")
    if scheme == "file":
        return open_bucket(url).list_keys()
    return open_bucket(f"{scheme}://{place}").list_keys(prefix)


def find_uploads(mount: StorageMount) -> tuple[str, ...] | None:
    """Return the local paths to upload to the mount's bucket; None if the bucket is used as it is."""
    return None if mount.source and "://" in mount.source[0] else mount.source


def _find_url(mount: StorageMount) -> str:
    if mount.source and "://" in mount.source[0]:
        if len(mount.source) > 1:
            raise _refuse(mount, "a list of buckets", "write one mount for each")
        scheme, _, rest = mount.source[0].partition("://")
        scheme = {"gcs": "gs"}.get(scheme, scheme)
        if scheme not in SCHEMES:
            raise _refuse(
                mount, f"`{scheme}://`", "copy the data in `setup`, or move it to s3://, gs://, az:// or r2://"
            )
        return f"{scheme}://{rest}"
    scheme = STORE_SCHEMES.get((mount.store or "").lower(), "")
    if not mount.name or not scheme:
        raise _refuse(mount, "a bucket without `name` and `store`", "write `name: MY-BUCKET` and `store: s3`")
    return f"{scheme}://{mount.name}"


def _find_mode(mount: StorageMount) -> str:
    mode = mount.mode.upper()
    if mode not in MODES:
        raise _refuse(mount, f"mode `{mount.mode}`", f"use one of {', '.join(MODES)}")
    return mode


def _refuse(mount: StorageMount, what: str, hint: str) -> InvalidRequestError:
    place = f"{mount.origin}: " if mount.origin else ""
    return InvalidRequestError(f"{place}`file_mounts: {mount.target}`: {what} is not supported", hints=(hint,))
