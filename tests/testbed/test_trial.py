"""`broker check CLOUD --live` on real hosts, in an account where most regions are disabled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.metadata import MetadataServer
from tests.testbed.stage import Stage, open_stage

STEPS = {
    "login": "ok", "bucket": "skipped", "create": "ok", "connect": "ok", "run": "ok", "bucket from the node": "skipped",
    "stop": "skipped", "terminate": "ok", "leaks": "ok",
}  # fmt: skip


@pytest.fixture
def stage(tmp_path: Path, metadata: MetadataServer) -> Iterator[Stage]:
    with open_stage(tmp_path, metadata) as stage:
        yield stage


@pytest.mark.parametrize("place", ["aws", "gcp/us-central1"])
def test_one_node_lives_and_ends(stage: Stage, place: str) -> None:
    """The cheapest region of AWS is not enabled in this account, as in most."""
    steps = stage.read_json("check", place, "--live", "--yes")
    assert {each["name"]: each["outcome"] for each in steps} == STEPS, steps
    assert "Linux" in next(each["note"] for each in steps if each["name"] == "run")
    assert stage.list_living() == set()
