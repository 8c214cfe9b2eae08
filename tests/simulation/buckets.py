"""The bucket that jobs name for their checkpoints, as a broker sees it: what heads have left of their outcomes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from unittest.mock import patch

from broker.errors import TransientError
from broker.jobs import checkpoints
from broker.types import RunStatus
from tests.simulation.events import Event, Violation

if TYPE_CHECKING:
    from tests.simulation.universe import Universe

BUCKET = "s3://bucket/runs"


class OutcomeBucket:
    """One job's folder. What lies there follows from the truth about its programs; it may give no answer."""

    def __init__(self, universe: Universe, url: str) -> None:
        self._universe = universe
        self._root = int(url.rpartition("-")[2])

    def read(self, key: str) -> bytes | None:
        universe, attempt = self._universe, int(PurePosixPath(key).stem)
        run = universe.gang.find_run(self._root, attempt)
        unread = universe.memory.setdefault("unread", set())
        if not universe.is_healed and universe.random.random() < universe.mix.bucket_silence:
            universe.note_fault("bucket:silent", run.cluster if run else "")
            unread.add((self._root, attempt))
            raise TransientError("the bucket gives no answer")
        unread.discard((self._root, attempt))
        if run is None or not universe.gang.has_left_success(run):
            return None
        return json.dumps({"status": RunStatus.SUCCEEDED.value}).encode()


@contextmanager
def serve_buckets(universe: Universe) -> Iterator[None]:
    """In place of the network's."""
    with patch.object(checkpoints, "open_bucket", lambda url: OutcomeBucket(universe, url)):
        yield


def check_s7_left_success_is_heard(universe: Universe, event: Event) -> None:
    """An attempt whose head has left its success in a bucket that answers does not count as lost."""
    if "attempts" not in event.written:
        return
    unread = universe.memory.get("unread", set())
    known = universe.memory.setdefault("lost attempts", set())
    for job_id, number, cluster, outcome in universe.read(
        "SELECT job_id, number, json_extract(body, '$.cluster'), json_extract(body, '$.outcome') FROM attempts "
        "WHERE json_extract(body, '$.outcome') LIKE 'preempted%'"
    ):
        if cluster in known:
            continue
        known.add(cluster)
        run = universe.gang.runs.get(cluster)
        root = universe.gang.roots.get(job_id, job_id)
        if universe.tasks[job_id].checkpoint.to is None or run is None or (root, number) in unread:
            continue
        if cluster not in universe.asked_down and universe.gang.has_left_success(run):
            raise Violation("S7", f"{cluster} has left its success in the bucket and counts as `{outcome}`")
