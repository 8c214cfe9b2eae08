"""Interface of spot policies: inputs, decisions, and the arithmetic that keeps deadlines.

A policy is a pure function. Simulation, rehearsal and production call it whenever something changes (a market opens
or closes, a node is lost, a notice comes) and when the hours for which its last decision holds are over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from broker.spot.durations import NOTHING_SEEN, Durations
from broker.types import Placement

EPSILON_HOURS = 1e-7  # below a millisecond: the rounding error of sums of hours
SPEED_STEP, SPEED_MIN = 0.05, 0.01  # of a ratio of speeds: the step of its logarithm, and its minimum


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A placement and the present knowledge of its market.

    `is_open` says that spot capacity is available, as far as known; on-demand counts as always open. `is_watched` says
    that the end of its period would be noticed even if nothing ran there.
    `age_hours` is the age of its present period, and `met_hours` the age at which watching began: 0 if the beginning
    was observed, else an assumption (`broker.spot.durations.MET_HOURS`) from which `age_hours` continues.
    `start_hours` are billed and do no work: creating nodes, setup, data, restoring the checkpoint. During the first
    `overlap_hours` of a start, machines that already run continue to work. `move_usd` is paid once to move there
    (egress). `speed` is work-hours per hour.
    """

    placement: Placement
    is_open: bool = True
    is_watched: bool = True
    age_hours: float = 0.0
    met_hours: float = 0.0
    start_hours: float = 0.0
    overlap_hours: float = 0.0
    move_usd: float = 0.0
    speed: float = 1.0
    closes_in_hours: float | None = None  # known from a preemption notice
    seen: Durations = NOTHING_SEEN  # finished periods of this market

    @property
    def is_spot(self) -> bool:
        """Whether the placement is on spot."""
        return self.placement.is_spot

    @property
    def usd_work_hour(self) -> float:
        """Return USD per hour of work done there."""
        return self.placement.usd_hour / self.speed


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A job as its policy sees it.

    `work_left_hours` counts from the last checkpoint: `unsaved_hours` of it are done but not saved yet. `current` is
    the index of the candidate with running (or starting) nodes, `starting_hours` the remainder of its start.
    `look_hours` bounds the time between a fault and the next decision, in addition to the hours for which a decision
    holds. `spent_usd` is the cost of the job up to now; None if it is unknown.
    """

    work_left_hours: float
    time_left_hours: float | None = None  # to the deadline
    current: int | None = None
    starting_hours: float = 0.0
    unsaved_hours: float = 0.0
    save_every_hours: float = 0.0  # work and stall from one checkpoint to the next; 0: no work is ever lost
    look_hours: float = 0.0
    last: int | None = None  # the candidate lost last, if nothing runs
    work_hours: float = 0.0  # in total; gives the due progress together with `deadline_hours`
    deadline_hours: float | None = None  # counted from submission
    spent_usd: float | None = None
    saves_on_notice: bool = False  # a preemption loses no work: its notice is long enough for a checkpoint
    hour_value_usd: float | None = None  # value of finishing an hour earlier; None: the default of each policy

    @property
    def sure_left_hours(self) -> float:
        """Return the work left if the running machines are lost at once."""
        return self.work_left_hours - (self.unsaved_hours if self.saves_on_notice else 0.0)

    @property
    def exposed_hours(self) -> float:
        """Return the most work that a preemption can lose."""
        return 0.0 if self.saves_on_notice else self.save_every_hours


# The expected cost to the end of each option: (a word or two, USD).
Weighed = tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stay:
    """The decision to continue unchanged. Every decision is requested again after `hours` at the latest."""

    hours: float = math.inf
    reason: str = ""
    weighed: Weighed = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """The decision to terminate the running machines, if any, and to start at `target`."""

    target: Candidate
    hours: float = math.inf
    reason: str = ""
    weighed: Weighed = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """The decision to hold no machines for now."""

    hours: float = math.inf
    reason: str = ""
    weighed: Weighed = ()


Decision = Stay | Move | Wait


class SpotPolicy(Protocol):
    """A pure function from a job and its candidate placements to the next decision."""

    def __call__(self, view: JobView, candidates: Sequence[Candidate], /) -> Decision:
        """Return the next step of a job. Pure: equal arguments give equal decisions."""


def find_fallback(view: JobView, candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the cheapest on-demand fallback that finishes in time, otherwise the fastest.

    Of equally fast ones, the cheapest; None without on-demand.
    """
    ondemand = [each for each in candidates if not each.is_spot]
    work, limit = view.sure_left_hours, view.time_left_hours
    if len(ondemand) < 2:
        return ondemand[0] if ondemand else None
    reach = math.inf if limit is None else limit - view.look_hours + EPSILON_HOURS

    def price(each: Candidate) -> float:
        return each.usd_work_hour * work + each.move_usd

    timely = [each for each in ondemand if find_finish_hours(each, work) <= reach]
    if timely:
        return min(timely, key=price)
    return min(ondemand, key=lambda each: (find_finish_hours(each, work), price(each)))


def list_reserves(view: JobView, candidates: Sequence[Candidate], fallback: Candidate) -> list[Candidate]:
    """Return on-demand that may be kept in reserve: the fallback, then by cost the best of each other speed.

    All are in time, unless nothing is. A kind that is both slower and more expensive than another one is left out.
    """
    work, limit = view.sure_left_hours, view.time_left_hours
    reach = math.inf if limit is None else limit - view.look_hours + EPSILON_HOURS
    found = {round_speed(1.0): fallback}
    for each in candidates:
        if each.is_spot or find_finish_hours(each, work) > reach:
            continue
        best = found.setdefault(round_speed(each.speed / fallback.speed), each)
        if best is not fallback and _price_run(each, work) < _price_run(best, work):
            found[round_speed(each.speed / fallback.speed)] = each
    by_cost = sorted((each for each in found.values() if each is not fallback), key=lambda each: _price_run(each, work))
    kept = [fallback]
    for each in by_cost:
        if all(each.speed > one.speed or _price_run(each, work) < _price_run(one, work) for one in kept):
            kept.append(each)
    return kept


def _price_run(candidate: Candidate, work_hours: float) -> float:
    return candidate.move_usd + candidate.placement.usd_hour * find_finish_hours(candidate, work_hours)


def round_speed(ratio: float) -> float:
    """Round a ratio of two speeds to steps of 5 %, so that value functions can be shared; 1 stays 1."""
    return math.exp(round(math.log(max(ratio, SPEED_MIN)) / SPEED_STEP) * SPEED_STEP)


def is_same_speed(one: Candidate, other: Candidate) -> bool:
    """Return whether two places work about equally fast."""
    return round_speed(one.speed / other.speed) == 1.0


def have_one_speed(candidates: Sequence[Candidate], fallback: Candidate) -> bool:
    """Return whether all places work about as fast as the fallback."""
    return all(is_same_speed(each, fallback) for each in candidates)


def find_finish_hours(candidate: Candidate, work_hours: float) -> float:
    """Return the hours that `work_hours` take if started there now and never interrupted."""
    return candidate.start_hours + work_hours / candidate.speed


def find_spare_hours(view: JobView, fallback: Candidate) -> float:
    """Return how long the job may idle before on-demand must start to be in time; infinite without a deadline.

    The worst case is assumed: the running machines are lost at once, with all unsaved work unless a notice saves it.
    """
    if view.time_left_hours is None:
        return math.inf
    return view.time_left_hours - view.look_hours - find_finish_hours(fallback, view.sure_left_hours)


def find_idle_hours(view: JobView, target: Candidate) -> float:
    """Return the part of a start there during which nothing works: running machines continue through the first part."""
    is_working = view.current is not None and view.starting_hours <= 0
    return target.start_hours - target.overlap_hours if is_working else target.start_hours


def find_exposed_hours(view: JobView, target: Candidate, fallback: Candidate) -> float:
    """Return the most time that a preemption there can cost, beyond the start.

    A program that saves after a fixed number of steps takes longer from one checkpoint to the next where it is slower.
    """
    return view.exposed_hours / min(target.speed / fallback.speed, 1.0)


def is_safe_to_start(view: JobView, target: Candidate, fallback: Candidate) -> bool:
    """Return whether on-demand is still in time after a start on spot that is lost just before its first checkpoint."""
    return (
        find_spare_hours(view, fallback)
        >= find_idle_hours(view, target) + find_exposed_hours(view, target, fallback) - EPSILON_HOURS
    )


def is_affordable(
    view: JobView, target: Candidate, fallback: Candidate, *, share: float, failures: int, move_usd: float = 0.0
) -> bool:
    """Return whether the cost stays bounded after a start on spot that is lost just before its first checkpoint.

    The bound on the total cost, with on-demand to the end, is the cost of on-demand alone plus the larger of two
    amounts: a `share` of it, and the cost of `failures` failed moves from on-demand to spot. A failed move pays egress
    of at least `move_usd`. True if the spent amount is unknown.
    """
    if view.spent_usd is None:
        return True
    rate, work = fallback.placement.usd_hour, max(view.work_hours, view.work_left_hours)
    exposed = find_exposed_hours(view, target, fallback)
    lost = target.move_usd + (target.start_hours + exposed) * target.placement.usd_hour
    worst = view.spent_usd + lost + rate * find_finish_hours(fallback, view.sure_left_hours)
    ondemand = rate * find_finish_hours(fallback, work)
    failed = lost + max(move_usd - target.move_usd, 0.0) + rate * fallback.start_hours
    return worst <= ondemand + max(share * ondemand, failures * failed)


def find_safe_hours(view: JobView, current: Candidate, fallback: Candidate) -> float:
    """Return how long the job may continue on spot before the next decision; 0: on-demand must start now.

    Where no work is ever lost, spare time falls only during a start and as far as spot is slower than on-demand.
    """
    spare = find_spare_hours(view, fallback)
    if view.exposed_hours > 0:
        return spare if spare > EPSILON_HOURS else 0.0
    if spare < view.starting_hours - EPSILON_HOURS:
        return spare if spare > EPSILON_HOURS else 0.0
    falling = 1 - current.speed / fallback.speed  # spare time used per hour of work
    if falling <= 1e-12:
        return math.inf
    left = view.starting_hours + (spare - view.starting_hours) / falling
    return left if left > EPSILON_HOURS else 0.0


def find_hours_after_start(view: JobView, target: Candidate, fallback: Candidate) -> float:
    """Return how long a decision to start there holds: where spot is slower than on-demand, it uses up spare time."""
    if not target.is_spot or target.speed >= fallback.speed:
        return math.inf
    return find_safe_hours(replace(view, starting_hours=target.start_hours), target, fallback)


def find_cheapest_open_spot(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the open spot candidate with the cheapest work; among equals, the one with the cheapest move."""
    open_ones = [each for each in candidates if each.is_spot and each.is_open]
    return min(open_ones, key=lambda each: (each.usd_work_hour, each.move_usd), default=None)


def take_fallback(view: JobView, candidates: Sequence[Candidate], fallback: Candidate, reason: str) -> Decision:
    """Return the decision to run on-demand to the end."""
    if view.current is not None and not candidates[view.current].is_spot:
        return Stay(reason=reason)
    return Move(target=fallback, reason=reason)
