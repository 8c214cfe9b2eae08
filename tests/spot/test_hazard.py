"""Hazards from bands and from observations."""

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
    assert mix_hazard(0.01, Observation(preemptions=0, node_hours=0)) == pytest.approx(0.01, rel=0.001)


@given(hazards, hazards)
def test_long_watching_wins_over_the_band(prior: float, true: float) -> None:
    hours = 1e7
    seen = Observation(preemptions=round(true * hours), node_hours=hours)
    assert mix_hazard(prior, seen) == pytest.approx(true, rel=0.01, abs=1e-5)


def test_a_month_of_quiet_weighs_as_much_as_the_band() -> None:
    seen = Observation(preemptions=0, node_hours=PRIOR_NODE_HOURS)
    assert mix_hazard(0.01, seen) == pytest.approx(0.005, rel=0.01)


def test_a_place_that_is_nothing_like_its_band_is_believed_soon() -> None:
    """A band implies months between preemptions; recorded zones close every few hours."""
    band = hazard_per_node_hour(5)
    found = [mix_hazard(band, Observation(preemptions=count, node_hours=5.0 * count)) for count in range(6)]
    assert found[0] == pytest.approx(band, rel=0.05) and found[1] < 0.01, "one may be bad luck"
    assert 0.1 < found[3] < found[5] == pytest.approx(0.2, rel=0.1), found
    busy = Observation(preemptions=3, node_hours=3 / band)
    assert mix_hazard(band, busy) == pytest.approx(band, rel=0.2), "as many as the band says are no reason to doubt it"


@given(hazards, st.integers(0, 100), st.floats(0, 1e5))
def test_one_more_preemption_raises_it_and_quiet_hours_lower_it(prior: float, count: int, hours: float) -> None:
    mixed = mix_hazard(prior, Observation(preemptions=count, node_hours=hours))
    assert mix_hazard(prior, Observation(preemptions=count + 1, node_hours=hours)) > mixed
    assert mix_hazard(prior, Observation(preemptions=count, node_hours=hours + 10)) < mixed
