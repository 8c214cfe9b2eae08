"""The count of a map's finished work, and its manifest."""

from __future__ import annotations

import json
from pathlib import Path

from broker.batch.plan_file import MapPlan
from broker.batch.splitting import Shard, Split
from broker.batch.tally import count_items, explain_failures, forget_failures, take, write_manifest
from broker.storage import open_bucket

SPLIT = Split(
    files=("a.jsonl", "b.jsonl"), sizes=(9, 4), shards=(Shard(0, 0, 5), Shard(0, 5, 9), Shard(1, 0, 4), Shard(1, 4, 4))
)
PLAN = MapPlan(uid="u", input="s3://in", program="p", lease_s=1.0, split=SPLIT)


def test_finished_skipped_and_remaining_shards_are_counted_and_written_in_the_order_of_the_input(
    tmp_path: Path,
) -> None:
    bucket = open_bucket((tmp_path / "out").as_uri())
    bucket.write("part-00002.jsonl", b"1\n2\n")
    bucket.write("part-00000.jsonl", b"1\n2\n3\n")
    bucket.write("_map/items/2.7", b"")
    for number in (0, 1):
        for attempt in range(3):
            reason = {"reason": f"Traceback\nValueError: bad {number}\n"}
            bucket.write(f"_map/failed/{number}/{attempt}", json.dumps(reason).encode())
    for attempt in range(2):
        bucket.write(f"_map/failed/3/{attempt}", b"{}")
    tally = take(bucket, PLAN)
    assert set(tally.parts) == {0, 2} and set(tally.failed) == {1}, "a shard with a part has not failed"
    assert tally.left == 1 and not tally.is_complete
    items = count_items(bucket, tally)
    assert items == {0: 3, 2: 7}, "a recorded number is used, and other parts are counted"
    written = json.loads(bucket.read(write_manifest(bucket, PLAN, tally, items)) or b"")
    assert written["items"] == 10
    assert [(each["part"], each["input"], each["start"], each["end"], each["items"]) for each in written["parts"]] == [
        ("part-00000.jsonl", "a.jsonl", 0, 5, 3), ("part-00002.jsonl", "b.jsonl", 0, 4, 7),
    ]  # fmt: skip
    assert explain_failures(bucket, tally) == ["ValueError: bad 1"]
    forget_failures(bucket, tally)
    assert take(bucket, PLAN).left == 2
