"""Figures of the pure parts of a service, worked out by hand, and the bound that a rate limit promises."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.serve.admission import MINUTE_S, Gate, KeyRefusal, RateBucket, find_key, is_loopback
from broker.serve.error_budget import ErrorBudget
from broker.serve.files import ServiceFolder
from broker.serve.keys import ApiKey, KeyUsage, UsageBook, create_key, read_keys
from broker.serve.placement import SpotPlace, observe_places, place_replicas
from broker.serve.reconciling import ON_DEMAND, ReplicaView, Slot
from broker.serve.scaling import Demand, ScalingState, count_replicas, scale
from broker.types import ReplicaPolicy
from tests.serve.test_keys import SteppedClock


@given(st.integers(1, 30), st.lists(st.floats(0, 30), min_size=1, max_size=60))
def test_no_span_admits_more_requests_than_a_full_bucket_and_what_flows_in(limit: int, gaps: list[float]) -> None:
    """A request that has to wait is admitted after the stated time, not a second earlier."""
    bucket, now_s, admitted = RateBucket(limit, now_s=0.0), 0.0, list[float]()
    for gap_s in gaps:
        now_s += gap_s
        wait_s = bucket.find_wait_s(1, now_s=now_s)
        if wait_s > 0:
            assert bucket.find_wait_s(1, now_s=now_s) == pytest.approx(wait_s)
            now_s += wait_s / 2
            assert bucket.find_wait_s(1, now_s=now_s) == pytest.approx(wait_s / 2)
            now_s += wait_s / 2 + 1e-6
            assert bucket.find_wait_s(1, now_s=now_s) == 0.0
        bucket.level -= 1
        admitted.append(now_s)
    for first, start_s in enumerate(admitted):
        for last in range(first, len(admitted)):
            assert last - first + 1 <= limit + (admitted[last] - start_s) * limit / MINUTE_S + 1e-3


def test_a_clock_that_steps_back_gives_no_tokens_and_takes_none() -> None:
    bucket = RateBucket(60, now_s=100.0)
    bucket.level = 10.0
    assert bucket.find_wait_s(20, now_s=50.0) == 10.0 and bucket.level == 10.0


def make_gate(tmp_path: Path, usage: UsageBook | None = None, **limits: object) -> tuple[Gate, SteppedClock, str]:
    clock = SteppedClock()
    _, text = create_key(ServiceFolder(path=tmp_path), "ann", now_s=clock.now_s(), **limits)  # type: ignore[arg-type]
    gate = Gate(read_keys(ServiceFolder(path=tmp_path)), usage or UsageBook(), host="0.0.0.0", clock=clock)
    return gate, clock, text


def test_a_key_ends_at_its_second_and_its_budget_at_its_last_token(tmp_path: Path) -> None:
    gate, clock, text = make_gate(tmp_path, expires_s=1010.0, budget_tokens=100)
    key = gate.admit(text)
    assert isinstance(key, ApiKey)
    gate.charge(key, 60, 39)
    assert isinstance(gate.admit(text), ApiKey), "one token is left"
    gate.charge(key, 1, 0)
    assert isinstance(found := gate.admit(text), KeyRefusal) and found.code == "insufficient_quota"
    assert gate.usage.keys[key.id] == KeyUsage(requests=2, prompt_tokens=61, completion_tokens=39)
    clock.advance(10.0)
    assert isinstance(found := gate.admit(text), KeyRefusal) and found.code == "expired_api_key"


def test_the_scheme_of_a_key_is_case_insensitive_and_spaces_are_ignored() -> None:
    for sent in ({"authorization": "bearer  k "}, {"authorization": "Bearer k"}, {"x-api-key": " k "}):
        assert find_key(sent) == "k"
    for sent in ({"authorization": "k"}, {"authorization": "Basic k"}, {}):
        assert find_key(sent) == ""


def test_tokens_of_both_directions_overdraw_a_limit_and_the_wait_is_rounded_up(tmp_path: Path) -> None:
    gate, clock, text = make_gate(tmp_path, tokens_per_minute=60)
    key = gate.admit(text)
    assert isinstance(key, ApiKey)
    gate.charge(key, 50, 30)  # 20 below zero: 21 seconds until one token is there
    clock.advance(0.5)
    assert isinstance(found := gate.admit(text), KeyRefusal)
    assert (found.status, found.kind, found.retry_s) == (429, "tokens", 21)
    clock.advance(20.5)
    assert isinstance(gate.admit(text), ApiKey)


@pytest.mark.parametrize(
    ("host", "is_private"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("example.org", False), ("", False)],
)  # fmt: skip
def test_only_an_address_of_this_machine_is_private(host: str, is_private: bool) -> None:
    assert is_loopback(host) is is_private


def test_the_example_of_the_error_budget() -> None:
    """Half of 2 % is spent: 1.68 h a week. Two calm days save 0.48 h; 3 h of shortage are 2.5 h too much."""
    calm = ErrorBudget().observe(48.0, is_short=False)
    assert calm.find_pressure(0.98) == pytest.approx(math.exp(-0.48 / 1.68))
    short = calm.observe(3.0, is_short=True)
    kept = 48.0 * math.exp(-3 / 168)
    assert (short.hours, short.short_hours) == pytest.approx((kept + 3.0, 3.0))
    assert short.find_pressure(0.98) == pytest.approx(math.exp((3.0 - 0.01 * (kept + 3.0)) / 1.68))
    assert short.find_pressure(0.98) == pytest.approx(4.4, abs=0.05)


def test_a_demand_of_whole_replicas_needs_no_more_and_the_larger_demand_counts() -> None:
    policy = ReplicaPolicy(replicas_min=1, replicas_max=9, target_in_flight=4, target_qps={"": 2.0})
    for demand, count in (
        (Demand(in_flight=8), 2),
        (Demand(in_flight=8.1), 3),
        (Demand(qps=6), 3),
        (Demand(qps=6, in_flight=20), 5),
        (Demand(qps=12, in_flight=20), 6),
        (Demand(qps=99), 9),
    ):
        assert count_replicas(policy, demand) == count
    asleep = ReplicaPolicy(replicas_min=0, replicas_max=9, target_qps={"": 2.0})
    assert [count_replicas(asleep, Demand(in_flight=each)) for each in (0, 1)] == [0, 1]


def test_bounds_apply_at_once_and_delays_are_kept_to_the_second() -> None:
    policy = ReplicaPolicy(replicas_min=2, replicas_max=5, upscale_delay_s=10, downscale_delay_s=100)
    assert scale(policy, ScalingState(wanted=9), 5, now_s=0).wanted == 5
    assert scale(policy, ScalingState(wanted=1), 2, now_s=0).wanted == 2
    assert scale(ReplicaPolicy(replicas_min=3), ScalingState(wanted=9), 3, now_s=0).wanted == 3
    for asked, delay_s in ((4, 10), (2, 100)):
        begun = scale(policy, ScalingState(wanted=3), asked, now_s=0.0)
        assert begun.wanted == 3
        assert scale(policy, begun, asked, now_s=delay_s - 0.1).wanted == 3
        changed = scale(policy, begun, asked, now_s=float(delay_s))
        assert changed == ScalingState(wanted=asked), "the spell is over"


def make_place(zone: str, **facts: float) -> SpotPlace:
    found = {"usd_hour": 0.3, "losses_per_hour": 0.2, **facts}
    return SpotPlace(slot=Slot(is_spot=True, region=zone, zone=zone), **found)


def test_the_hazard_of_a_place_is_that_of_its_formula_at_three_ages() -> None:
    """log(1 + 2 h) / 2 with one loss in the 5 h expected and the time without any."""
    assert make_place("a").hazard == pytest.approx(math.log(1.4) / 2)
    assert make_place("a", open_hours=5.0).hazard == pytest.approx(math.log(1.2) / 2)
    assert make_place("a", losses_per_hour=0.0).hazard == 0.0


def test_a_place_is_as_old_as_its_oldest_replica_and_on_demand_says_nothing_about_it() -> None:
    a, b, c = (make_place(zone) for zone in "abc")

    def view(slot: Slot, hours: float, *, is_lost: bool = False) -> ReplicaView:
        return ReplicaView(number=1, version=1, slot=slot, is_ready=True, is_lost=is_lost, open_hours=hours)

    replicas = [
        view(a.slot, 2.0), view(a.slot, 7.0), view(a.slot, 1.0), view(a.slot, 50.0, is_lost=True),
        view(b.slot, 9.0, is_lost=True), view(ON_DEMAND, 99.0),
    ]  # fmt: skip
    found = {each.slot.zone: each.open_hours for each in observe_places([a, b, c], replicas)}
    assert found == {"a": 7.0, "c": 0.0}, "what was lost at b is not retried there at once"


def test_the_price_and_chance_of_a_placement_are_those_of_its_slots() -> None:
    found = place_replicas(
        2, [make_place("a"), make_place("b")], ondemand_usd_hour=1.0, cold_start_hours=0.1, availability=0.99
    )
    lost = 1 - math.exp(-math.log(1.4) / 2 * 0.1)
    assert found.availability == pytest.approx(1 - lost**2)
    assert found.usd_hour == pytest.approx(4 * 0.3)
    firm = place_replicas(
        2, [make_place("a")], ondemand_usd_hour=1.0, cold_start_hours=0.1, availability=0.5, ondemand_min=1, spare_min=1
    )
    assert firm.slots.count(ON_DEMAND) >= 1 and len(firm.slots) >= 3
    assert firm.usd_hour == pytest.approx(
        firm.slots.count(ON_DEMAND) + 0.3 * (len(firm.slots) - firm.slots.count(ON_DEMAND))
    )
