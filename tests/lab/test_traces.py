"""Recordings: read, refused, synthesized, and what is learned from them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import SourceError
from broker.lab.traces import Trace, make_default_traces, make_trace, measure_trace, parse_trace, write_trace
from broker.spot.durations import AGES, HALF_LIFE_HOURS, MET_HOURS, NOTHING_SEEN, find_class, list_hours_by_class
from broker.spot.prior import MEASURED, OLD, fit_prior, scale_hazards


def trace_of(*counts: int, gang: int = 1) -> Trace:
    return Trace(name="t", gap_hours=0.5, counts=counts, gang=gang)


def test_a_market_is_open_only_with_capacity_for_the_whole_gang() -> None:
    trace = parse_trace(json.dumps({"metadata": {"gap_seconds": 600, "gang": 4}, "data": [4, 3, 3, 5]}), "t")
    assert trace.changes == ((0.0, True), (pytest.approx(1 / 6), False), (0.5, True))


def test_a_written_trace_is_read_back() -> None:
    trace = make_trace("zone", 3, hours=10)
    assert parse_trace(write_trace(trace), "zone") == trace


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"data": [1]}', "metadata"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": 60}, "data": []}', "1 to"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1, -1]}', "below 0"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1, 1], "prices": [0.5]}', "one price"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1], "prices": [NaN]}', "one price"),
        ('{"metadata": {"gap_seconds": 60}, "data": [0.9, 0.9]}', "whole counts"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1, Infinity]}', "OverflowError"),
        ('{"metadata": {"gap_seconds": 60, "gang": 1e400}, "data": [1]}', "OverflowError"),
        ('{"metadata": {"gap_seconds": 60, "on_demand_price": "3 USD"}, "data": [1]}', "3 USD"),
        ('{"metadata": {"gap_seconds": 60, "on_demand_price": NaN}, "data": [1]}', "nan is not a price"),
        ('{"metadata": {"gap_seconds": 60, "started_s": "2026-01-01"}, "data": [1]}', "2026-01-01"),
        ("[" * 100_000, "RecursionError"),
    ],
)
def test_an_invalid_trace_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse_trace(text, "zone-a")
    assert "zone-a" in caught.value.message and why in caught.value.message
    assert caught.value.hints


@pytest.mark.parametrize(
    ("given", "prices"),
    [
        ([0, 2.0, 0, None, 3.0], (2.0, 2.0, 2.0, 2.0, 3.0)),
        ([0, 0, None, 0, 0], ()),
        ([], ()),
    ],
)
def test_the_last_price_applies_while_the_price_is_unknown(given: list[float | None], prices: tuple[float]) -> None:
    text = json.dumps({"metadata": {"gap_seconds": 60}, "data": [1] * 5, "prices": given})
    assert parse_trace(text, "t").prices == prices


def test_synthetic_traces_are_reproducible_and_distinct() -> None:
    first, again = make_default_traces(), make_default_traces()
    assert first == again
    assert len({each.counts for each in first}) == len(first)
    for each in first:
        assert each.hours == pytest.approx(336)
        assert 0.2 < each.open_share < 0.98 and len(each.changes) > 20
        assert all(0 < price < 1 for price in each.prices)


def test_facts_of_a_trace_are_computed() -> None:
    facts = measure_trace(trace_of(1, 1, 0, 1))
    assert (facts.hours, facts.open_share, facts.preemptions) == (2.0, 0.75, 1)
    assert facts.mean_open_hours == pytest.approx(0.75) and facts.mean_closed_hours == pytest.approx(0.5)
    assert measure_trace(trace_of(1)).mean_closed_hours is None


@given(st.floats(0, 60), st.floats(0, 60))
def test_a_period_is_split_over_the_classes_of_age_without_loss(begin: float, length: float) -> None:
    parts = list_hours_by_class(begin, begin + length)
    assert sum(hours for _, hours in parts) == pytest.approx(length, abs=1e-9)
    assert all(hours >= 0 for _, hours in parts)


def test_periods_are_counted_by_age_and_the_first_counts_as_an_old_one() -> None:
    seen = trace_of(1, 0, 0, 1, 1, 1, 0).count_periods()
    assert sum(seen.open_ends) == 2 and sum(seen.closed_ends) == 1
    assert seen.open_ends[find_class(1.5)] == 1 and seen.open_ends[find_class(MET_HOURS + 0.5)] == 1
    assert sum(seen.open_hours) == pytest.approx(2.0) and sum(seen.closed_hours) == pytest.approx(1.5)
    assert (seen + NOTHING_SEEN) == seen


def test_frequent_changes_of_a_market_are_learned_after_a_few_periods() -> None:
    seen = NOTHING_SEEN
    before = MEASURED.learn_open(seen)
    assert before == (1.0, 1.0)
    for _ in range(12):
        seen = seen.with_period(0.15, is_open=True)
    young, _ = MEASURED.learn_open(seen)
    assert young > 2
    calm_young, calm_old = MEASURED.learn_open(NOTHING_SEEN.with_period(200, is_open=True, is_ended=False))
    assert calm_old < 0.5 and calm_young < 1
    still = MEASURED.learn_open(NOTHING_SEEN, (MET_HOURS, MET_HOURS + 100))
    assert still[1] < 0.7


def test_a_prior_is_the_shape_that_recordings_share() -> None:
    recordings = [make_trace(f"t{seed}", seed).count_periods() for seed in range(6)]
    prior = fit_prior(recordings)
    assert len(prior.open_hazards) == len(AGES) and all(each > 0 for each in prior.open_hazards)
    assert prior.open_hazards[-1] < prior.open_hazards[2]  # like weather: an old period is likely to last
    slow = scale_hazards(prior.open_hazards, (1.0, 0.5))
    assert slow[OLD - 1] == prior.open_hazards[OLD - 1] and slow[OLD] == prior.open_hazards[OLD] / 2


def test_a_recording_that_was_hardly_ever_closed_says_little_about_reopening() -> None:
    usual = NOTHING_SEEN.with_period(30.0, is_open=True)
    for _ in range(10):
        usual = usual.with_period(6.0, is_open=False)
    blip = NOTHING_SEEN.with_period(46.0, is_open=True).with_period(5.0 + 30 / 3600, is_open=False, from_hours=5.0)
    alone, both = fit_prior([usual]), fit_prior([usual, blip])
    index = find_class(5.5)
    assert both.closed_hazards[index] < 2 * alone.closed_hazards[index]


def test_the_mean_spell_by_the_shape_is_that_of_constant_hazards() -> None:
    prior = fit_prior([NOTHING_SEEN.with_period(1.0, is_open=True)])
    constant = type(prior)(open_hazards=(0.5,) * len(AGES), closed_hazards=(4.0,) * len(AGES))
    assert constant.mean_open_hours == pytest.approx(2.0)
    assert constant.mean_closed_hours == pytest.approx(0.25)


def test_observations_a_day_old_count_half() -> None:
    seen = NOTHING_SEEN.with_period(3.0, is_open=True)
    faded = seen.discount(HALF_LIFE_HOURS)
    assert sum(faded.open_hours) == pytest.approx(1.5) and sum(faded.open_ends) == pytest.approx(0.5)
