"""Every registered policy on every kind of market: valid decisions, and deadlines met whenever possible."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.lab.markets import make_site
from broker.lab.replay import Case, ReplayOutcome, replay
from broker.lab.traces import Trace
from broker.spot.durations import MET_HOURS
from broker.spot.forecast import count_cohorts_once, expect_second_chance, read_market
from broker.spot.policies import ORACLES, POLICIES, load_policy
from broker.spot.policies.base import Candidate, Decision, JobView, Move, Stay, Wait
from broker.spot.prior import MEASURED
from broker.types import Offer, Placement
from tests.tiers import examples, spread

PUNCTUAL = ("on-demand", "greedy", "uniform-progress", "next-spot", "adaptive")
CHEAP = tuple(name for name in PUNCTUAL if name != "adaptive")
WORK = 8.0


def make_candidate(zone: str = "a", *, is_spot: bool, usd: float = 1.0, **facts: object) -> Candidate:
    offer = Offer(
        cloud="c", region=zone, zone=zone, instance_type="t", vcpus=1, memory_gib=1,
        ondemand_usd_hour=usd, spot_usd_hour=usd,
    )  # fmt: skip
    placement = Placement(offer=offer, is_spot=is_spot, node_count=1)
    return Candidate(placement=placement, start_hours=0.1, **facts)  # type: ignore[arg-type]


def view_of(work: float, left: float | None, **facts: object) -> JobView:
    return JobView(work_left_hours=work, time_left_hours=left, work_hours=10, deadline_hours=left, **facts)  # type: ignore[arg-type]


def live(
    counts: Sequence[int], name: str, *, slack: float, start: float = 0.1, work: float = WORK, **facts: float
) -> ReplayOutcome:
    trace = Trace(name="t", gap_hours=1 / 6, counts=tuple(counts))
    case = Case(sites=(make_site(trace, start_hours=start),), work_hours=work, deadline_hours=work * slack, **facts)
    return replay(case, load_policy(name), is_oracle=name in ORACLES)


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_runs_and_spot_is_closed_or_open_with_time_to_spare(name: str) -> None:
    policy = load_policy(name)
    sure, closed = make_candidate(is_spot=False), make_candidate(is_spot=True, usd=0.3, is_open=False, age_hours=1.0)
    assert not isinstance(policy(view_of(10, 40), [closed, sure]), Stay)
    opened = make_candidate(is_spot=True, usd=0.3, age_hours=9.0)
    decision = policy(view_of(10, 40), [opened, sure])
    assert isinstance(decision, Move)
    assert decision.target is (sure if name == "on-demand" else opened)
    assert decision.reason


@pytest.mark.parametrize("name", PUNCTUAL)
def test_at_the_point_of_no_return_on_demand_is_started(name: str) -> None:
    sure, spot = make_candidate(is_spot=False), make_candidate(is_spot=True, usd=0.01, age_hours=50.0)
    decision = load_policy(name)(view_of(10, 10.1), [spot, sure])
    assert isinstance(decision, Move) and decision.target is sure


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "on-demand"])
def test_without_deadline_spot_is_waited_for(name: str) -> None:
    policy, closed = load_policy(name), make_candidate(is_spot=True, usd=0.3, is_open=False)
    sure = make_candidate(is_spot=False)
    assert isinstance(policy(view_of(10, None), [closed, sure]), Wait)
    opened = make_candidate(is_spot=True, usd=0.3, age_hours=2.0)
    decision = policy(view_of(10, None), [closed, opened, sure])
    assert isinstance(decision, Move) and decision.target is opened


def test_no_policy_waits_while_unobserved_spot_is_open() -> None:
    """Waiting reveals nothing: the policy starts on it wherever that is safe and any spare time is left."""
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    for age in (0.0, 0.1, 0.3, 2.0, 30.0):
        for left in (10.7, 12.0, 18.0, 60.0):
            spot = make_candidate(is_spot=True, usd=0.9, age_hours=age, is_watched=False)
            assert isinstance(policy(view_of(10, left), [spot, sure]), Move)
    watched = make_candidate(is_spot=True, usd=0.9, age_hours=0.1)
    assert isinstance(policy(view_of(10, 18.0), [watched, sure]), Wait), "it may show that it lasts"
    risky = make_candidate(is_spot=True, usd=0.3, age_hours=9.0, is_watched=False)
    decision = policy(view_of(10, 10.15), [risky, sure])
    assert not isinstance(decision, Move) or decision.target is sure


def test_a_distant_location_is_chosen_if_it_saves_more_than_its_egress() -> None:
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    near = make_candidate(is_spot=True, usd=0.3, is_open=False, age_hours=2.0)
    for egress, is_entered in ((0.5, True), (9.0, False)):
        far = make_candidate("b", is_spot=True, usd=0.3, age_hours=9.0, move_usd=egress)
        decision = policy(view_of(10, 20), [near, far, sure])
        assert (isinstance(decision, Move) and decision.target is far) is is_entered


def test_a_much_cheaper_place_is_worth_its_egress_over_all_the_work_not_over_one_stay() -> None:
    """A place that has just opened may close soon, but the data are there then."""
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    near = make_candidate(is_spot=True, usd=0.85, age_hours=9.0)
    far = make_candidate("b", is_spot=True, usd=0.18, age_hours=9.0, move_usd=8.0)
    view = JobView(work_left_hours=48.0, time_left_hours=72.0, work_hours=48.0, deadline_hours=72.0)
    decision = policy(view, [near, far, sure])
    assert isinstance(decision, Move) and decision.target is far


def test_spare_time_is_not_used_up_where_on_demand_near_the_data_keeps_some() -> None:
    """On-demand elsewhere is cheaper for all the work, but the job could not return to spot without egress twice."""
    policy = load_policy("adaptive")
    near, far = (
        make_candidate(zone, is_spot=True, usd=0.2, is_open=False, age_hours=2.0, move_usd=egress)
        for zone, egress in (("a", 0.0), ("b", 2.0))
    )
    here = make_candidate("a", is_spot=False, usd=1.13)
    there = make_candidate("b", is_spot=False, usd=1.0, move_usd=2.0)
    view = JobView(work_left_hours=47.0, time_left_hours=48.5, work_hours=48.0, deadline_hours=56.0)
    decision = policy(view, [near, far, here, there])
    assert isinstance(decision, Move) and decision.target is here


def test_places_that_change_together_are_one_market() -> None:
    """They reopen as often as one of them, and are no second chance for each other."""
    sure = make_candidate(is_spot=False)
    for is_open in (True, False):
        together = [
            read_market(make_candidate(f"z{i}", is_spot=True, usd=0.3, age_hours=1.5, is_open=is_open), sure, MEASURED)
            for i in range(6)
        ]
        alone = [
            read_market(replace(each.candidate, age_hours=1.5 + 0.1 * i), sure, MEASURED)
            for i, each in enumerate(together)
        ]
        assert expect_second_chance(together, together[0], 10.0) == 0.0 < expect_second_chance(alone, alone[0], 10.0)
        assert sum(count_cohorts_once(together, [1.0] * 6)) == 1.0
        assert count_cohorts_once(alone, [1.0] * 6) == [1.0] * 6
    unseen = [
        read_market(make_candidate(f"z{i}", is_spot=True, age_hours=5.0, met_hours=5.0), sure, MEASURED)
        for i in range(2)
    ]
    assert expect_second_chance(unseen, unseen[0], 10.0) > 0.0, "that both were met at the same time says nothing"


def test_a_job_does_not_wait_for_a_closed_location_with_open_ones_at_similar_prices() -> None:
    """It reopens at its own rate, not at that of all places together."""
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    closed = make_candidate(is_spot=True, usd=0.28, is_open=False, age_hours=5.0)
    opened = [make_candidate(f"z{index}", is_spot=True, usd=0.3, age_hours=9.0) for index in range(11)]
    decision = policy(view_of(10, 20), [closed, *opened, sure])
    assert isinstance(decision, Move) and decision.target.is_spot


def test_a_costly_failure_elsewhere_does_not_exclude_spot_near_the_data() -> None:
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    near = make_candidate(is_spot=True, usd=0.3, age_hours=9.0)
    far = make_candidate("b", is_spot=True, usd=0.3, age_hours=9.0, move_usd=2.0)
    decision = policy(view_of(9, 18, spent_usd=4.0), [near, far, sure])
    assert isinstance(decision, Move) and decision.target is near


@pytest.mark.parametrize("name", POLICIES)
def test_on_demand_is_taken_if_nothing_else_is_for_sale(name: str) -> None:
    sure = make_candidate(is_spot=False)
    decision = load_policy(name)(view_of(10, 20), [sure])
    assert isinstance(decision, Move) and decision.target is sure
    assert isinstance(load_policy(name)(view_of(10, 20, current=0), [sure]), Stay)


patterns = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 12)), min_size=1, max_size=30).map(
    lambda runs: [bit for bit, count in runs for _ in range(count)]
)
slacks = st.floats(1.0, 2.2)
starts = st.sampled_from((0.0, 0.02, 0.1, 0.37, 0.5))


@pytest.mark.parametrize("name", CHEAP)
@settings(max_examples=examples(120), deadline=None)
@given(
    counts=patterns, slack=slacks, start=starts, every=st.sampled_from((0.0, 0.1, 0.5)),
    notice=st.sampled_from((0.0, 0.03)), look=st.sampled_from((0.0, 0.05)),
)  # fmt: skip
def test_a_deadline_that_on_demand_can_meet_is_met(
    name: str, counts: list[int], slack: float, start: float, every: float, notice: float, look: float
) -> None:
    slack += (start + look) / WORK  # the time that on-demand itself needs
    found = live(
        counts, name, slack=slack, start=start, save_every_hours=every, notice_hours=notice, look_hours=look
    )  # fmt: skip
    assert not found.is_late
    assert found.usd <= WORK * 1.02 + 40 * start or found.preemptions


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    counts=patterns, slack=st.sampled_from((1.0, 1.05, 1.2, 1.7)), start=st.sampled_from((0.1, 0.5)),
    every=st.sampled_from((0.0, 0.4)), notice=st.sampled_from((0.0, 0.03)),
)  # fmt: skip
def test_the_adaptive_policy_is_never_late(
    counts: list[int], slack: float, start: float, every: float, notice: float
) -> None:
    found = live(
        counts, "adaptive", slack=slack + start / WORK, start=start, save_every_hours=every, notice_hours=notice
    )
    assert not found.is_late


def storms() -> dict[str, list[int]]:
    chance = random.Random(4)
    bursts = [bit for _ in range(60) for bit in [chance.randint(0, 1)] * chance.choice((1, 1, 2, 40))]
    return {
        "always closed": [0],
        "always open": [1],
        "alternating": [1, 0],
        "a start's length open": [1, 0, 0, 0],
        "bursts": bursts,
        "calm, then storm": [1] * 80 + [1, 0] * 60,
        "storm, then calm": [1, 0] * 60 + [1] * 80,
        "open, then never again": [1] * 30 + [0] * 400,
    }


@pytest.mark.parametrize("storm", spread(list(storms()), every=2))
@pytest.mark.parametrize("start", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("slack", [1.1, 2.0])
def test_no_market_makes_the_adaptive_policy_late_or_much_more_expensive_than_on_demand(
    storm: str, start: float, slack: float
) -> None:
    found = live(storms()[storm], "adaptive", slack=slack, start=start, work=24)
    assert not found.is_late
    assert found.usd <= (24 + start) * 1.02


def test_spot_is_not_retried_after_too_many_losses() -> None:
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    spot = make_candidate(is_spot=True, usd=0.3, age_hours=9.0)

    def decide(spent: float | None, work_left: float = 10.0) -> object:
        view = JobView(
            work_left_hours=work_left, time_left_hours=30, work_hours=10, deadline_hours=40, spent_usd=spent
        )  # fmt: skip
        return policy(view, [spot, sure])

    for spent in (None, 0.0, 0.1):
        assert isinstance(decision := decide(spent), Move) and decision.target is spot
    decision = decide(2.0)
    assert not isinstance(decision, Move) or decision.target is sure
    assert isinstance(decision := decide(2.0, work_left=5.0), Move) and decision.target is spot, "work was done for it"


def test_a_choice_is_kept_until_time_or_age_would_change_it() -> None:
    """A market that has just opened is watched until it has lasted a while; the decision says how long."""
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    young = make_candidate(is_spot=True, usd=0.9, age_hours=0.1)
    decision = policy(view_of(10, 18.0), [young, sure])
    assert isinstance(decision, Wait) and 0.02 <= decision.hours <= 1.0
    later = make_candidate(is_spot=True, usd=0.9, age_hours=0.1 + decision.hours * 0.99)
    assert isinstance(policy(view_of(10, 18.0 - decision.hours * 0.99), [later, sure]), Wait)


def test_a_job_with_time_waits_for_a_cheaper_location_that_just_closed() -> None:
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    dear = make_candidate("dear", is_spot=True, usd=0.6, age_hours=30.0)

    def decide(left: float, closed_hours: float) -> Decision:
        cheap = make_candidate("cheap", is_spot=True, usd=0.3, is_open=False, age_hours=closed_hours)
        return policy(view_of(20, left), [cheap, dear, sure])

    assert isinstance(decide(40, 0.15), Wait)
    for decision in (decide(20.5, 0.15), decide(40, 200.0)):
        assert isinstance(decision, Move) and decision.target is dear


def test_an_expensive_calm_location_is_rated_at_its_own_price() -> None:
    """The alternative is a cheap place that has just opened, and there is little spare time."""
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    young = make_candidate("young", is_spot=True, usd=0.2, age_hours=0.3)
    calm = make_candidate("calm", is_spot=True, usd=0.85, age_hours=30.0)
    view = view_of(20, 20.4)
    decision = policy(view, [young, calm, sure])
    assert isinstance(decision, Move) and decision.target.is_spot
    spot_usd = dict(decision.weighed)["spot now"]
    assert spot_usd >= decision.target.usd_work_hour * view.work_left_hours, "nothing cheaper can be hoped for there"


def test_an_open_market_is_used_from_the_first_hour() -> None:
    found = live([1], "adaptive", slack=1.2)
    assert found.usd == pytest.approx((WORK + 0.1) / 3.1)
    assert found.moves == 1


def replay_prices(*zones: tuple[float, ...], work: float = 20.0) -> ReplayOutcome:
    """Replay the adaptive policy in zones that never close, with a price for each hour; on-demand costs 1."""
    sites = tuple(
        make_site(
            Trace(name=f"z{index}", gap_hours=1.0, counts=(1,) * len(prices), prices=prices), start_hours=0.1,
            ondemand_usd_hour=1.0, spot_usd_hour=prices[0],
        )
        for index, prices in enumerate(zones)
    )  # fmt: skip
    case = Case(sites=sites, work_hours=work, deadline_hours=2 * work, save_every_hours=0.2)
    return replay(case, load_policy("adaptive"))


def test_spot_whose_price_rises_above_on_demand_is_left() -> None:
    risen = replay_prices((0.3,) * 4 + (3.0,) * 200)
    assert risen.usd == pytest.approx(4 * 0.3 + 16.1 + 0.1, abs=0.3) and risen.ondemand_hours > 15
    back = replay_prices((0.3,) * 4 + (3.0,) * 2 + (0.3,) * 200)
    assert back.usd < 10 and back.ondemand_hours < 4, "and taken again when it has fallen"
    both = replay_prices((0.3,) * 2 + (5.0,) * 200, (2.0,) * 202)
    assert both.usd < 20.5, "another location that costs more than on-demand is no better"
    assert replay_prices((0.3,) * 4 + (0.9,) * 200).ondemand_hours == 0


def make_spots(*prices: float, **facts: object) -> list[Candidate]:
    return [
        make_candidate(f"z{index}", is_spot=True, usd=price, age_hours=MET_HOURS, met_hours=MET_HOURS, **facts)
        for index, price in enumerate(prices)
    ]


@pytest.mark.parametrize("spare", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("minutes", [1, 3, 5, 10])
def test_a_job_of_a_few_minutes_does_not_wait_while_spot_is_open(minutes: int, spare: float) -> None:
    """Values without work are 0, those of the least of it are a start: between them, waiting must not look cheap."""
    work = minutes / 60
    found = live((1,) * 60, "adaptive", slack=1 + (0.1 + spare) / work, work=work, save_every_hours=0.1)
    assert found.spot_hours == pytest.approx(work + 0.1) and found.ondemand_hours == 0
    assert found.hours == pytest.approx(work + 0.1)


def test_the_cheaper_of_two_like_markets_is_taken_and_a_much_cheaper_one_is_moved_to() -> None:
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    spots = make_spots(0.5, 0.3)
    decision = policy(view_of(10, 30), [*spots, sure])
    assert isinstance(decision, Move) and decision.target is spots[1]
    decision = policy(view_of(10, 30, current=0), [*spots, sure])
    assert isinstance(decision, Move) and decision.target is spots[1]


def test_a_small_saving_or_an_expensive_move_is_not_worth_it() -> None:
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    assert isinstance(policy(view_of(10, 30, current=0), [*make_spots(0.302, 0.3), sure]), Stay)
    dear = make_spots(0.5, 0.3, move_usd=50.0)
    assert isinstance(policy(view_of(10, 30, current=0), [*dear, sure]), Stay)


def test_a_job_moves_to_a_cheaper_location_that_has_been_open_for_hours() -> None:
    """Its hazard is still high but falling: its mean residual life is far longer than under the present hazard."""
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    calm = make_candidate("calm", is_spot=True, usd=0.22, age_hours=30.0)

    def decide(open_hours: float) -> Decision:
        cheap = make_candidate("cheap", is_spot=True, usd=0.2, age_hours=open_hours)
        return policy(view_of(40, 60, current=0), [calm, cheap, sure])

    assert isinstance(decide(0.15), Stay)
    assert isinstance(decide(3.0), Move)


def test_a_market_that_is_about_to_close_is_not_entered() -> None:
    policy, sure = load_policy("adaptive"), make_candidate(is_spot=False)
    warned = make_spots(0.2, closes_in_hours=0.03)
    steady = make_spots(0.4)
    decision = policy(view_of(10, 30), [*warned, *steady, sure])
    assert isinstance(decision, Move) and decision.target is steady[0]
    assert not (isinstance(decision := policy(view_of(10, 30), [*warned, sure]), Move) and decision.target is warned[0])


def test_eager_leaves_the_region_that_took_the_machines_and_failover_does_not() -> None:
    sure, spots = make_candidate(is_spot=False), make_spots(0.3, 0.4)
    view = view_of(10, 30, last=0)
    stays, leaves = load_policy("failover")(view, [*spots, sure]), load_policy("eager")(view, [*spots, sure])
    assert isinstance(stays, Move) and stays.target is spots[0]
    assert isinstance(leaves, Move) and leaves.target is spots[1]


def test_uniform_progress_waits_ahead_of_its_line_and_takes_on_demand_behind_it() -> None:
    policy, sure = load_policy("uniform-progress"), make_candidate(is_spot=False)
    closed = make_candidate(is_spot=True, usd=0.3, is_open=False)
    ahead = JobView(work_left_hours=4, time_left_hours=10, work_hours=10, deadline_hours=20)
    decision = policy(ahead, [closed, sure])
    assert isinstance(decision, Wait) and decision.hours == pytest.approx(2.0)
    behind = JobView(work_left_hours=6, time_left_hours=10, work_hours=10, deadline_hours=20)
    decision = policy(behind, [closed, sure])
    assert isinstance(decision, Move) and decision.target is sure


def test_every_decision_sets_a_timely_next_look() -> None:
    sure, closed = make_candidate(is_spot=False), make_candidate(is_spot=True, usd=0.3, is_open=False, age_hours=2.0)
    for name in PUNCTUAL:
        decision = load_policy(name)(view_of(10, 11), [closed, sure])
        if isinstance(decision, Wait):
            assert decision.hours <= 11 - 10 - 0.1 + 1e-9
        assert not math.isnan(decision.hours)
