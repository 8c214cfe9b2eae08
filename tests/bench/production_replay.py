"""Replay with the knowledge of production: a market is observed only where nodes run, and by requests it refuses.

The rules are those of the jobs controller: a refused place is asked again after half a minute to two minutes
(`broker.provision.refusals`), and machines are kept until others are granted. Both can be replaced by the rules of jobs
with a budget, to measure what each is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from broker.jobs.availability import Availability, PlaceKey, name_place, update_availability
from broker.lab.replay import DECISIONS_MAX, Case, ReplayOutcome, ReplayState
from broker.provision.refusals import CAPACITY_REFUSAL_S, REASK_S, REASK_S_MAX, REFUSAL_S_MAX
from broker.spot.durations import NOTHING_SEEN, Durations
from broker.spot.policies.base import Candidate, Decision, JobView, Move, SpotPolicy, Wait
from broker.types import Attempt, OutcomeKind
from broker.types import Outcome as AttemptOutcome

DECISION_HOURS_MAX = 5 / 60  # between two decisions
REQUEST_HOURS = 1 / 60  # until a request is refused
WhenToAsk = Callable[[int, float], float]


def double_rests(count: int, asked_s: float) -> float:
    """Return when a place that has refused `count` times, last at `asked_s`, may be asked while others are open."""
    return asked_s + min(CAPACITY_REFUSAL_S * 2.0 ** (count - 1), REFUSAL_S_MAX)


def ask_soon(count: int, asked_s: float) -> float:
    """Return when it may be asked if no other place is in question."""
    return asked_s + min(REASK_S * 1.5 ** (count - 1), REASK_S_MAX)


def replay_production(
    case: Case,
    policy: SpotPolicy,
    from_hour: float = 0.0,
    *,
    keeps_machines: bool = True,
    probe: WhenToAsk = ask_soon,
) -> ReplayOutcome:
    """Replay as `replay` does. `keeps_machines`: until those of a move are granted."""
    life = _Production(case, from_hour, keeps_machines=keeps_machines, probe=probe)
    for _ in range(DECISIONS_MAX):
        if life.is_over:
            return life.sum_up()
        view, candidates = life.observe()
        life.follow(policy(view, candidates), candidates)
    raise AssertionError("the policy exceeds the limit of decisions")


class _Production(ReplayState):
    def __init__(self, case: Case, from_hour: float, *, keeps_machines: bool, probe: WhenToAsk) -> None:
        super().__init__(case, from_hour)
        self.keeps_machines, self.probe = keeps_machines, probe
        self.places = [name_place(site.spot) for site in case.sites]
        self.availability: Mapping[PlaceKey, Availability] = {}
        self.refused = dict[int, tuple[int, float]]()  # site -> how often in a row, and when last
        self.stays = dict[int, Durations]()
        self.began = 0.0  # the present stay
        self.ends = dict[int, Attempt]()  # site -> the stay that was preempted last

    def observe(self) -> tuple[JobView, list[Candidate]]:
        view, candidates = super().observe()
        now_s, here = self.hour * 3600, None if self.current is None or self.current % 2 else self.current // 2
        live = None if here is None else self._make_attempt(here)
        opens = [
            (place, site not in self.refused or now_s >= self.probe(*self.refused[site]))
            for site, place in enumerate(self.places)
        ]
        self.availability = update_availability(
            self.availability, opens, tuple(self.ends.values()), live=live, now_s=now_s
        )
        for site, place in enumerate(self.places):
            known = self.availability[place]
            candidates[2 * site] = replace(
                candidates[2 * site],
                is_open=known.is_open or site == here,
                is_watched=site == here,
                age_hours=max(now_s - known.since_s, 0.0) / 3600,
                met_hours=max(known.met_s - known.since_s, 0.0) / 3600,
                seen=self.stays.get(site, NOTHING_SEEN),
            )
        return view, candidates

    def _make_attempt(self, site: int, *, lost_s: float | None = None) -> Attempt:
        outcome = None if lost_s is None else AttemptOutcome(kind=OutcomeKind.PREEMPTED)
        return Attempt(
            job_id=0, number=1, cluster="", placement=self.case.sites[site].spot, started_s=self.began * 3600,
            lost_s=lost_s, outcome=outcome,
        )  # fmt: skip

    def follow(self, decision: Decision, candidates: Sequence[Candidate]) -> None:
        decision = replace(decision, hours=min(decision.hours, DECISION_HOURS_MAX))
        if isinstance(decision, Move):
            target = next(index for index, each in enumerate(candidates) if each is decision.target)
            site = target // 2
            if target % 2 == 0 and target != self.current:
                if not self.now[site][0]:
                    self._note_refusal(site, candidates)
                    return
                self.refused.pop(site, None)
                self.began = self.hour
        elif isinstance(decision, Wait) and self.current is not None and self.keeps_machines:
            decision = replace(decision, hours=DECISION_HOURS_MAX)
        super().follow(decision, candidates)

    def _note_refusal(self, site: int, candidates: Sequence[Candidate]) -> None:
        now_s = self.hour * 3600
        self.refused[site] = self.refused.get(site, (0, now_s))[0] + 1, now_s
        if not self.keeps_machines:
            self._switch(None, 0.0)
        self._run_until(min(self.hour + REQUEST_HOURS, self._next_event()))

    def _change(self, index: int) -> None:
        was_here = self.current == 2 * index
        super()._change(index)
        if was_here and self.current is None:
            self.ends[index] = self._make_attempt(index, lost_s=self.hour * 3600)
            age = self.hour - self.began
            self.stays[index] = self.stays.get(index, NOTHING_SEEN).discount(age).with_period(age, is_open=True)
