"""The hedge timer: learned from the answers of a cloud, within limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.provision.hedge_timer import LIMITS, Answer, HedgeLimits, HedgeTimer, bound, update_response_time
from broker.state.calls import ResponseTime
from broker.state.store import Store
from tests.state.samples import Hands


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state.db", clock=Hands())


def test_latency_is_learned_by_the_rule_of_tcp() -> None:
    """RFC 6298: the deviation starts at half the first sample; gains are 1/8 for the mean and 1/4 for the deviation."""
    first = update_response_time(None, 8.0)
    assert first == ResponseTime(mean_s=8.0, deviation_s=4.0)
    assert update_response_time(first, 16.0) == ResponseTime(mean_s=9.0, deviation_s=5.0)
    assert update_response_time(first, 0.0) == ResponseTime(mean_s=7.0, deviation_s=5.0)
    assert update_response_time(first, 8.0) == ResponseTime(mean_s=8.0, deviation_s=3.0)


def test_the_timer_is_the_mean_plus_four_deviations_within_limits() -> None:
    limits = HedgeLimits(prior_s=7.0, least_s=5.0, most_s=60.0)
    assert bound(None, limits) == 7.0
    assert bound(ResponseTime(mean_s=8.0, deviation_s=3.0), limits) == 20.0
    assert bound(ResponseTime(mean_s=1.0, deviation_s=0.1), limits) == 5.0
    assert bound(ResponseTime(mean_s=50.0, deviation_s=9.0), limits) == 60.0


def test_the_timer_is_separate_per_cloud_and_answer(store: Store) -> None:
    timer = HedgeTimer(store.response_times)
    assert [timer.measure_s("x", answer) for answer in Answer] == [20.0, 120.0]
    timer.note("x", Answer.CREATED, 8.0)
    assert timer.measure_s("x", Answer.CREATED) == 24.0
    assert timer.measure_s("y", Answer.CREATED) == LIMITS[Answer.CREATED].prior_s
    timer.note("z", Answer.CREATED, -5.0)
    assert store.response_times.get("z", "created") == ResponseTime(mean_s=0.0, deviation_s=0.0), (
        "a clock that was set back"
    )


@pytest.mark.parametrize(
    ("answer", "prior_s", "least_s", "most_s"), [(Answer.CREATED, 20.0, 5.0, 60.0), (Answer.WHOLE, 120.0, 30.0, 300.0)]
)
def test_the_limits_equal_the_documented_ones(answer: Answer, prior_s: float, least_s: float, most_s: float) -> None:
    paces = (None, update_response_time(None, 0.0), update_response_time(None, 1e6))
    assert [bound(pace, LIMITS[answer]) for pace in paces] == [
        prior_s, least_s, most_s,
    ]  # fmt: skip
