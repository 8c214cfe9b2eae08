"""The record of price updates, without any process: what a file that cannot be trusted means."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.catalog.attempts import FRESH_S, locate_attempts, read_attempts, record_attempts

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
