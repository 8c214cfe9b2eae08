"""Split the files of a map's input into shards of about equal size. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from broker.errors import UsageError
from broker.formatting import join_choices
from broker.frozen import frozen
from broker.storage.base import StoredKey

SUFFIXES = (".jsonl", ".ndjson", ".txt")
MIB = 1 << 20
SHARD_BYTES_MAX = 16 * MIB
SHARDS_WANTED = 1000  # if that keeps shards within the bounds: a lost machine repeats half a shard on average
SHARD_BYTES_MIN = 64 << 10  # below this, the requests to the bucket cost more than the work lost with a machine
SHARDS_MAX = 99_999  # part names have five digits


class Shard(NamedTuple):
    """The lines of a file that begin at byte `start` or later, and before `end`."""

    file: int
    start: int
    end: int


@frozen
class Split:
    """Keys and sizes (bytes) of the input files, and the shards that cover them.

    `marks` change if a file is written again: its ETag, or in a folder the second of its last write.
    """

    files: tuple[str, ...]
    sizes: tuple[int, ...]
    shards: tuple[Shard, ...]
    marks: tuple[str, ...] = ()  # none in plans of earlier versions


def split(keys: Sequence[StoredKey], *, shard_bytes: int | None = None) -> Split:
    """Split files of lines at multiples of `shard_bytes`, by default a thousandth of the input within 64 KiB to 16 MiB.

    This needs only the sizes, not the content. Files of other kinds and empty ones are skipped. Raises UsageError if
    none is left, or for too many shards.
    """
    lines = [each for each in keys if each.key.endswith(SUFFIXES) and each.size_bytes]
    if not lines:
        raise UsageError(
            f"the input has no lines: none of its {len(keys)} files is a {join_choices(SUFFIXES)} with content",
            hints=['write one JSON value per line; for other files, lines such as {"path": "s3://BUCKET/image.png"}'],
        )
    total = sum(each.size_bytes for each in lines)
    step = shard_bytes or min(SHARD_BYTES_MAX, max(SHARD_BYTES_MIN, -(-total // SHARDS_WANTED)))
    if total // step + len(lines) > SHARDS_MAX:
        step_min = -(-total // max(1, SHARDS_MAX - len(lines)))
        raise UsageError(
            f"more than {SHARDS_MAX:,} shards", hints=[f"pass `--shard-mib {-(-step_min // MIB)}` or more"]
        )
    return Split(
        files=tuple(each.key for each in lines),
        sizes=tuple(each.size_bytes for each in lines),
        shards=tuple(
            Shard(index, start, min(start + step, each.size_bytes))
            for index, each in enumerate(lines)
            for start in range(0, each.size_bytes, step)
        ),
        marks=tuple(each.etag or str(int(each.modified_s)) for each in lines),
    )
