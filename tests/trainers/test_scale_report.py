"""The scaling report: short runs, and what is made of them."""

import pytest

from trainers.lm import main
from trainers.scale_report import Measurement, format_row, list_counts, make_row, report_scaling

from .conftest import TINY


def test_powers_of_two_and_all_devices_are_measured() -> None:
    assert list_counts(1) == [1] and list_counts(2) == [1, 2] and list_counts(6) == [1, 2, 4, 6]


def test_efficiency_is_against_one_rank_and_communication_against_ranks_that_do_not_communicate() -> None:
    alone, measured, apart = (Measurement(tokens_per_s=rate, mfu=None) for rate in (1000.0, 1200.0, 1600.0))
    row = make_row("strong", 2, 16, measured, alone, apart)
    assert (row.efficiency, row.communication) == pytest.approx((0.6, 0.25))
    assert make_row("weak", 2, 32, measured, alone, None).communication is None
    assert make_row("weak", 1, 16, alone, alone, None).communication == 0.0
    head, line = format_row(row, with_head=True).splitlines()
    assert head.split() == ["scaling", "ranks", "batch", "tokens/s", "efficiency", "MFU", "communication"]
    assert line.split() == ["strong", "2", "16", "1,200", "60", "%", "-", "25", "%"]


@pytest.mark.long
def test_report_measures_strong_and_weak_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_scaling(TINY, batch=4, ranks_max=2) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        ["strong", "1", "4"], ["strong", "2", "4"], ["weak", "1", "4"], ["weak", "2", "8"]
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_report_shows_a_failed_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scale-report", "--data.path", "/missing"]) == 1
    assert "`/missing` does not exist" in capsys.readouterr().err
