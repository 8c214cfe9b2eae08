"""Event-driven replay of a job over recorded markets under one policy, in which years take seconds.

The model: every start is billed and does no work; spot is preempted without warning (or with `notice_hours`) when its
market closes, and work since the last checkpoint is lost; on-demand always starts. A policy knows how long a start is
expected to take, and later the longest start that occurred. A job that is not on on-demand at `PATIENCE` times its
deadline is finished on-demand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from broker.lab.markets import Site
from broker.spot.durations import MET_HOURS, NOTHING_SEEN, Durations
from broker.spot.policies.base import EPSILON_HOURS, Candidate, Decision, JobView, Move, SpotPolicy, Wait

PATIENCE = 3.0
DECISIONS_MAX, DECISIONS_HOUR_MAX = 200_000, 500  # at least; and per hour up to `PATIENCE` times the deadline
MODES = ("waiting", "spot", "on-demand")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job. `move_usd[a][b]` is the cost to start at site b with the data at site a; the data start at site 0."""

    sites: tuple[Site, ...]
    work_hours: float
    deadline_hours: float
    save_every_hours: float = 0.0  # work between checkpoints; 0: no work is ever lost
    notice_hours: float = 0.0
    move_usd: tuple[tuple[float, ...], ...] = ()
    look_hours: float = 0.0
    start_factor: float = 1.0  # starts take this many times as long as the policy expects
    ondemand_delay_hours: float = 0.0  # an on-demand start takes this much longer
    hour_value_usd: float | None = None  # passed to the policy; costs do not include it
    overlap_hours: float = 0.0  # the first part of a start on spot, during which running machines work; both are billed


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A part of the timeline: mode, site, and the hours spent starting."""

    from_hours: float
    to_hours: float
    mode: str
    site: int | None = None
    start_hours: float = 0.0
    is_lost: bool = False  # ended by the market


@dataclass(frozen=True, kw_only=True)
class ReplayOutcome:
    """The result of a replay. `hours` is infinite for a job that never finished."""

    usd: float
    hours: float
    is_late: bool
    preemptions: int
    moves: int
    spot_hours: float
    ondemand_hours: float
    timeline: tuple[Stretch, ...] = ()


def replay(
    case: Case,
    policy: SpotPolicy,
    from_hour: float = 0.0,
    *,
    is_oracle: bool = False,
    is_learner: bool = True,
    keeps_timeline: bool = False,
) -> ReplayOutcome:
    """Replay a job submitted at `from_hour` of the recordings.

    An oracle knows when each open interval will end; a learner knows the history of the markets since submission.
    """
    life = ReplayState(case, from_hour, is_oracle=is_oracle, is_learner=is_learner, keeps_timeline=keeps_timeline)
    for _ in range(max(DECISIONS_MAX, math.ceil(DECISIONS_HOUR_MAX * PATIENCE * case.deadline_hours))):
        if life.is_over:
            return life.sum_up()
        view, candidates = life.observe()
        life.follow(policy(view, candidates), candidates)
    raise AssertionError("the policy exceeds the limit of decisions")


class ReplayState:
    """The state of one replay. Candidate 2 i is site i on spot, 2 i + 1 on-demand."""

    def __init__(
        self, case: Case, from_hour: float, *, is_oracle: bool = False, is_learner: bool = True,
        keeps_timeline: bool = False,
    ) -> None:  # fmt: skip
        self.case, self.from_hour = case, from_hour
        self.is_oracle, self.is_learner, self.keeps_timeline = is_oracle, is_learner, keeps_timeline
        self.hour = self.saved = self.unsaved = self.starting = self.usd = 0.0
        self.current: int | None = None
        self.last: int | None = None
        self.preemptions = self.moves = self.data = 0
        self.hours = [0.0, 0.0]  # spot, on-demand
        self.seen_start = 0.0  # the longest start up to now
        self.timeline = list[Stretch]()
        self.begun = 0.0
        self.lead = 0.0  # start-up hours of the stretch that began at `begun`
        self.steps = [site.find_step(from_hour) for site in case.sites]
        self.now = [site.read_step(step)[1:] for site, step in zip(case.sites, self.steps, strict=True)]
        self.next = [site.read_step(step + 1)[0] for site, step in zip(case.sites, self.steps, strict=True)]
        self.met = [MET_HOURS] * len(case.sites)  # the starts of the first intervals are not observed
        self.since = [-MET_HOURS] * len(case.sites)  # start of the interval, in hours since submission
        self.seen: list[Durations] = [NOTHING_SEEN] * len(case.sites)
        self.closes = [math.inf] * len(case.sites)
        self.coming: int | None = None  # machines that start while the current ones work, for `boot` more hours
        self.boot = self.coming_usd = 0.0
        self.ondemands = list[Candidate]()  # as long as `ondemand_key` holds
        self.ondemand_key: tuple[int, float] | None = None
        for index in range(len(case.sites)):
            self._foresee(index)

    @property
    def is_over(self) -> bool:
        """Return whether all work is done."""
        return self.saved + self.unsaved >= self.case.work_hours - EPSILON_HOURS

    def observe(self) -> tuple[JobView, list[Candidate]]:
        """Return the view of a policy at this moment: the job, and each site as a candidate."""
        case, candidates = self.case, list[Candidate]()
        if self.ondemand_key != (self.data, self.seen_start):
            self.ondemand_key = self.data, self.seen_start
            self.ondemands = [self._offer_ondemand(index) for index in range(len(case.sites))]
        for index, (site, ondemand) in enumerate(zip(case.sites, self.ondemands, strict=True)):
            is_open, placement = self.now[index]
            closes_in = self.closes[index] - self.hour
            candidates.append(
                Candidate(
                    placement=placement,
                    is_open=is_open,
                    age_hours=self.hour - self.since[index],
                    met_hours=self.met[index],
                    start_hours=ondemand.start_hours,
                    overlap_hours=min(case.overlap_hours, ondemand.start_hours),
                    move_usd=ondemand.move_usd,
                    speed=site.spot_speed,
                    closes_in_hours=closes_in if is_open and self._knows(closes_in) else None,
                    seen=self.seen[index],
                )
            )
            candidates.append(ondemand)
        view = JobView(
            work_left_hours=case.work_hours - self.saved,
            time_left_hours=case.deadline_hours - self.hour,
            current=self.current,
            starting_hours=self._expect_start() if self.starting else 0.0,
            unsaved_hours=self.unsaved,
            save_every_hours=case.save_every_hours / min(1.0, *(site.ondemand_speed for site in case.sites)),
            look_hours=case.look_hours,
            last=self.last,
            work_hours=case.work_hours,
            deadline_hours=case.deadline_hours,
            spent_usd=self.usd,
            saves_on_notice=case.notice_hours > 0,
            hour_value_usd=case.hour_value_usd,
        )
        return view, candidates

    def _offer_ondemand(self, index: int) -> Candidate:
        site = self.case.sites[index]
        return Candidate(
            placement=site.ondemand,
            start_hours=max(site.start_hours, self.seen_start),
            move_usd=self.case.move_usd[self.data][index] if self.case.move_usd else 0.0,
            speed=site.ondemand_speed,
        )

    def _expect_start(self) -> float:
        """Return the rest of a start as the policy knows it: it has seen how long the start has taken up to now."""
        assert self.current is not None
        told = max(self.case.sites[self.current // 2].start_hours, self.seen_start)
        if self.lead <= told + EPSILON_HOURS:
            return self.starting
        return max(told - (self.lead - self.starting), EPSILON_HOURS)

    def _knows(self, closes_in: float) -> bool:
        return self.is_oracle or closes_in <= self.case.notice_hours + EPSILON_HOURS

    def follow(self, decision: Decision, candidates: Sequence[Candidate]) -> None:
        """Carry out the decision until the next change."""
        target, patience_hours = self.current, PATIENCE * self.case.deadline_hours
        if self.hour >= patience_hours and not self._is_on_demand:
            target = 1 + 2 * self.data
        elif isinstance(decision, Move):
            target = next(index for index, candidate in enumerate(candidates) if candidate is decision.target)
        elif isinstance(decision, Wait):
            target = None
        self._pursue(target, 0.0 if target is None else candidates[target].move_usd)
        until = min(self.hour + max(decision.hours, 1e-6), self._next_event())
        if self.hour < patience_hours:
            until = min(until, patience_hours)
        self._run_until(until)

    def _pursue(self, target: int | None, move_usd: float) -> None:
        """Begin to switch. If starts overlap, a move of a working job to spot begins with the machines."""
        if target == self.current:
            self.coming = None
            return
        is_working = self.current is not None and not self.starting
        if target is None or target % 2 or not is_working or self.case.overlap_hours <= 0:
            self._switch(target, move_usd)
        elif target != self.coming:
            self.coming, self.coming_usd = target, move_usd
            self.boot = self._overlap_of(target)

    def _overlap_of(self, target: int) -> float:
        case = self.case
        return min(case.overlap_hours, case.sites[target // 2].start_hours * case.start_factor)

    def _take_over(self) -> None:
        """Continue on the machines that came up, with the rest of their start."""
        assert self.coming is not None
        booted = self._overlap_of(self.coming) - self.boot
        self._switch(self.coming, self.coming_usd)
        self.starting = max(self.starting - booted, 0.0)

    @property
    def _is_on_demand(self) -> bool:
        return self.current is not None and self.current % 2 == 1

    def _switch(self, target: int | None, move_usd: float) -> None:
        """Switch on purpose: the work done is saved first."""
        self.coming = None
        if target is not None and target % 2 == 0:
            assert self.now[target // 2][0], "a policy moved to spot that is not open"
        self.saved, self.unsaved = self.saved + self.unsaved, 0.0
        self._close_stretch(is_lost=False)
        self.last, self.current, self.starting = None, target, 0.0
        if target is not None:
            self.moves += 1
            self.usd += move_usd
            self.data = target // 2
            delay = self.case.ondemand_delay_hours * (target % 2)
            self.starting = self.lead = self.case.sites[self.data].start_hours * self.case.start_factor + delay

    def _close_stretch(self, *, is_lost: bool) -> None:
        if self.keeps_timeline and self.hour > self.begun:
            mode = "waiting" if self.current is None else MODES[1 + self.current % 2]
            site = None if self.current is None else self.current // 2
            lead = min(self.lead, self.hour - self.begun) if self.current is not None else 0.0
            self.timeline.append(
                Stretch(
                    from_hours=self.begun, to_hours=self.hour, mode=mode, site=site, start_hours=lead, is_lost=is_lost
                )
            )
        self.begun = self.hour

    def _next_event(self) -> float:
        """Return the time of the next change: of a market, a notice, or the end of the work."""
        until = min(self.next) - self.from_hour
        notice = self.case.notice_hours
        if notice > 0:
            for closes in self.closes:
                warned = closes - notice
                if self.hour + EPSILON_HOURS < warned < until:
                    until = warned
        if self.current is not None:
            left = self.case.work_hours - self.saved - self.unsaved
            until = min(until, self.hour + self.starting + left / self._speed)
        if self.coming is not None:
            until = min(until, self.hour + self.boot)
        return until

    @property
    def _speed(self) -> float:
        assert self.current is not None
        site = self.case.sites[self.current // 2]
        return site.ondemand_speed if self.current % 2 else site.spot_speed

    def _run_until(self, hour: float) -> None:
        span = hour - self.hour
        if self.current is not None:
            site = self.current // 2
            placement = self.case.sites[site].ondemand if self.current % 2 else self.now[site][1]
            self.usd += span * placement.usd_hour
            self.hours[self.current % 2] += span
            begun = min(self.starting, span)
            self.starting -= begun
            if self.lead > 0:
                self.seen_start = max(self.seen_start, self.lead - self.starting)
            if self.starting < EPSILON_HOURS:
                self.starting = 0.0
            self._work((span - begun) * self._speed)
        if self.coming is not None:
            self.usd += span * self.now[self.coming // 2][1].usd_hour
            self.hours[0] += span
            self.boot -= span
        self.hour = hour
        if self.is_over:
            self._close_stretch(is_lost=False)
            return
        for index, changes in enumerate(self.next):
            if changes - self.from_hour <= hour + EPSILON_HOURS:
                self._change(index)
        if self.coming is not None and self.boot < EPSILON_HOURS:
            self._take_over()

    def _work(self, hours: float) -> None:
        every = self.case.save_every_hours
        self.unsaved += hours
        if every <= 0:
            self.saved, self.unsaved = self.saved + self.unsaved, 0.0
        elif self.unsaved >= every:
            kept = math.floor(self.unsaved / every + 1e-9) * every
            self.saved, self.unsaved = self.saved + kept, max(self.unsaved - kept, 0.0)

    def _change(self, index: int) -> None:
        """Advance the market of one site by a step."""
        site = self.case.sites[index]
        was_open = self.now[index][0]
        self.steps[index] += 1
        _, is_open, placement = site.read_step(self.steps[index])
        self.now[index] = (is_open, placement)
        self.next[index] = site.read_step(self.steps[index] + 1)[0]
        if is_open == was_open:
            return
        if self.is_learner:
            age, met = self.hour - self.since[index], self.met[index]
            self.seen[index] = self.seen[index].discount(age - met).with_period(age, is_open=was_open, from_hours=met)
        self.met[index] = 0.0
        self.since[index] = self.hour
        self._foresee(index)
        if was_open and self.coming == 2 * index:
            self.coming = None
        if was_open and self.current == 2 * index:
            if self.case.notice_hours > 0:  # a notice leaves enough time for a checkpoint
                self.saved += self.unsaved
            self.unsaved = 0.0
            self._close_stretch(is_lost=True)
            self.preemptions += 1
            self.last, self.current, self.starting = self.current, None, 0.0
            if self.coming is not None:
                self._take_over()

    def _foresee(self, index: int) -> None:
        is_needed = self.is_oracle or self.case.notice_hours > 0
        if is_needed and self.now[index][0]:
            self.closes[index] = self.case.sites[index].closes_at(self.steps[index]) - self.from_hour
        else:
            self.closes[index] = math.inf

    def sum_up(self) -> ReplayOutcome:
        """Return cost, time and losses of the replay so far."""
        return ReplayOutcome(
            usd=self.usd,
            hours=self.hour,
            is_late=self.hour > self.case.deadline_hours + 1e-5,
            preemptions=self.preemptions,
            moves=self.moves,
            spot_hours=self.hours[0],
            ondemand_hours=self.hours[1],
            timeline=tuple(self.timeline),
        )
