"""Replays: every hour and dollar of a small history, counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from broker.lab.benchmark import (
    Scene,
    count_optima,
    estimate_optimum,
    percentile,
    pick_evenly,
    run_study,
    spread_starts,
)
from broker.lab.markets import make_site
from broker.lab.replay import PATIENCE, Case, ReplayOutcome, replay
from broker.lab.traces import Trace, make_default_traces, make_trace
from broker.spot.policies import MEMORYLESS, ORACLES, load_policy
from broker.spot.policies.base import Candidate, Decision, JobView, Move, Stay, Wait

SPOT = 0.25


def case_of(*counts: int, start: float = 0.5, work: float = 4, deadline: float = 20, **facts: object) -> Case:
    trace = Trace(name="t", gap_hours=1.0, counts=counts)
    site = make_site(trace, start_hours=start, spot_usd_hour=SPOT)
    return Case(sites=(site,), work_hours=work, deadline_hours=deadline, **facts)  # type: ignore[arg-type]


def test_a_preempted_job_pays_its_start_again() -> None:
    found = replay(case_of(1, 1, 0, 1, 1, 1, 1), load_policy("greedy"), keeps_timeline=True)
    # two hours up to the preemption, an hour without, then a start and the 2.5 hours that are left
    assert found.hours == pytest.approx(3 + 0.5 + 2.5)
    assert found.usd == pytest.approx(SPOT * (2 + 3))
    assert (found.preemptions, found.moves, found.is_late) == (1, 2, False)
    assert [(each.mode, each.is_lost) for each in found.timeline] == [
        ("spot", True), ("waiting", False), ("spot", False),
    ]  # fmt: skip
    assert sum(each.to_hours - each.from_hours for each in found.timeline) == pytest.approx(found.hours)


def test_work_since_the_last_checkpoint_is_lost_unless_there_is_notice() -> None:
    counts = (1, 1, 0, 1, 1, 1, 1, 1)
    lost = replay(case_of(*counts, save_every_hours=1.0), load_policy("greedy"))
    assert lost.hours == pytest.approx(3 + 0.5 + 3)  # 1.5 hours were done, 1 was saved
    warned = replay(case_of(*counts, save_every_hours=1.0, notice_hours=0.05), load_policy("greedy"))
    assert warned.hours == pytest.approx(3 + 0.5 + 2.5)


def test_a_job_submitted_later_meets_the_market_of_that_hour_and_recordings_repeat() -> None:
    found = replay(case_of(0, 1, 1), load_policy("greedy"), from_hour=1.0)
    # open for two hours, shut for one, and again
    assert found.hours == pytest.approx(2 + 1 + 2 + 1 + 0.5 + 1.0)
    assert found.preemptions == 2


@pytest.mark.parametrize("length", [1, 100, 1000])
def test_a_job_that_never_gets_spot_is_finished_on_demand_at_a_multiple_of_its_deadline(length: int) -> None:
    """The length of the recording, at whose end nothing changes, does not matter."""
    found = replay(case_of(*[0] * length), load_policy("failover"))
    assert found.hours == pytest.approx(PATIENCE * 20.0 + 0.5 + 4.0)


def test_a_job_of_a_year_on_a_market_that_changes_every_ten_minutes_ends() -> None:
    trace = Trace(name="t", gap_hours=1 / 6, counts=(1, 0))
    site = make_site(trace, start_hours=0.01, spot_usd_hour=SPOT)
    found = replay(Case(sites=(site,), work_hours=20_000, deadline_hours=50_000), load_policy("greedy"))
    assert found.preemptions > 120_000 and not found.is_late


def test_prices_follow_the_recording() -> None:
    trace = Trace(name="t", gap_hours=1.0, counts=(1,) * 4, prices=(1.0, 1.0, 2.0, 2.0))
    site = make_site(trace, start_hours=0.0, spot_usd_hour=SPOT)
    found = replay(Case(sites=(site,), work_hours=4, deadline_hours=20), load_policy("greedy"))
    assert found.usd == pytest.approx(SPOT * (2 + 2 * 2))


def test_moving_between_zones_pays_each_transfer_once() -> None:
    sites = tuple(
        make_site(Trace(name=name, gap_hours=1.0, counts=counts), start_hours=0.0, spot_usd_hour=SPOT)
        for name, counts in (("a", (1, 0, 0, 0, 0, 0)), ("b", (0, 1, 1, 1, 1, 1)))
    )
    case = Case(sites=sites, work_hours=4, deadline_hours=20, move_usd=((0.0, 7.0), (7.0, 0.0)))
    found = replay(case, load_policy("greedy"))
    assert found.usd == pytest.approx(SPOT * 4 + 7)
    assert found.timeline == ()


def test_a_job_that_never_gets_spot_finishes_on_demand() -> None:
    found = replay(case_of(0, work=4, deadline=10), load_policy("failover"))
    assert found.is_late
    assert found.ondemand_hours == pytest.approx(4.5) and found.hours == pytest.approx(30 + 4.5)


def test_program_saves_before_its_machines_are_released_on_purpose() -> None:
    asked = list[JobView]()

    def fickle(view: JobView, candidates: Sequence[Candidate]) -> Decision:
        asked.append(view)
        if view.current is None and len(asked) != 2:
            return Move(target=candidates[1], hours=1.25)
        return Wait(hours=1.0) if len(asked) == 2 else Stay()

    found = replay(case_of(*[0] * 40, save_every_hours=1.0), fickle)
    assert [round(view.work_left_hours, 6) for view in asked[:3]] == [4.0, 4.0, 3.25]
    assert asked[1].unsaved_hours == pytest.approx(0.75)
    assert found.ondemand_hours == pytest.approx(0.5 + 0.75 + 0.5 + 3.25)


def test_an_oracle_knows_the_end_of_the_period_and_others_only_the_notice() -> None:
    notices = list[float | None]()

    def listen(view: JobView, candidates: Sequence[Candidate]) -> Decision:
        notices.append(candidates[0].closes_in_hours)
        return Stay() if view.current is not None else Move(target=candidates[0 if candidates[0].is_open else 1])

    case = case_of(1, 1, 1, 0, notice_hours=0.25)
    replay(case, listen)
    assert notices[0] is None and notices[1] == pytest.approx(0.25)
    notices.clear()
    replay(case, listen, is_oracle=True)
    assert notices[0] == pytest.approx(3.0)


def test_a_study_compares_policies_with_each_other_and_with_the_optimum() -> None:
    sites = tuple(make_site(each, start_hours=0.1) for each in make_default_traces(2, hours=72))
    case = Case(sites=sites, work_hours=10, deadline_hours=14)
    scenes = [Scene(case=case, from_hour=hour) for hour in spread_starts(sites, 14, 6)]
    study = run_study(scenes, ["on-demand", "greedy", "failover"], optima_count=3)
    sure, greedy, failover = study.scores
    assert sure.usd_mean == sure.usd_p95 == pytest.approx(10.1)
    assert sure.spot_share == 0 and sure.late == greedy.late == 0
    assert greedy.usd_mean < sure.usd_mean
    assert greedy.over_optimum is not None and sure.over_optimum is not None
    assert -1e-3 <= greedy.over_optimum < sure.over_optimum
    assert sum(each is not None for each in study.optima) == 3
    assert failover.replays == len(study.outcomes[2]) == 6


def outcomes_of(*usd: float) -> list[ReplayOutcome]:
    return [
        ReplayOutcome(usd=each, hours=1, is_late=False, preemptions=0, moves=0, spot_hours=1, ondemand_hours=0)
        for each in usd
    ]


def test_an_optimum_known_for_some_replays_ranks_policies_as_their_mean_costs_do() -> None:
    cheap, dear = outcomes_of(1, 1, 10), outcomes_of(5, 5, 5)
    best = estimate_optimum([dear, cheap], [None, None, 4.0])
    # The cheaper policy paid 2.5 times the optimum where that is known, the more expensive one 1.25 times.
    assert best == pytest.approx(4 / 10 * 4)
    assert estimate_optimum([cheap], [1.0, 1.0, 4.0]) == 2.0
    assert estimate_optimum([cheap], [None] * 3) is None


def test_a_study_reports_each_step_and_limits_the_search_for_the_optimum() -> None:
    site = make_site(make_default_traces(1, hours=72)[0], start_hours=0.1)
    short, long = (Case(sites=(site,), work_hours=hours, deadline_hours=2 * hours) for hours in (10, 10_000))
    scenes = [Scene(case=short, from_hour=hour) for hour in (0, 1, 2)]
    assert count_optima(scenes) == 3
    assert count_optima([Scene(case=long, from_hour=hour) for hour in range(50)]) == 1
    steps = list[tuple[int, int, str]]()
    study = run_study(scenes, ["greedy"], optima_count=None, on_step=lambda *step: steps.append(step))
    assert steps == [(index, 6, "greedy" if index < 3 else "optimum") for index in range(6)]
    (greedy,) = study.scores
    assert study.optimum_usd_mean is not None and greedy.over_optimum is not None
    assert greedy.usd_mean == pytest.approx(study.optimum_usd_mean * (1 + greedy.over_optimum))


def test_starts_are_spread_so_that_the_job_fits_the_recording() -> None:
    site = make_site(make_trace("t", 1, hours=100), start_hours=0.1)
    hours = spread_starts([site], 60, 4)
    assert hours == pytest.approx([0, 10, 20, 30])
    assert max(spread_starts([site], 500, 4)) < 100
    assert pick_evenly(10, 4) == [0, 2, 5, 7] and pick_evenly(2, 9) == [0, 1]
    assert percentile([3, 1, 2], 0.95) == 3 and percentile([5], 0.95) == 5


def test_slow_starts_are_learned_and_a_margin_keeps_the_deadline() -> None:
    trace = Trace(name="t", gap_hours=1 / 6, counts=(1,) * 30 + (0,) * 12)
    sites = (make_site(trace, start_hours=0.1),)
    case = Case(sites=sites, work_hours=12.0, deadline_hours=15.0, look_hours=0.5, start_factor=3.0)
    views: list[tuple[float, float]] = []

    def policy(view: JobView, candidates: Sequence[Candidate], /) -> Decision:
        views.append((view.starting_hours, candidates[0].start_hours))
        return load_policy("adaptive")(view, candidates)

    found = replay(replace(case, ondemand_delay_hours=0.5), policy)
    assert not found.is_late
    assert views[0] == (0.0, 0.1) and views[-1][1] >= 0.3 - 1e-9, "0.1 is stated, 0.3 is observed"
    assert max(left for left, _ in views) <= 0.1 + 0.3, "what is left of a start is an expectation"


def test_a_save_on_notice_counts_in_the_worst_case() -> None:
    """With one save in two hours, spot is worth its risk only where a notice saves the rest."""
    trace = Trace(name="t", gap_hours=1 / 6, counts=(1,) * 30 + (0,) * 6)
    sites = (make_site(trace, start_hours=0.1),)
    case = Case(sites=sites, work_hours=12.0, deadline_hours=13.6, save_every_hours=2.0)
    bare, warned = (replay(each, load_policy("adaptive")) for each in (case, replace(case, notice_hours=2 / 60)))
    assert not bare.is_late and not warned.is_late
    assert warned.usd < 0.8 * bare.usd


def leave_for_the_last(view: JobView, candidates: Sequence[Candidate], /) -> Decision:
    """Start at the first candidate, or on-demand while that is closed; leave for the last open spot."""
    spots = [each for each in candidates if each.is_spot and each.is_open]
    if view.current is None:
        return Move(target=spots[0] if spots else candidates[1])
    return Move(target=spots[-1]) if spots else Stay()


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 2.0])
def test_a_job_works_through_the_overlapped_part_of_a_start_and_pays_both_machines(overlap: float) -> None:
    found = replay(case_of(0, 1, 1, 1, 1, 1, overlap_hours=overlap), leave_for_the_last)
    overlapped = min(overlap, 0.5)
    # on-demand works from 0.5 h; spot is requested at 1 h and starts for half an hour
    assert found.hours == pytest.approx(1.5 + 3.5 - overlapped)
    assert found.usd == pytest.approx(1 + overlapped + SPOT * (0.5 + 3.5 - overlapped))


def test_machines_that_are_lost_while_they_start_for_a_running_job_cost_only_their_price() -> None:
    case = case_of(0, 0, 1, 0, 0, 0, 0, 0, start=1.5, overlap_hours=1.5)
    found = replay(case, leave_for_the_last)
    assert (found.hours, found.preemptions, found.moves) == (pytest.approx(1.5 + 4), 0, 1)
    assert found.usd == pytest.approx(1.5 + 4 + SPOT)


def test_a_job_that_is_preempted_while_its_next_machines_start_waits_for_the_rest_of_the_start() -> None:
    markets = (("a", (1, 1, 0, 0, 0, 0), 0.5), ("b", (0, 1, 1, 1, 1, 1), 1.5))
    sites = tuple(
        make_site(Trace(name=name, gap_hours=1.0, counts=counts), start_hours=start, spot_usd_hour=SPOT)
        for name, counts, start in markets
    )
    case = Case(sites=sites, work_hours=4, deadline_hours=20, overlap_hours=1.5)
    found = replay(case, leave_for_the_last)
    assert found.hours == pytest.approx(2 + 0.5 + 2.5)  # `a` worked 1.5 hours, and `b` was requested at 1 h
    assert found.usd == pytest.approx(SPOT * (2 + 4))


def test_memoryless_policies_decide_alike_without_the_history_of_the_markets() -> None:
    sites = tuple(make_site(trace, start_hours=0.1) for trace in make_default_traces(2))
    case = Case(sites=sites, work_hours=20, deadline_hours=26)
    for name in MEMORYLESS:
        with_history, without = (
            replay(case, load_policy(name), 30.0, is_oracle=name in ORACLES, is_learner=is_learner)
            for is_learner in (True, False)
        )
        assert with_history == without
