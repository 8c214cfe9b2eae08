"""Properties of the whole ranking that hold for any offers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.errors import NoOfferError
from broker.optimizer.ranking import SAME_SCORE
from broker.spot.hazard import Observation
from broker.types import Offer
from tests.optimizer.market import offer, plan, read
from tests.tiers import examples

prices = st.floats(0.1, 100)
bands = st.sampled_from([None, 5.0, 20.0, 100.0])
rows = st.lists(st.tuples(prices, prices, bands), min_size=1, max_size=6)
GOAL = "resources: {accelerators: H100:8}\nnum_nodes: 16\ncheckpoint: {stall: 60s, restart: 1h}\ngoal: "
quick = settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])


def make_offers(found: list[tuple[float, float, float | None]]) -> list[Offer]:
    return [
        offer(region=f"r{i}", ondemand_usd_hour=max(a, b), spot_usd_hour=min(a, b), interruption_band=band)
        for i, (a, b, band) in enumerate(found)
    ]


def find_usd(text: str, offers: list[Offer], **options: object) -> float:
    try:
        return plan(text, offers, **options).choice.expected_usd or 0.0
    except NoOfferError:
        return float("inf")


@given(rows, st.tuples(prices, prices, bands), st.integers(6000, 12000))
@quick
def test_one_more_offer_never_raises_the_cost(
    found: list[tuple[float, float, float | None]], more: tuple[float, float, float | None], deadline: int
) -> None:
    offers = make_offers([*found, more])
    text = GOAL + f"{{work: 100h, deadline: {deadline}m, hour_value: 0}}"
    assert find_usd(text, offers) <= find_usd(text, offers[:-1]) * SAME_SCORE


@given(rows, st.integers(5400, 15000), st.integers(0, 6000))
@quick
def test_a_longer_deadline_never_raises_the_cost(
    found: list[tuple[float, float, float | None]], deadline: int, more: int
) -> None:
    """The 2 % are noise of the recorded runs: where time is worth nothing, more time also means more waiting."""
    offers = make_offers(found)
    short, long = (
        GOAL + f"{{work: 100h, deadline: {minutes}m, hour_value: 0}}" for minutes in (deadline, deadline + more)
    )
    assert find_usd(long, offers) <= find_usd(short, offers) * 1.02


@given(rows, st.integers(0, 20), st.integers(0, 20))
@quick
def test_more_preemptions_seen_never_lower_the_cost_of_spot(
    found: list[tuple[float, float, float | None]], one: int, two: int
) -> None:
    offers = make_offers(found)
    text = GOAL.replace("H100:8}", "H100:8, use_spot: true}") + "{work: 100h, hour_value: 0}"

    def seen(count: int) -> dict[tuple[str, str, str | None, str], Observation]:
        observed = Observation(preemptions=count, node_hours=1000)
        return {(each.cloud, each.region, each.zone, each.instance_type): observed for each in offers}

    few, many = (find_usd(text, offers, history=seen(count)) for count in sorted((one, two)))
    assert few <= many * 1.01  # the faster of two that are within 1 % is chosen


@given(rows, st.randoms())
@quick
def test_ranking_does_not_depend_on_the_order_of_offers(
    found: list[tuple[float, float, float | None]], random: object
) -> None:
    offers = make_offers(found)
    text = GOAL + "{work: 100h, deadline: 150h}"
    mixed = list(offers)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    try:
        one = plan(text, offers)
    except NoOfferError:
        with pytest.raises(NoOfferError):
            plan(text, mixed)
        return
    assert [each.placement for each in one.estimates] == [each.placement for each in plan(text, mixed).estimates]


@given(rows, st.integers(6060, 8400), st.floats(0.5, 0.99))
@quick
def test_everything_ranked_meets_the_deadline_and_the_budget(
    found: list[tuple[float, float, float | None]], deadline: int, confidence: float
) -> None:
    budget = 60_000
    text = GOAL + f"{{work: 100h, deadline: {deadline}m, budget: {budget}, confidence: {confidence}}}"
    try:
        made = plan(text, make_offers(found))
    except NoOfferError:
        return
    costs = [each.expected_usd or 0.0 for each in made.estimates]
    assert max(costs) <= budget
    assert all((each.deadline_chance or 0) >= confidence for each in made.estimates)
    assert made.choice.expected_usd == pytest.approx(sum_of_terms(made.choice))


def sum_of_terms(estimate: object) -> float:
    parts = estimate.breakdown  # type: ignore[attr-defined]
    return float(parts.compute_usd + parts.egress_usd + parts.storage_usd)


@given(st.integers(1, 1000))
@quick
def test_work_means_the_same_in_days_hours_minutes_and_seconds(days: int) -> None:
    offers = [offer()]
    one = find_usd(GOAL + f"{{work: {days}d}}", offers)
    for text in (
        f"{days * 24}h",
        f"{days * 24 * 60}m",
        f"{days * 24 * 3600}s",
        f"{days - 1}d24h" if days > 1 else "24h",
    ):
        assert find_usd(GOAL + f"{{work: {text}}}", offers) == pytest.approx(one)


def test_estimates_are_made_once_and_slices_are_tuples() -> None:
    made = plan(GOAL + "{work: 10h}", make_offers([(10, 5, None), (20, 6, 5.0)]))
    assert made.estimates[0] is made.choice
    assert made.estimates[-1] is made.estimates[len(made.estimates) - 1]
    assert made.estimates[:2] == tuple(made.estimates)[:2]
    with pytest.raises(IndexError):
        made.estimates[len(made.estimates)]
    assert replace(made, estimates=tuple(made.estimates)).estimates == tuple(made.estimates)


def test_reading_a_task_twice_plans_the_same() -> None:
    text = GOAL + "{work: 10h, deadline: 20h}"
    assert plan(read(text), [offer()]).choice == plan(read(text), [offer()]).choice
