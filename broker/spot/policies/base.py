"""The seam of spot policies: what one sees, what it may say, and the arithmetic of never being late.

A policy is a pure function. Simulation, rehearsal and production call it whenever something changes (a market opens
or closes, a node is lost, a notice comes) and when the hours that its last decision holds for are over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from broker.spot.durations import NOTHING_SEEN, Durations
from broker.types import Placement

EPSILON_HOURS = 1e-7  # below a millisecond: what sums of hours may be off by


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A placement, and what is known of its market now.

    `is_open` is about spot: capacity could be had, as far as is known; on-demand counts as always open. `is_watched`:
    its end would be noticed, though nothing ran there.
    `age_hours` is how long it has been open (or closed), and `met_hours` the age it had when it was first watched: 0
    where its beginning was seen, else a guess (`broker.spot.durations.MET_HOURS`) from which `age_hours` counts on.
    `start_hours` are billed and bring no work: making nodes, setup, data, restoring the checkpoint. `move_usd` is paid
    once to get there (egress). `speed` is work-hours done in an hour.
    """

    placement: Placement
    is_open: bool = True
    is_watched: bool = True
    age_hours: float = 0.0
    met_hours: float = 0.0
    start_hours: float = 0.0
    move_usd: float = 0.0
    speed: float = 1.0
    closes_in_hours: float | None = None  # known beforehand: a preemption notice
    seen: Durations = NOTHING_SEEN  # finished spells of this market

    @property
    def is_spot(self) -> bool:
        return self.placement.is_spot

    @property
    def usd_work_hour(self) -> float:
        """USD per hour of work done there."""
        return self.placement.usd_hour / self.speed


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A job as its policy sees it.

    `work_left_hours` counts from what is saved: `unsaved_hours` of it are done but not in a checkpoint yet. `current`
    is the index of the candidate that nodes are up (or starting) at, `starting_hours` what is left of its start.
    `look_hours` bounds the time between a fault and the next decision, beyond the hours a decision holds for.
    `spent_usd` is what the job has cost so far; None where that is not known.
    """

    work_left_hours: float
    time_left_hours: float | None = None  # to the deadline
    current: int | None = None
    starting_hours: float = 0.0
    unsaved_hours: float = 0.0
    save_every_hours: float = 0.0  # work and stall from one checkpoint to the next; 0: nothing done is ever lost
    look_hours: float = 0.0
    last: int | None = None  # the candidate that was lost last, where nothing runs
    work_hours: float = 0.0  # in all; with `deadline_hours` it tells how far on the job should be
    deadline_hours: float | None = None  # from submission
    spent_usd: float | None = None


# What each way to go on is expected to cost to the end: (a word or two, USD).
Weighed = tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stay:
    """Go on as it is. Every decision is asked for again after `hours` at the latest."""

    hours: float = math.inf
    reason: str = ""
    weighed: Weighed = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Give up what runs, if anything does, and start at `target`."""

    target: Candidate
    hours: float = math.inf
    reason: str = ""
    weighed: Weighed = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Hold no machines for now."""

    hours: float = math.inf
    reason: str = ""
    weighed: Weighed = ()


Decision = Stay | Move | Wait


class SpotPolicy(Protocol):
    def __call__(self, view: JobView, candidates: Sequence[Candidate], /) -> Decision: ...


def find_refuge(view: JobView, candidates: Sequence[Candidate]) -> Candidate | None:
    """The cheapest on-demand candidate that would finish in time, else the soonest; None where there is none."""
    sure, work, limit = [each for each in candidates if not each.is_spot], view.work_left_hours, view.time_left_hours
    if len(sure) < 2:
        return sure[0] if sure else None
    reach = math.inf if limit is None else limit - view.look_hours + EPSILON_HOURS
    timely = [each for each in sure if finish_hours(each, work) <= reach]
    if timely:
        return min(timely, key=lambda each: each.usd_work_hour * work + each.move_usd)
    return min(sure, key=lambda each: finish_hours(each, work))


def finish_hours(candidate: Candidate, work_hours: float) -> float:
    """Hours that `work_hours` take when started there now and never interrupted."""
    return candidate.start_hours + work_hours / candidate.speed


def spare_hours(view: JobView, refuge: Candidate) -> float:
    """How long nothing may happen before on-demand must be started to be in time; infinite without a deadline.

    The worst is assumed of what runs: it is lost at once, with all that is not saved.
    """
    if view.time_left_hours is None:
        return math.inf
    return view.time_left_hours - view.look_hours - finish_hours(refuge, view.work_left_hours)


def is_safe_to_start(view: JobView, target: Candidate, refuge: Candidate) -> bool:
    """Whether, after a start on spot that is lost just before it saves anything, on-demand would still be in time."""
    return spare_hours(view, refuge) >= target.start_hours + view.save_every_hours - EPSILON_HOURS


def is_affordable(view: JobView, target: Candidate, refuge: Candidate, *, share: float, failures: int) -> bool:
    """Whether, after a start on spot that is lost just before it saves anything, on-demand to the end would still come
    to at most what on-demand alone would have cost and a `share` of it, or so many `failures` to leave on-demand for
    spot if those are dearer. True where what was spent is not known."""
    if view.spent_usd is None:
        return True
    rate, work = refuge.placement.usd_hour, max(view.work_hours, view.work_left_hours)
    lost = target.move_usd + (target.start_hours + view.save_every_hours) * target.placement.usd_hour
    worst = view.spent_usd + lost + rate * finish_hours(refuge, view.work_left_hours)
    sure = rate * finish_hours(refuge, work)
    return worst <= sure + max(share * sure, failures * (lost + rate * refuge.start_hours))


def safe_hours(view: JobView, current: Candidate, refuge: Candidate) -> float:
    """How long what runs on spot may go on before the next look; 0: on-demand must start now.

    Where nothing done is ever lost, work makes up for time as far as spot is as fast as on-demand; a start uses it up.
    """
    spare = spare_hours(view, refuge)
    if view.save_every_hours > 0:
        return spare if spare > EPSILON_HOURS else 0.0
    if spare < view.starting_hours - EPSILON_HOURS:
        return spare if spare > EPSILON_HOURS else 0.0
    falling = 1 - current.speed / refuge.speed  # spare time used up in an hour of work
    if falling <= 1e-12:
        return math.inf
    left = view.starting_hours + (spare - view.starting_hours) / falling
    return left if left > EPSILON_HOURS else 0.0


def cheapest_open_spot(candidates: Sequence[Candidate]) -> Candidate | None:
    """By price of work; of equals the one with the cheapest move."""
    open_ones = [each for each in candidates if each.is_spot and each.is_open]
    return min(open_ones, key=lambda each: (each.usd_work_hour, each.move_usd), default=None)


def take_refuge(view: JobView, candidates: Sequence[Candidate], refuge: Candidate, reason: str) -> Decision:
    """On-demand to the end."""
    if view.current is not None and not candidates[view.current].is_spot:
        return Stay(reason=reason)
    return Move(target=refuge, reason=reason)
