"""The keys and buckets that a task uses. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from broker.access.base import Need
from broker.storage.mounts import find_uploads, plan_mounts
from broker.types import Task

SCHEMES = ("s3", "gs", "az", "r2")


def list_needs(task: Task, owner: str) -> tuple[Need, ...]:
    """List each bucket path once: checkpoints (with outcome and logs), mounts, and the data named by the task.

    Checkpoints of this installation are in folders that begin with its owner ID (`jobs/checkpoints.py`), so its nodes
    cannot access those of another installation in the same bucket.
    """
    found: dict[tuple[str, str, str, bool], Need] = {}
    for need in _list_all(task, owner):
        key = (need.scheme, need.bucket, need.path, need.is_open)
        earlier = found.get(key)
        found[key] = need if earlier is None else _join(earlier, need)
    return tuple(found.values())


def _list_all(task: Task, owner: str) -> Iterator[Need]:
    if place := _parse(task.checkpoint.to):
        scheme, bucket, path = place
        path = f"{path}/{owner}-".lstrip("/")
        source = f"checkpoint: {{to: {task.checkpoint.to}}}"
        yield Need(scheme=scheme, bucket=bucket, path=path, is_open=True, is_written=True, source=source)
    for mount, step in zip(task.storage_mounts, plan_mounts(task), strict=True):
        if place := _parse(step.url):
            yield Need(
                scheme=place[0], bucket=place[1], path=place[2], is_read_only=step.mode == "COPY" or step.is_read_only,
                is_made_later=find_uploads(mount) is not None, source=f"file_mounts: {step.target}",
            )  # fmt: skip
    for sets, is_read_only, field in ((task.inputs, True, "inputs"), (task.outputs, False, "outputs")):
        for each in sets:
            if place := _parse(each.url):
                yield Need(
                    scheme=place[0], bucket=place[1], path=place[2], is_read_only=is_read_only, is_optional=True,
                    source=f"{field}: {each.url}",
                )  # fmt: skip


def _parse(url: str | None) -> tuple[str, str, str] | None:
    """Return the scheme, bucket and path of a bucket URL; None for anything else."""
    scheme, separator, rest = (url or "").partition("://")
    bucket, _, path = rest.partition("/")
    return (scheme, bucket, path.strip("/")) if separator and scheme in SCHEMES and bucket else None


def _join(one: Need, other: Need) -> Need:
    return Need(
        scheme=one.scheme, bucket=one.bucket, path=one.path, is_open=one.is_open,
        is_written=one.is_written or other.is_written,
        is_read_only=one.is_read_only and other.is_read_only,
        is_optional=one.is_optional and other.is_optional,
        is_made_later=one.is_made_later or other.is_made_later,
        source=one.source if not one.is_optional else other.source,
    )  # fmt: skip


def group_needs(needs: Sequence[Need]) -> dict[str, tuple[Need, ...]]:
    """Group needs by scheme."""
    return {scheme: tuple(need for need in needs if need.scheme == scheme) for scheme in {n.scheme for n in needs}}
