"""The record of price updates, without any process: what a file that cannot be trusted means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.catalog.attempts import (
    FRESH_S,
    RETRY_S,
    RETRY_S_MAX,
    UNFINISHED,
    UpdateAttempt,
    forget_attempts,
    locate_attempts,
    read_attempts,
    record_attempts,
    record_starts,
)

NOW_S = 1.79e9


def test_update_is_due_again_after_seven_hours(tmp_path: Path) -> None:
    record_attempts(tmp_path, {"aws": None}, now_s=NOW_S)
    (aws,) = read_attempts(tmp_path).values()
    assert FRESH_S == 7 * 3600 and not aws.is_due(NOW_S + FRESH_S - 1) and aws.is_due(NOW_S + FRESH_S)


@pytest.mark.parametrize("time", ["NaN", "Infinity", "-Infinity", '"yesterday"', "null"])
def test_record_with_an_impossible_time_counts_as_missing(tmp_path: Path, time: str) -> None:
    """A time that compares with nothing would never be due, and prices would grow old in silence."""
    text = f'{{"aws": {{"attempted_s": {time}, "succeeded_s": null, "failures": 0, "error": null}}}}'
    locate_attempts(tmp_path).write_text(text)
    assert read_attempts(tmp_path) == {}


def read_one(cache: Path, cloud: str = "aws") -> UpdateAttempt:
    return read_attempts(cache)[cloud]


def test_failed_updates_are_repeated_after_waits_that_double_up_to_a_day(tmp_path: Path) -> None:
    assert (RETRY_S, RETRY_S_MAX) == (900.0, 86_400.0)
    record_attempts(tmp_path, {"aws": None}, now_s=NOW_S - 1.0)
    waits = []
    for number in range(12):
        record_attempts(tmp_path, {"aws": "down"}, now_s=NOW_S + number)
        waits.append(read_one(tmp_path).find_next_s() - NOW_S - number)
    assert waits == [min(RETRY_S * 2.0**number, RETRY_S_MAX) for number in range(12)]
    assert read_one(tmp_path).succeeded_s == NOW_S - 1.0, "the last success is not forgotten"
    record_attempts(tmp_path, {"aws": None}, now_s=NOW_S)
    assert read_one(tmp_path) == UpdateAttempt(attempted_s=NOW_S, succeeded_s=NOW_S)


def test_update_that_never_ends_is_one_failure_and_its_end_is_no_second_one(tmp_path: Path) -> None:
    record_starts(tmp_path, ["aws"], now_s=NOW_S)
    assert (read_one(tmp_path).failures, read_one(tmp_path).error) == (1, UNFINISHED)
    record_attempts(tmp_path, {"aws": "down"}, now_s=NOW_S)
    assert (read_one(tmp_path).failures, read_one(tmp_path).error) == (1, "down")
    record_starts(tmp_path, ["aws"], now_s=NOW_S + 1)
    record_starts(tmp_path, ["aws"], now_s=NOW_S + 2)
    assert read_one(tmp_path).failures == 3, "two that were killed"
    record_attempts(tmp_path, {"aws": "down"}, now_s=NOW_S + 2)
    assert read_one(tmp_path).failures == 3, "the end of the last one is no further failure, and forgets none"


def test_records_of_other_clouds_are_kept_and_forgotten_ones_are_not(tmp_path: Path) -> None:
    record_attempts(tmp_path, {"aws": None, "gcp": "down"}, now_s=NOW_S)
    record_attempts(tmp_path, {"azure": None}, now_s=NOW_S + 5)
    forget_attempts(tmp_path, ["gcp"])
    assert {cloud: each.attempted_s for cloud, each in read_attempts(tmp_path).items()} == {
        "aws": NOW_S, "azure": NOW_S + 5,
    }  # fmt: skip


def test_attempt_in_the_future_is_due_because_the_clock_was_set_back(tmp_path: Path) -> None:
    record_attempts(tmp_path, {"aws": None}, now_s=NOW_S)
    assert read_one(tmp_path).is_due(NOW_S - 86_400.0) and not read_one(tmp_path).is_due(NOW_S)


def test_record_that_could_not_be_written_is_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_attempts(tmp_path, {"aws": None}, now_s=NOW_S)

    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        record_attempts(tmp_path, {"aws": "down"}, now_s=NOW_S + 1)
    assert read_one(tmp_path).error is None and not list(tmp_path.glob("*.tmp")), "on the disk before it is in place"
