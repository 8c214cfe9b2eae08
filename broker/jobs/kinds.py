"""Places with several kinds of machines: choose the candidates, estimate their speed, and keep those that can resume.

Pure.

A kind is an accelerator, its number per node, and the number of nodes. All machines without accelerators are one kind:
as far as a plan can tell, they take the same time for the same work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from broker.errors import NoOfferError
from broker.formatting import format_count
from broker.frozen import frozen
from broker.jobs.availability import is_same_place
from broker.jobs.checkpoints import runs_bundled_trainer
from broker.spot.policies.base import Candidate, round_speed
from broker.state.history import StepRange
from broker.state.refusals import Refusal
from broker.types import Attempt, Estimate, Job, Placement, Plan, Task

SPOT_MAX = 8  # candidate places per pricing model, out of hundreds in a plan
ONDEMAND_MAX = 3
KINDS_MAX = 4  # in addition to the kinds of the first places: each costs the policy a value function
SPOT_OF_KIND, ONDEMAND_OF_KIND = 3, 1  # minimum per kind: an expensive fast machine may be the only one in time
STEPS_MIN, HOURS_MIN = 10, 0.1  # minimum length of a stay before its speed counts
HOURS_TOLD = 0.5  # the planned speed has the weight of this many measured hours
FACTOR_MAX = 4.0  # of measured to planned speed

Kind = tuple[str, float, int]


@frozen
class KindSpeed:
    """The speed of one kind: hours of the goal's work per hour, as planned, and as corrected by `seen_hours`."""

    name: str
    told: float
    speed: float
    seen_hours: float = 0.0


def find_kind(placement: Placement) -> Kind:
    """Return the kind of a placement."""
    offer = placement.offer
    if not offer.accelerator:
        return ("", 0.0, placement.node_count)
    return (offer.accelerator.lower(), offer.accelerator_count, placement.node_count)


def name_kind(placement: Placement) -> str:
    """Return the name of a node's accelerators, such as `A100:8`, or the instance type if it has none."""
    offer = placement.offer
    return f"{offer.accelerator}:{offer.accelerator_count:g}" if offer.accelerator else offer.instance_type


def has_kinds(task: Task) -> bool:
    """Return whether the alternatives of a task may lead to machines of several kinds."""
    return len({(each.accelerator, each.accelerator_count, each.instance_type) for each in task.resources}) > 1


def choose_places(
    plan: Plan, here: Placement | None, refusals: Sequence[Refusal] = (), *, is_live: bool = True
) -> list[Estimate]:
    """Return the first estimates of each pricing model, in plan order, and that of the job's current or last place.

    `is_live`: its machines run there now.
    With several kinds, each of the first few kinds gets some places, even expensive ones: the only kind that is still
    in time may be expensive, and the cheap kind may be unavailable everywhere. Own machines on-demand that are busy are
    only chosen if there are no others: nothing else is cheap beside machines that cost nothing.
    """
    spot, ondemand, own, busy = list[Estimate](), list[Estimate](), list[Estimate](), list[Estimate]()
    more, counts = {True: list[Estimate](), False: list[Estimate]()}, Counter[tuple[bool, Kind]]()
    is_wide = has_kinds(plan.task)
    for estimate in plan.estimates:
        placement = estimate.placement
        if refusals and _is_busy(placement, here if is_live else None, refusals):
            busy.append(estimate)
            continue
        bin_, limit = (spot, SPOT_MAX) if placement.is_spot else (ondemand, ONDEMAND_MAX)
        key, least = (placement.is_spot, find_kind(placement)), SPOT_OF_KIND if placement.is_spot else ONDEMAND_OF_KIND
        if len(bin_) < limit:
            bin_.append(estimate)
            counts[key] += 1
        elif is_wide and counts[key] < least and len({kind for _, kind in {*counts, key}}) <= KINDS_MAX:
            more[placement.is_spot].append(estimate)
            counts[key] += 1
        elif here is not None and is_same_place(placement, here):
            own.append(estimate)
        if not is_wide and len(spot) == SPOT_MAX and len(ondemand) == ONDEMAND_MAX and (here is None or own):
            break
    return [*spot, *more[True], *(ondemand or busy[:ONDEMAND_MAX]), *more[False], *own[:1]]


def _is_busy(placement: Placement, here: Placement | None, refusals: Sequence[Refusal]) -> bool:
    """Return whether machines on-demand that cost nothing have refused the job's last request."""
    if placement.is_spot or placement.usd_hour > 0 or (here is not None and is_same_place(placement, here)):
        return False
    return any(refusal.covers(placement) for refusal in refusals)


def keep_place(here: Placement, candidates: Sequence[Candidate]) -> Candidate:
    """Return a candidate for running machines that are no longer offered: as fast as others of their kind."""
    alike = (each.speed for each in candidates if find_kind(each.placement) == find_kind(here))
    return Candidate(placement=here, speed=next(alike, 1.0))


def order_by_kind(estimates: Sequence[Estimate], target: Placement) -> list[Estimate]:
    """Return the places of one pricing model to try for a target: only the policy may change the kind on spot.

    For on-demand, other kinds follow, the fastest first, because machines are needed even if this kind is refused.
    """
    kind = find_kind(target)
    own = [each for each in estimates if find_kind(each.placement) == kind]
    if not own or len(own) == len(estimates):
        return list(estimates)
    if target.is_spot:
        return own
    others = [each for each in estimates if find_kind(each.placement) != kind]
    return own + sorted(others, key=lambda each: each.breakdown.work_hours if each.breakdown else math.inf)


def correct_speeds(
    candidates: Sequence[Candidate], job: Job, steps: Mapping[int, StepRange], *, now_s: float
) -> tuple[list[Candidate], tuple[KindSpeed, ...]]:
    """Return the candidates at the speeds that the job has measured, and the speed of each kind, the fastest first.

    A kind without a measurement is assumed to fall short of its planned speed as the measured ones do, but not to
    exceed it. If all candidates are of one kind, they are returned unchanged, and without speeds.
    """
    kinds = {find_kind(each.placement): each for each in reversed(candidates)}
    if len(kinds) < 2:
        return list(candidates), ()
    told = {kind: each.speed for kind, each in kinds.items()}
    seen = {kind: each for kind, each in _measure_speeds(job, steps, now_s=now_s).items() if kind in told}
    factors = {kind: _find_factor(told[kind], *each) for kind, each in seen.items()}
    pooled = math.exp(sum(math.log(each) for each in factors.values()) / len(factors)) if factors else 1.0
    corrected = [
        replace(each, speed=each.speed * factors.get(find_kind(each.placement), min(pooled, 1.0)))
        for each in candidates
    ]
    speeds = [
        KindSpeed(
            name=name_kind(each.placement),
            told=told[kind],
            speed=told[kind] * factors.get(kind, min(pooled, 1.0)),
            seen_hours=seen[kind][0] if kind in seen else 0.0,
        )
        for kind, each in kinds.items()
    ]
    return corrected, tuple(sorted(speeds, key=lambda each: (-each.speed, each.name)))


def _measure_speeds(job: Job, steps: Mapping[int, StepRange], *, now_s: float) -> dict[Kind, tuple[float, float]]:
    """Return, by kind, (measured hours, hours of the goal's work done per hour)."""
    total, goal = job.progress.total if job.progress else None, job.task.goal
    if not total or goal is None or goal.work_hours is None:
        return {}
    hours, work = dict[Kind, float](), dict[Kind, float]()
    for attempt in job.attempts:
        done = steps.get(attempt.number)
        lasted = _measure_stay_hours(attempt, now_s)
        if done is None or lasted < HOURS_MIN or done.last_step - done.first_step < STEPS_MIN:
            continue
        kind = find_kind(attempt.placement)
        hours[kind] = hours.get(kind, 0.0) + lasted
        work[kind] = work.get(kind, 0.0) + (done.last_step - done.first_step) / total * goal.work_hours
    return {kind: (lasted, work[kind] / lasted) for kind, lasted in hours.items()}


def _measure_stay_hours(attempt: Attempt, now_s: float) -> float:
    """Return the hours from the first new step to the end of the attempt, or to now."""
    if attempt.resumed_s is None:
        return 0.0
    ends = [each for each in (attempt.lost_s, attempt.ended_s) if each is not None]
    return (min(ends, default=now_s) - attempt.resumed_s) / 3600


def _find_factor(told: float, hours: float, speed: float) -> float:
    """Return the ratio of measured to planned speed, closer to 1 after few hours; 1 within the resolution of speeds."""
    share = hours / (hours + HOURS_TOLD)
    factor = min(max(speed / told, 1 / FACTOR_MAX), FACTOR_MAX) ** share
    return 1.0 if round_speed(factor) == 1.0 else factor


def count_ranks(placement: Placement) -> int:
    """Return the accelerators of a gang, or its nodes if they have none: the usual number of ranks."""
    return max(round(placement.offer.accelerator_count), 1) * placement.node_count


def keep_ranks(plan: Plan, job: Job, steps: Mapping[int, StepRange]) -> Plan:
    """Return the plan with the places that can resume the job's checkpoint, if that requires the same number of ranks.

    Raises NoOfferError if there are none.
    """
    if not job.task.checkpoint.is_for_same_ranks:
        return plan
    saved = (each for each in job.attempts if (steps[each.number].checkpoint_step if each.number in steps else None))
    first = next(saved, None)
    if first is None:
        return plan
    ranks = count_ranks(first.placement)
    kept = tuple(each for each in plan.estimates if count_ranks(each.placement) == ranks)
    if not kept:
        found = sorted({count_ranks(each.placement) for each in plan.estimates})
        raise NoOfferError(
            f"the checkpoint was written by {format_count(ranks, 'rank')} ({name_kind(first.placement)}), and "
            f"`checkpoint: {{same_ranks: true}}` requires as many, but offers have {', '.join(map(str, found))}",
            hints=["add an alternative with as many accelerators to `any_of`"],
        )
    return replace(plan, estimates=kept)


def describe_ranks(plans: Sequence[Plan]) -> Sequence[str]:
    """Return notices about tasks that may move to a different number of accelerators, with the requirements."""
    notices = []
    for task in (plan.task for plan in plans):
        counts = sorted({round(each.accelerator_count) * task.num_nodes for each in task.resources if each.accelerator})
        if len(counts) < 2 or task.checkpoint.is_for_same_ranks or runs_bundled_trainer(task):
            continue
        name = f"`{task.name}`" if task.name else "the task"
        notices.append(
            f"{name} may move between {' and '.join(map(str, counts))} accelerators: its program must resume a "
            "checkpoint on another number of ranks; if it cannot, add `checkpoint: {same_ranks: true}`"
        )
    return notices
