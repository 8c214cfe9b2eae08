"""Count the finished work of a map, from one listing of its output, and write its manifest."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from broker.batch.plan_file import MapPlan
from broker.frozen import frozen
from broker.storage.base import Bucket, StoredKey

MANIFEST = "_map/manifest.json"
PART = re.compile(r"part-(\d+)\.jsonl")
ITEMS = re.compile(r"_map/items/(\d+)\.(\d+)")
FAILED = re.compile(r"(_map/failed/(\d+)/.+)")
TRIES = 3  # failures of the program after which a shard is skipped, as in trainers/map_leases.py


@frozen
class Tally:
    """The state of a map. `items` has the number of results of each shard for which it is recorded."""

    shards: int
    parts: Mapping[int, StoredKey]
    items: Mapping[int, int]
    failed: Mapping[int, Sequence[str]]  # skipped shard -> the keys of the reports

    @property
    def is_complete(self) -> bool:
        """Whether every shard has its part."""
        return len(self.parts) == self.shards

    @property
    def left(self) -> int:
        """The number of shards that are neither finished nor skipped."""
        return self.shards - len(self.parts) - len(self.failed)


def take(bucket: Bucket, plan: MapPlan) -> Tally:
    """List the output folder once, and count its keys."""
    return read(bucket.list_keys(), shards=len(plan.split.shards))


def read(keys: Sequence[StoredKey], *, shards: int) -> Tally:
    """Count finished parts, recorded results and failures among the keys of the output folder."""
    parts, items, failures = dict[int, StoredKey](), dict[int, int](), dict[int, list[str]]()
    for each in keys:
        if found := PART.fullmatch(each.key):
            parts[int(found[1])] = each
        elif found := ITEMS.fullmatch(each.key):
            items[int(found[1])] = int(found[2])
        elif found := FAILED.fullmatch(each.key):
            failures.setdefault(int(found[2]), []).append(found[1])
    failed = {number: each for number, each in failures.items() if len(each) >= TRIES and number not in parts}
    return Tally(shards=shards, parts=parts, items=items, failed=failed)


def count_items(bucket: Bucket, tally: Tally) -> Mapping[int, int]:
    """Return the number of results of each finished shard; without a recorded number, count the lines of its part."""
    return {
        number: tally.items[number] if number in tally.items else (bucket.read(part.key) or b"").count(b"\n")
        for number, part in sorted(tally.parts.items())
    }


def write_manifest(bucket: Bucket, plan: MapPlan, tally: Tally, items: Mapping[int, int]) -> str:
    """Write the list of parts, in the order of the input; return its key. Repeating it changes nothing."""
    parts = [
        {"part": part.key, "bytes": part.size_bytes, "items": items[number], "input": plan.split.files[shard.file],
         "start": shard.start, "end": shard.end}
        for number, part in sorted(tally.parts.items())
        for shard in [plan.split.shards[number]]
    ]  # fmt: skip
    content = {"map": plan.group, "input": plan.input, "items": sum(items.values()), "parts": parts}
    bucket.write(MANIFEST, json.dumps(content, indent=1).encode())
    return MANIFEST


def explain_failures(bucket: Bucket, tally: Tally) -> Sequence[str]:
    """Return the reasons for which the first 20 of the failed shards were skipped, the most frequent first."""
    reasons = Counter[str]()
    for number in sorted(tally.failed)[:20]:
        reasons[_read_reason(bucket.read(tally.failed[number][0]))] += 1
    return [reason for reason, _ in reasons.most_common()]


def _read_reason(report: bytes | None) -> str:
    """Return the last line of a report's reason; "unknown" for a damaged report."""
    try:
        return str(json.loads(report or b"{}")["reason"]).strip().split("\n")[-1]
    except (ValueError, KeyError, TypeError):
        return "unknown"


def forget_failures(bucket: Bucket, tally: Tally) -> None:
    """Delete the reports, so that workers try these shards again."""
    for keys in tally.failed.values():
        for key in keys:
            bucket.delete(key)
