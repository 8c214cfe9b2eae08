"""Prepare the input of the deadline strategy: the job as a spot policy views it, and the candidate places.

Pure: job, plan, refusals and history in; view, candidates and events out. The policy itself is in `broker.spot`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from broker.jobs.availability import Availability, PlaceKey, is_same_place, name_place, update_availability
from broker.jobs.kinds import KindSpeed, choose_places, correct_speeds, keep_place, name_kind, order_by_kind
from broker.jobs.setup_starts import RestoredStart
from broker.spot.durations import NOTHING_SEEN, Durations
from broker.spot.forecast import read_market
from broker.spot.hazard import Observation, find_hazard_per_node_hour
from broker.spot.interval import find_best_interval_s
from broker.spot.market_model import NOTHING, MarketEvidence, find_hazard
from broker.spot.policies.base import (
    Candidate,
    Decision,
    JobView,
    Move,
    Wait,
    find_fallback,
    find_spare_hours,
    is_safe_to_start,
    list_reserves,
)
from broker.spot.prior import MEASURED
from broker.state.history import StepRange
from broker.state.refusals import Refusal
from broker.types import (
    Attempt,
    Estimate,
    Event,
    EventKind,
    Goal,
    Job,
    OutcomeKind,
    Placement,
    Plan,
    Task,
    make_event,
)
from broker.wording import make_place

STRATEGY = "deadline"
# Measured with starts three times as long as given and on-demand 30 min late: no job was late, at 1.003 of the cost.
MARGIN_HOURS, MARGIN_SHARE = 0.5, 0.25
STARTS_SEEN = 3
CLEAN_COUNT = 2
HAZARD_MIN = 0.1  # per hour, with a deadline: two weeks without preemptions do not rule out many


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The input of one policy decision."""

    view: JobView
    candidates: tuple[Candidate, ...]
    availability: Mapping[PlaceKey, Availability]
    speeds: tuple[KindSpeed, ...] = ()  # of machines of several kinds, the fastest first


def follows_deadline(task: Task) -> bool:
    """Return whether the task has work and a deadline, allows spot, and does not request another strategy."""
    goal, strategy = task.goal, task.recovery.strategy
    if goal is None or goal.work_hours is None or goal.deadline_hours is None:
        return False
    return strategy in (None, STRATEGY) and any(resources.use_spot is not False for resources in task.resources)


def read_situation(
    job: Job,
    plan: Plan,
    *,
    now_s: float,
    refusals: Sequence[Refusal],
    durations: Mapping[PlaceKey, Durations],
    look_hours: float,
    availability: Mapping[PlaceKey, Availability],
    spent_usd: float,
    live: Attempt | None = None,
    saves_on_notice: bool = False,
    may_reask: bool = False,
    expect_overlap_hours: Callable[[str], float] = lambda cloud: 0.0,
    steps: Mapping[int, StepRange] | None = None,
    restored: RestoredStart | None = None,
) -> Situation:
    """Return the input of a policy decision.

    `plan` covers the remaining work, without limits; `live` is the attempt whose nodes are up. `availability` holds
    earlier observations of places, `durations` those of completed stays. `may_reask`: a refused place counts as open
    once requests may be repeated there, since another refusal costs nothing. `expect_overlap_hours` returns, by cloud,
    the first part of a start, during which running machines continue to work. `steps` are those of each attempt: they
    correct the speeds of machines of several kinds. `restored` is a start that restores `setup` from an archive.
    """
    goal = job.task.goal
    assert goal is not None and goal.work_hours is not None and goal.deadline_hours is not None
    left = plan.task.goal.work_hours if plan.task.goal and plan.task.goal.work_hours is not None else goal.work_hours
    here = live.placement if live else None
    last = job.attempts[-1].placement if job.attempts and live is None else None
    estimates = choose_places(plan, here or last, refusals, is_live=live is not None)
    if may_reask:
        refusals = [each for each in refusals if max(each.reask_s, each.probed_until_s) > now_s]
    places = {
        name_place(estimate.placement): not any(refusal.covers(estimate.placement) for refusal in refusals)
        for estimate in estimates
        if estimate.placement.is_spot
    }
    seen = update_availability(availability, places.items(), job.attempts, live=live, now_s=now_s)
    saves = job.task.checkpoint
    share = saves.stall_s / saves.every_s if saves.every_s else 0.0
    candidates = [
        _read_candidate(estimate, left, seen, durations, now_s=now_s, live=live, stall_share=share)
        for estimate in estimates
    ]
    seen_hours = measure_start_hours(job.attempts)
    candidates = [
        _set_start(each, seen_hours, expect_overlap_hours(each.placement.offer.cloud), restored) for each in candidates
    ]
    candidates, speeds = correct_speeds(candidates, job, steps or {}, now_s=now_s)
    if here is not None and not any(is_same_place(candidate.placement, here) for candidate in candidates):
        candidates.append(keep_place(here, candidates))  # the running placement is no longer offered
    view = JobView(
        work_left_hours=left,
        time_left_hours=goal.deadline_hours - (now_s - job.submitted_s) / 3600,
        current=_find(candidates, here),
        starting_hours=_count_starting_hours(live, candidates, now_s, here),
        unsaved_hours=_count_unsaved_hours(job, live),
        save_every_hours=_find_save_hours(job.task, estimates),
        look_hours=look_hours + find_margin_hours(goal),
        last=_find(candidates, last),
        work_hours=goal.work_hours,
        deadline_hours=goal.deadline_hours,
        spent_usd=spent_usd,
        saves_on_notice=saves_on_notice,
        hour_value_usd=goal.hour_value_usd,
    )
    return Situation(view=view, candidates=tuple(candidates), availability=seen, speeds=speeds)


def _find_save_hours(task: Task, estimates: Sequence[Estimate]) -> float:
    """Return the time from one checkpoint to the next on the best spot place, with the stall of saving."""
    spot = next((each for each in estimates if each.placement.is_spot), None)
    planned_s = (spot.checkpoint_every_s or 0.0) if spot else 0.0
    every_s = advise_every_s(task, spot.preemptions_per_hour if spot else 0.0) or planned_s
    return (every_s + task.checkpoint.stall_s) / 3600


def find_margin_hours(goal: Goal) -> float:
    """Return the time reserved before the deadline, because on-demand may be late too: at most a share of the slack."""
    assert goal.work_hours is not None and goal.deadline_hours is not None
    slack = max(goal.deadline_hours - goal.work_hours, 0.0)
    return min(MARGIN_HOURS, MARGIN_SHARE * slack)


def measure_start_hours(attempts: Sequence[Attempt]) -> float:
    """Return the longest of the job's last starts, up to the first new step, in hours; 0 before the first.

    An attempt that reuses the machines of the previous one starts at the end of that one.
    """
    found, free_s = list[float](), 0.0
    for attempt in attempts:
        if attempt.resumed_s is not None:
            found.append(max(attempt.resumed_s - max(attempt.started_s, free_s), 0.0) / 3600)
        free_s = max(free_s, attempt.ended_s or 0.0)
    return max(found[-STARTS_SEEN:], default=0.0)


def has_saved_on_notice(attempts: Sequence[Attempt], steps: Mapping[int, StepRange]) -> bool:
    """Return whether the last two preemptions lost no step: the program saves on notice, and has the time."""
    ends = [
        (step.last_step, step.checkpoint_step)
        for each in attempts
        if each.outcome is not None and each.outcome.kind is OutcomeKind.PREEMPTED
        if (step := steps.get(each.number)) is not None and step.last_step
    ]
    return len(ends) >= CLEAN_COUNT and all((saved or 0) >= last for last, saved in ends[-CLEAN_COUNT:])


def arrange(plan: Plan, target: Candidate, *, is_alone: bool = False) -> Plan:
    """Put the target first, then other places of its pricing model and kind, because only the policy may change either.

    On-demand of other kinds comes last. `is_alone`: only the target, if the plan contains it.
    """
    kind = [estimate for estimate in plan.estimates if estimate.placement.is_spot == target.is_spot]
    kind = order_by_kind(kind, target.placement)
    if is_alone:
        kind = [estimate for estimate in kind if is_same_place(estimate.placement, target.placement)] or kind
    kind.sort(key=lambda estimate: not is_same_place(estimate.placement, target.placement))
    return replace(plan, estimates=tuple(kind))


def record_decision(situation: Situation, decision: Decision) -> Event:
    """Return an event with the decision, its reason and the numbers behind it."""
    view, candidates = situation.view, situation.candidates
    data: dict[str, object] = {"action": "wait", "reason": decision.reason, "work_left_hours": view.work_left_hours}
    target: Candidate | None = None
    if not isinstance(decision, Wait):
        target = decision.target if isinstance(decision, Move) else None
        data["action"] = "stay" if target is None else "move"
        if target is None and view.current is not None:
            target = candidates[view.current]
        if target is not None:
            data.update(place=make_place(target.placement), usd_work_hour=target.usd_work_hour)
    if view.time_left_hours is not None:
        data["time_left_hours"] = view.time_left_hours
    fallback = find_fallback(view, candidates)
    if fallback is not None:
        reserves = list_reserves(view, candidates, fallback) if situation.speeds else [fallback]
        spare = max(find_spare_hours(view, each) for each in reserves)  # the fastest kind may start latest
        data.update(spare_hours=spare, ondemand_usd_work_hour=fallback.usd_work_hour)
    if situation.speeds:
        data["kinds"] = [_describe_kind(each, candidates) for each in situation.speeds]
        if target is not None:
            data["machine"] = name_kind(target.placement)
    if len(decision.weighed) > 1:
        data["expected_usd"] = {name: usd for name, usd in decision.weighed}
    return make_event(EventKind.DECISION, **data)


def _describe_kind(speed: KindSpeed, candidates: Sequence[Candidate]) -> dict[str, object]:
    """Return a kind as event data: its speed, and the lowest price of an hour of work by pricing model."""
    own = [each for each in candidates if name_kind(each.placement) == speed.name]
    spot = [each.usd_work_hour for each in own if each.is_spot and each.is_open]
    ondemand = [each.usd_work_hour for each in own if not each.is_spot]
    return {
        "name": speed.name,
        "speed": speed.speed,
        "told": speed.told,
        "seen_hours": speed.seen_hours,
        "spot_usd_work_hour": min(spot, default=None),
        "ondemand_usd_work_hour": min(ondemand, default=None),
    }


def is_voluntary(situation: Situation, decision: Move) -> bool:
    """Return whether the move can wait for a checkpoint; a move from spot to on-demand cannot."""
    current = situation.view.current
    return current is not None and not (situation.candidates[current].is_spot and not decision.target.is_spot)


def loses_little(view: JobView, target: Candidate) -> bool:
    """Return whether moving now costs at most another start: the program saves on notice, or has saved recently."""
    return view.saves_on_notice or view.unsaved_hours <= target.start_hours


def is_safe_at(situation: Situation, placement: Placement, *, is_up: bool) -> bool:
    """Return whether on-demand would still be in time if a start at this place were lost immediately.

    `is_up`: its machines are up, so that only the rest of a start remains.
    """
    view, candidates = situation.view, situation.candidates
    target, fallback = find_candidate(candidates, placement), find_fallback(view, candidates)
    if target is not None and is_up:
        target = replace(target, start_hours=target.start_hours - target.overlap_hours, overlap_hours=0.0)
    if target is None or fallback is None or not target.is_spot:
        return True
    return any(is_safe_to_start(view, target, each) for each in list_reserves(view, candidates, fallback))


def estimate_hazard(placement: Placement, history: Mapping[PlaceKey, Observation]) -> float:
    """Return the gang's preemptions per hour that `broker plan` expects there; 0 for on-demand.

    This is the posterior of the market model given the observations, and the published band of each node.
    """
    if not placement.is_spot:
        return 0.0
    seen = history.get(name_place(placement))
    evidence = NOTHING
    if seen is not None:
        evidence = MarketEvidence(preemptions=seen.preemptions, gang_hours=seen.node_hours / placement.node_count)
    band = placement.node_count * find_hazard_per_node_hour(placement.offer.interruption_band)
    return find_hazard(1, evidence) + band


def advise_every_s(task: Task, hazard: float) -> float | None:
    """Return the seconds between checkpoints: the user's setting, otherwise the Young/Daly interval.

    With a deadline, the interval is pessimistic.

    None if no preemptions are expected and the task does not set an interval.
    """
    if task.checkpoint.every_s is not None:
        return task.checkpoint.every_s
    if hazard <= 0:
        return None
    return find_best_interval_s(task.checkpoint.stall_s, max(hazard, HAZARD_MIN) if _is_urgent(task) else hazard)


def estimate_start_hazard(
    task: Task,
    placement: Placement,
    *,
    history: Mapping[PlaceKey, Observation],
    durations: Mapping[PlaceKey, Durations],
    availability: Mapping[PlaceKey, Availability],
    now_s: float,
) -> float:
    """Return `estimate_hazard` for a start now.

    With a deadline, it also reflects how recently the market opened there, and how long its earlier intervals lasted.
    """
    hazard = estimate_hazard(placement, history)
    if hazard > 0 and _is_urgent(task):
        place = name_place(placement)
        observed = update_availability(availability, [(place, True)], (), live=None, now_s=now_s)[place]
        here = _observe(Candidate(placement=placement), observed, durations.get(place, NOTHING_SEEN), now_s=now_s)
        hazard = max(hazard, read_market(here, None, MEASURED).soon_hazard)
    return hazard


def _is_urgent(task: Task) -> bool:
    return task.goal is not None and task.goal.deadline_hours is not None


def _read_candidate(
    estimate: Estimate,
    left_hours: float,
    availability: Mapping[PlaceKey, Availability],
    durations: Mapping[PlaceKey, Durations],
    *,
    now_s: float,
    live: Attempt | None,
    stall_share: float,
) -> Candidate:
    """Return a place of the plan as a policy weighs it.

    `stall_share` is the time of stalls at a fixed interval, over that of the work: they slow on-demand as much as spot.
    Other stalls are about 1 % of the time on spot alone.
    """
    placement, breakdown = estimate.placement, estimate.breakdown
    is_here = live is not None and is_same_place(placement, live.placement)
    own_hours = (breakdown.work_hours if breakdown else left_hours) * (1 + stall_share)
    common = Candidate(
        placement=placement,
        start_hours=breakdown.recovery_s / 3600 if breakdown else 0.0,
        move_usd=0.0 if is_here or breakdown is None else breakdown.egress_usd,
        speed=left_hours / own_hours if left_hours > 0 and own_hours > 0 else 1.0,
    )
    if not placement.is_spot:
        return common
    place = name_place(placement)
    observed = _observe(common, availability[place], durations.get(place, NOTHING_SEEN), now_s=now_s)
    return replace(observed, is_open=is_here or observed.is_open, is_watched=is_here)


def _set_start(
    candidate: Candidate, seen_hours: float, overlap_hours: float, restored: RestoredStart | None
) -> Candidate:
    """Return the candidate with a start as long as the job's own starts, and the part of it that overlaps on spot."""
    start_hours = max(candidate.start_hours, seen_hours)
    if restored is not None and restored.fits(candidate.placement):
        start_hours = restored.start_s / 3600
    overlap_hours = min(overlap_hours, start_hours) if candidate.is_spot else 0.0
    return replace(candidate, start_hours=start_hours, overlap_hours=overlap_hours)


def _observe(candidate: Candidate, observed: Availability, seen: Durations, *, now_s: float) -> Candidate:
    return replace(
        candidate,
        is_open=observed.is_open,
        age_hours=max(now_s - observed.since_s, 0.0) / 3600,
        met_hours=max(observed.met_s - observed.since_s, 0.0) / 3600,
        seen=seen,
    )


def _count_starting_hours(
    live: Attempt | None, candidates: Sequence[Candidate], now_s: float, here: Placement | None
) -> float:
    index = _find(candidates, here)
    if live is None or live.resumed_s is not None or index is None:
        return 0.0
    return max(0.0, candidates[index].start_hours - (now_s - live.started_s) / 3600)


def _count_unsaved_hours(job: Job, live: Attempt | None) -> float:
    """Return the hours of work since the last checkpoint; 0 before the first new step: earlier ones are lost."""
    progress, goal = job.progress, job.task.goal
    if progress is None or not progress.total or goal is None or goal.work_hours is None:
        return 0.0
    if live is None or live.resumed_s is None:
        return 0.0
    steps = min(progress.step, progress.total) - (progress.checkpoint_step or 0)
    return max(0, steps) / progress.total * goal.work_hours


def find_candidate(candidates: Sequence[Candidate], place: Placement) -> Candidate | None:
    """Return the candidate that is the same purchase in the same place, at any price; None if there is none."""
    index = _find(candidates, place)
    return None if index is None else candidates[index]


def _find(candidates: Sequence[Candidate], place: Placement | None) -> int | None:
    if place is None:
        return None
    return next((i for i, candidate in enumerate(candidates) if is_same_place(candidate.placement, place)), None)
