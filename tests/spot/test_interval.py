"""The checkpoint interval, against a search."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.spot.interval import INTERVAL_S_MIN, find_best_interval_s, find_expected_hours


@given(st.floats(1, 1000), st.floats(1e-5, 0.5), st.floats(1e-5, 0.5), st.floats(1, 600), st.floats(0, 3600))
def test_more_hazard_never_takes_less_time(work: float, one: float, two: float, stall: float, restart: float) -> None:
    low, high = sorted((one, two))
    tau = find_best_interval_s(stall, low)
    slow = find_expected_hours(work, high, tau, stall, restart)
    assert find_expected_hours(work, low, tau, stall, restart) <= slow * (1 + 1e-9)


@given(st.floats(1, 1000), st.floats(10, 36000), st.floats(0, 60))
def test_without_hazard_only_the_stalls_are_added(work: float, tau: float, stall: float) -> None:
    exact = work * (1 + stall / tau)
    assert find_expected_hours(work, 0, tau, stall, 300) == pytest.approx(exact)
    assert find_expected_hours(work, 1e-9, tau, stall, 300) == pytest.approx(exact, rel=1e-3)


@given(st.floats(1e-4, 0.5), st.floats(1, 300))
def test_daly_interval_is_near_the_best_of_a_grid(hazard: float, stall: float) -> None:
    best = min(find_expected_hours(100, hazard, 10 * 1.15**k, stall, 300) for k in range(60))
    assert find_expected_hours(100, hazard, find_best_interval_s(stall, hazard), stall, 300) <= best * 1.02


def test_without_hazard_there_is_no_interval_and_with_much_it_has_a_floor() -> None:
    assert find_best_interval_s(10, 0) == math.inf
    assert find_best_interval_s(10, 1e9) == INTERVAL_S_MIN
