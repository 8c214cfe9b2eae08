"""Forecasts of the market model, and the effect of evidence on them."""

from __future__ import annotations

import itertools
from operator import attrgetter

import pytest

from broker.spot import market_model
from broker.spot.market_model import (
    MarketEvidence,
    RunDistribution,
    find_hazard,
    forecast_mean,
    forecast_run,
    weigh_scenarios,
)
from broker.spot.recorded_runs import RecordedRun, read_scenarios

NOTHING = MarketEvidence()
HOURS = attrgetter("hours")


def forecast_usd(evidence: MarketEvidence = NOTHING, places: int = 1) -> float:
    found = forecast_run(work_hours=40, deadline_hours=60, start_hours=0.1, places=places, evidence=evidence)
    return found.mean(lambda run: run.spot_hours * 0.3 + run.ondemand_hours)


def test_weights_add_up_to_one_and_families_count_by_the_root_of_their_size() -> None:
    single = [each for each in read_scenarios() if each.places == 1]
    weights = weigh_scenarios(single, NOTHING)
    assert sum(weights) == pytest.approx(1.0)
    by_family: dict[str, list[float]] = {}
    for each, weight in zip(single, weights, strict=True):
        by_family.setdefault(each.family, []).append(weight)
    (small, *_, large) = sorted(by_family.values(), key=len)
    assert sum(large) / sum(small) == pytest.approx((len(large) / len(small)) ** 0.5)


def test_preemptions_seen_raise_the_hazard_and_calm_hours_lower_it() -> None:
    stormy = MarketEvidence(preemptions=40, gang_hours=40)
    calm = MarketEvidence(preemptions=0, gang_hours=200)
    assert find_hazard(1, calm) < find_hazard() / 3
    assert find_hazard(1, stormy) > find_hazard()
    assert forecast_usd(calm) < forecast_usd() < forecast_usd(stormy)


def test_a_market_that_refused_costs_more_than_one_that_is_open() -> None:
    assert forecast_usd(MarketEvidence(is_open=True)) < forecast_usd() < forecast_usd(MarketEvidence(is_open=False))


def test_more_places_cost_less() -> None:
    costs = [forecast_usd(places=places) for places in (1, 2, 3, 6)]
    assert costs == sorted(costs, reverse=True)
    assert forecast_usd(places=50) == forecast_usd(places=6)


def test_the_hazard_of_recorded_markets_is_far_above_published_bands() -> None:
    assert 0.07 < find_hazard() < 2.4  # the range of the recordings; the band of 15 % a month is 0.0002


def make_runs(hours: list[float]) -> RunDistribution:
    runs = [RecordedRun(spot_hours=each, ondemand_hours=0.0, hours=each, preemptions=0.0) for each in hours]
    return RunDistribution(runs=runs, weights=[1 / len(runs)] * len(runs), scenario_count=len(runs))


def test_quantiles_lie_between_the_runs_and_no_chance_is_certain() -> None:
    found = make_runs([4.0, 1.0, 3.0, 2.0])
    assert found.quantiles(lambda run: run.hours, (0.05, 0.5, 0.95)) == pytest.approx([1.0, 2.5, 4.0])
    assert found.mean(lambda run: run.hours) == pytest.approx(2.5)
    assert found.chance(lambda run: run.hours <= 2.0) == pytest.approx(0.5)
    assert found.chance(lambda run: True) == pytest.approx(1 - 1 / 6)


@pytest.mark.parametrize("deadline", [None, 30.0, 45.0])
def test_forecasts_of_several_places_are_wider_than_the_recorded_runs_and_have_their_mean(
    deadline: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The families in which groups of places are recorded differ more than the places of one family do."""

    def forecast() -> RunDistribution:
        return forecast_run(work_hours=24.0, deadline_hours=deadline, start_hours=0.1, places=3)

    wide = forecast()
    monkeypatch.setattr(market_model, "UNLIKE_SHARE", 0.0)
    recorded = forecast()
    for value in (
        HOURS,
        attrgetter("spot_hours"),
        attrgetter("ondemand_hours"),
        attrgetter("preemptions"),
    ):
        assert wide.mean(value) == pytest.approx(recorded.mean(value))
        assert min(map(value, wide.runs)) >= 0.0
    (low, high), (least, most) = (
        (min(run.hours for run in found.runs), max(run.hours for run in found.runs)) for found in (wide, recorded)
    )
    assert low <= least and wide.quantiles(HOURS, (0.25,)) < recorded.quantiles(HOURS, (0.25,))
    assert high > most if deadline is None else high <= deadline + 1e-9


@pytest.mark.parametrize(
    "evidence", [NOTHING, MarketEvidence(is_open=False), MarketEvidence(preemptions=9, gang_hours=9)]
)
@pytest.mark.parametrize(("places", "deadline"), [(1, 60.0), (2, 60.0), (4, 50.0), (6, None), (3, 40.05)])
def test_the_fast_mean_is_the_mean_of_the_runs(evidence: MarketEvidence, places: int, deadline: float | None) -> None:
    """Plans rank by the fast mean; the forecast shows the runs."""
    terms = {"work_hours": 40.0, "deadline_hours": deadline, "start_hours": 0.1, "places": places, "evidence": evidence}
    mean, runs = forecast_mean(**terms), forecast_run(**terms)  # type: ignore[arg-type]
    for name in ("spot_hours", "ondemand_hours", "hours", "preemptions"):
        assert getattr(mean, name) == pytest.approx(runs.mean(attrgetter(name)), rel=1e-3, abs=1e-3), name


def test_own_history_of_one_place_says_nothing_where_the_job_can_move() -> None:
    """The recorded groups are weighed as without it; a share of single places among them is not."""
    groups = [each for each in read_scenarios() if each.places > 1]
    seen = MarketEvidence(preemptions=40, gang_hours=40)
    assert weigh_scenarios(groups, seen) == pytest.approx(weigh_scenarios(groups, NOTHING))
    single = [each for each in read_scenarios() if each.places == 1]
    assert weigh_scenarios(single, seen) != pytest.approx(weigh_scenarios(single, NOTHING))


def test_a_number_of_places_between_the_recorded_ones_costs_in_between() -> None:
    costs = [forecast_usd(places=places) for places in (2, 3, 4, 5, 6)]
    assert all(one > two for one, two in itertools.pairwise(costs))
