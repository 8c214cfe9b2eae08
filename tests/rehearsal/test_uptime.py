"""Shares of time and recoveries of a rehearsed service, from its observations."""

from __future__ import annotations

import pytest

from broker.rehearsal.service_result import price_ondemand
from broker.rehearsal.uptime import ReadyCount, ReplicaLoss, measure_uptime


def count(*observed: tuple[float, int], wanted: int = 2) -> list[ReadyCount]:
    return [ReadyCount(time_s=time_s, wanted=wanted, ready=ready) for time_s, ready in observed]


def lose(time_s: float, *replicas: int, counted: int, announced: int | None = None) -> ReplicaLoss:
    announced = counted if announced is None else announced
    return ReplicaLoss(time_s=time_s, replicas=replicas, place="aws us-east-1a", announced=announced, counted=counted)


def test_uptime_of_the_docstring_example() -> None:
    counts = count((0, 0), (100, 2), (500, 1), (560, 2), (1100, 2))
    uptime = measure_uptime(counts, [lose(500, 1, counted=2)])
    assert (uptime.start_s, uptime.served_s, uptime.wanted) == (100, 1000, 2)
    assert uptime.shares == {1: 1.0, 2: pytest.approx(0.94)}
    assert uptime.kept_share == pytest.approx(0.94)
    assert [each.recovery_s for each in uptime.recoveries] == [60]


def test_time_before_all_wanted_replicas_were_ready_does_not_count() -> None:
    uptime = measure_uptime(count((0, 0), (50, 1), (80, 2), (180, 2)), [])
    assert uptime.start_s == 80 and uptime.kept_share == 1.0 and uptime.served_s == 100


def test_a_loss_that_spare_replicas_cover_takes_no_time() -> None:
    uptime = measure_uptime(count((0, 3), (90, 3), (101, 2), (200, 3), (300, 3)), [lose(100, 1, counted=2)])
    assert [each.recovery_s for each in uptime.recoveries] == [0.0]
    assert uptime.kept_share == 1.0


def test_a_loss_at_the_end_has_no_recovery() -> None:
    uptime = measure_uptime(count((0, 2), (90, 2), (110, 1), (120, 1)), [lose(100, 2, counted=2)])
    assert [each.recovery_s for each in uptime.recoveries] == [None]
    assert uptime.kept_share == pytest.approx(110 / 120)


def test_a_loss_while_the_clock_stands_still_is_one() -> None:
    """The clock stands still while nodes are listed, which takes long on a busy machine."""
    counts = count((0, 2), (600, 2), (600, 2), (600, 0), (651, 2), (1200, 2))
    assert [each.recovery_s for each in measure_uptime(counts, [lose(600, 1, 2, counted=3)]).recoveries] == [51]


def test_a_replica_that_heeds_its_notice_counts_as_ready_before_the_loss() -> None:
    """Its program ends on SIGTERM, so it is not ready for a while before its machine ends."""
    counts = count((0, 2), (600, 2), (601, 1), (602, 0), (603, 0), (655, 2), (1200, 2))
    loss = lose(603, 1, 2, announced=2, counted=4)
    assert [each.recovery_s for each in measure_uptime(counts, [loss]).recoveries] == [52]


def test_a_service_that_was_down_is_compared_with_the_number_before_the_loss() -> None:
    """The second replica was lost while the first one was not back yet: one ready replica is as many as before."""
    counts = count((0, 2), (11, 1), (19, 1), (21, 0), (60, 1), (90, 2), (100, 2))
    first, second = measure_uptime(counts, [lose(10, 1, counted=1), lose(20, 2, counted=3)]).recoveries
    assert (first.recovery_s, second.recovery_s) == (80, 40)


def test_a_service_that_never_had_all_replicas_has_no_shares() -> None:
    uptime = measure_uptime(count((0, 0), (100, 1)), [])
    assert uptime.start_s is None and uptime.kept_share is None and not uptime.shares


def test_a_wanted_number_that_grows_is_kept_as_it_was_at_each_time() -> None:
    counts = [*count((0, 1), (100, 1), wanted=1), *count((100, 1), (150, 2), (200, 2))]
    uptime = measure_uptime(counts, [])
    assert uptime.wanted == 2 and uptime.kept_share == pytest.approx(0.75)
    assert uptime.shares == {1: 1.0, 2: pytest.approx(0.25)}


def test_uptime_without_observations_has_no_start() -> None:
    assert measure_uptime([], []).start_s is None


def test_ondemand_price_covers_the_wanted_replicas_for_the_whole_time() -> None:
    assert price_ondemand(count((0, 0), (1800, 2), (3600, 2)), 1.5) == pytest.approx(3.0)
    assert price_ondemand(count((0, 0), (3600, 2)), float("inf")) is None
