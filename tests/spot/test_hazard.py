"""Hazards from bands, and from what was seen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.spot.hazard import PRIOR_NODE_HOURS, Observation, hazard_per_node_hour, mix_hazard

hazards = st.floats(1e-6, 0.1)


def test_hazard_grows_with_the_band() -> None:
    bands = [hazard_per_node_hour(band) for band in (5, 10, 15, 20, 100)]
    assert bands == sorted(bands)
    assert 1 - math.exp(-bands[0] * 730) == pytest.approx(0.05)


def test_nothing_seen_leaves_the_band() -> None:
    assert mix_hazard(0.01, None) == 0.01
    assert mix_hazard(0.01, Observation(preemptions=0, node_hours=0)) == pytest.approx(0.01)


@given(hazards, hazards)
def test_long_watching_wins_over_the_band(prior: float, true: float) -> None:
    hours = 1e7
    seen = Observation(preemptions=round(true * hours), node_hours=hours)
    assert mix_hazard(prior, seen) == pytest.approx(true, rel=0.01, abs=1e-5)


def test_a_month_of_watching_weighs_as_much_as_the_band() -> None:
    seen = Observation(preemptions=round(0.03 * PRIOR_NODE_HOURS), node_hours=PRIOR_NODE_HOURS)
    assert mix_hazard(0.01, seen) == pytest.approx((0.01 + seen.preemptions / PRIOR_NODE_HOURS) / 2)


@given(hazards, st.integers(0, 100), st.floats(0, 1e5))
def test_one_more_preemption_raises_it_and_quiet_hours_lower_it(prior: float, count: int, hours: float) -> None:
    mixed = mix_hazard(prior, Observation(preemptions=count, node_hours=hours))
    assert mix_hazard(prior, Observation(preemptions=count + 1, node_hours=hours)) > mixed
    assert mix_hazard(prior, Observation(preemptions=count, node_hours=hours + 10)) < mixed
