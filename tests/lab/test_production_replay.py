"""Replays that know what production knows: requests are refused, and machines kept until others are granted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from broker.lab.markets import make_site
from broker.lab.replay import Case, replay
from broker.lab.traces import Trace, make_trace
from broker.spot.policies import load_policy
from broker.spot.policies.base import Candidate, Decision, JobView
from tests.bench.production_replay import replay_production


def make_case(*traces: Trace) -> Case:
    sites = tuple(make_site(trace, start_hours=0.1) for trace in traces)
    return Case(sites=sites, work_hours=12.0, deadline_hours=18.0)


def test_an_always_open_market_costs_the_same_whether_or_not_its_state_is_observed() -> None:
    case, policy = make_case(Trace(name="t", gap_hours=1.0, counts=(1,))), load_policy("adaptive")
    assert replay_production(case, policy).usd == pytest.approx(replay(case, policy).usd)


def test_only_requests_reveal_a_closed_location() -> None:
    """It counts as open at first, and again whenever it is worth another request."""
    case, seen = make_case(Trace(name="t", gap_hours=1.0, counts=(0,))), list[bool]()

    def policy(view: JobView, candidates: Sequence[Candidate], /) -> Decision:
        seen.append(candidates[0].is_open)
        return load_policy("adaptive")(view, candidates)

    found = replay_production(case, policy)
    assert found.spot_hours == 0 and not found.is_late
    assert seen[0] and not all(seen) and any(seen[10:]), "refused, then requested again and again"


def test_no_deadline_is_missed_and_keeping_machines_costs_at_most_1_percent_more() -> None:
    totals = {True: 0.0, False: 0.0}
    for seed in range(3):
        case = make_case(make_trace(f"a{seed}", seed), make_trace(f"b{seed}", seed + 50))
        for keeps in totals:
            found = replay_production(case, load_policy("adaptive"), 5.0, keeps_machines=keeps)
            assert not found.is_late
            totals[keeps] += found.usd
    assert totals[True] <= totals[False] * 1.01
