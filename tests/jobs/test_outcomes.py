"""An outcome that a head left in the bucket is read as it was written, and nothing else counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.agent.agent_bucket import leave_log, leave_outcome
from broker.errors import AuthError
from broker.jobs import outcomes
from broker.jobs.outcomes import BucketOutcomes, RunResult, parse_outcome
from broker.types import Progress, RunStatus
from tests.testbed.objects import serve_azure
from tests.testbed.s3 import BUCKET, S3Server, serve_s3


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


@pytest.fixture(scope="module")
def azure() -> Iterator[dict[str, str]]:
    with serve_azure() as (_, variables):
        yield variables


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_broker_reads_what_the_agent_wrote(
    request: pytest.FixtureRequest, scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The agent writes by itself, and broker reads with its library: the two must agree."""
    login: dict[str, str] = request.getfixturevalue("server").variables
    if scheme == "az":
        login = request.getfixturevalue("azure")
    for name, value in login.items():
        monkeypatch.setenv(name, value)
    place = f"{scheme}://{BUCKET}/runs/me-job-1"
    variables = {**login, "BROKER_CHECKPOINT_DIR": place, "BROKER_ATTEMPT": "1"}
    progress = {"step": 40, "total": 40, "loss": 2.5}
    left = {
        "status": "FAILED", "returncode": 3, "reason": "rank 1 exited with 3", "failed_rank": 1, "lease_left_s": 7200.0,
        "unflushed": "x",
    }  # fmt: skip
    assert leave_outcome({**left, "progress": progress}, variables) == f"{place}/outcomes/1.json"
    (tmp_path / "log").write_bytes(b"one\ntwo\n")
    assert leave_log(tmp_path / "log", variables) == f"{place}/logs/1.log"
    bucket = BucketOutcomes()
    assert asyncio.run(bucket.read_outcome(place, 1)) == RunResult(
        status=RunStatus.FAILED,
        returncode=3,
        reason="rank 1 exited with 3",
        failed_rank=1,
        lease_left_s=7200.0,
        unflushed="x",
        progress=Progress(step=40, total=40, loss=2.5),
    )
    assert asyncio.run(bucket.read_log(place, 1)) == b"one\ntwo\n"
    assert asyncio.run(bucket.read_outcome(place, 2)) is None and asyncio.run(bucket.read_log(place, 2)) is None
    assert asyncio.run(bucket.read_outcome(f"{scheme}://no-such-bucket/x", 1)) is None
    assert leave_outcome({}, {**variables, "BROKER_CHECKPOINT_DIR": "/folder"}) == ""
    assert leave_log(tmp_path / "log", {**variables, "BROKER_CHECKPOINT_DIR": "file:///folder"}) == ""


def test_only_an_answer_of_the_bucket_proves_that_no_result_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours is tried again: taken for an empty bucket, it would rerun a job that has succeeded."""
    error: Exception = AuthError("denied")

    def fail(place: str) -> None:
        raise error

    monkeypatch.setattr(outcomes, "open_bucket", fail)
    reads = (BucketOutcomes().read_outcome, BucketOutcomes().read_log)
    assert [asyncio.run(read("s3://b/x", 1)) for read in reads] == [None, None]
    error = RuntimeError("a fault of ours")
    for read in reads:
        with pytest.raises(RuntimeError):
            asyncio.run(read("s3://b/x", 1))


@pytest.mark.parametrize(
    "found", [b"", b"[]", b"\xff", b"{}", b'{"status": "GREAT"}', b'{"status": "RUNNING"}', b'{"status": 7}']
)
def test_invalid_data_in_the_bucket_is_not_an_outcome(found: bytes) -> None:
    assert parse_outcome(found) is None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"returncode": True, "lease_left_s": True, "progress": []}, RunResult(status=RunStatus.SUCCEEDED)),
        ({"returncode": "0", "lease_left_s": "9", "reason": None}, RunResult(status=RunStatus.SUCCEEDED)),
        ({"failed_rank": "1"}, RunResult(status=RunStatus.SUCCEEDED)),
        ({"returncode": 0, "lease_left_s": 9}, RunResult(status=RunStatus.SUCCEEDED, returncode=0, lease_left_s=9.0)),
    ],
)
def test_values_of_the_wrong_type_are_left_out(found: dict[str, Any], expected: RunResult) -> None:
    assert parse_outcome(json.dumps({"status": "SUCCEEDED", **found}).encode()) == expected
