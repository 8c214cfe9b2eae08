"""Run the spot policy of a job, at its start and while it runs, and carry out its decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from broker.clock import Clock
from broker.errors import NoOfferError
from broker.jobs.availability import Availability, PlaceKey, is_same_place
from broker.jobs.deadline import (
    Situation,
    advise_every_s,
    arrange,
    estimate_start_hazard,
    find_candidate,
    follows_deadline,
    has_saved_on_notice,
    is_safe_at,
    is_voluntary,
    loses_little,
    read_situation,
    record_decision,
)
from broker.jobs.kinds import keep_ranks
from broker.jobs.progress import complete_progress
from broker.jobs.replanning import cut_to_rest, drop_limits
from broker.jobs.setup_starts import find_restored_start
from broker.jobs.successor import Successor
from broker.jobs.teardown import AttemptTeardown
from broker.spot.policies import load_policy
from broker.spot.policies.base import Candidate, Decision, Move, Wait
from broker.state.history import SHARED_S_MAX, gather_durations
from broker.state.store import Store
from broker.types import Attempt, Cluster, Job, JobStatus, Outcome, OutcomeKind, Placement, Plan, Progress, Task

POLICY = "adaptive"
POLL_S_MIN, POLL_S_MAX = 30.0, 300.0
SAVE_S_MAX = 60.0  # time for a program to save its state before it is moved


class Pause(Exception):
    """Raised when the policy decides to hold no machines for now."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(wait_s)
        self.wait_s = wait_s


class PolicyRunner:
    """Run the policy of one job. Its memory is lost with the controller and then rebuilt."""

    def __init__(
        self,
        store: Store,
        planner: Callable[[Task, Callable[[Placement], bool] | None], Plan],
        clock: Clock,
        teardown: AttemptTeardown,
        successor: Successor,
    ) -> None:
        self._store = store
        self._planner = planner
        self._clock = clock
        self._teardown = teardown
        self._successor = successor
        self._ahead: Move | None = None  # the move whose machines are being started
        self._target: Candidate | None = None
        self._availability: Mapping[PlaceKey, Availability] = {}
        self._recorded = ""
        self._next_s = 0.0
        self._saved_step: int | None = None

    def plan(self, job: Job) -> Plan | None:
        """Plan where to start; None if the job does not follow a deadline. Raises Pause, NoOfferError."""
        if not follows_deadline(job.task):
            return None
        plan, situation = self._observe(job, None)
        begun = self._successor.find_placement(job)
        if begun is not None and find_candidate(situation.candidates, begun) is not None:
            self._target = None
            return arrange(plan, Candidate(placement=begun))
        decision = self._decide(situation)
        target = decision.target if isinstance(decision, Move) else self._target
        self._target = None
        self._record_decision(job, situation, decision)
        if target is None:
            raise Pause(min(max(decision.hours * 3600, POLL_S_MIN), POLL_S_MAX))
        refusals = self._store.refusals.list_active(self._clock.now_s())
        is_refused = any(refusal.covers(target.placement) for refusal in refusals)
        return arrange(plan, target, is_alone=is_refused)  # a refused location is only retried on its own

    async def review_successor(self, job: Job) -> None:
        """Keep the machines that were requested for the next attempt, unless a start on spot is no longer safe."""
        begun = self._successor.find_placement(job) if follows_deadline(job.task) else None
        if begun is None:
            return
        if job.displaced_by is not None:  # the job waits for a slot first
            await self._successor.release(job)
            return
        try:
            _, situation = self._observe(job, None)
        except NoOfferError:
            return  # `plan` reports it
        if not is_safe_at(situation, begun, is_up=self._successor.is_up(job)):
            await self._successor.release(job)

    async def reconsider(self, job: Job, attempt: Attempt, cluster: Cluster, progress: Progress | None) -> bool:
        """Run the policy again; return whether the attempt was ended in order to move.

        Running machines are kept if nothing fits the rest of the job: its budget may be less than any place is expected
        to cost, and ends the job only once it is used up.
        """
        if not follows_deadline(job.task):
            return False
        now_s = self._clock.now_s()
        progress = complete_progress(progress, job.progress) if progress else None
        saved = progress.checkpoint_step if progress else None
        is_saved = saved != self._saved_step
        is_ready = self._successor.check()
        is_due = now_s >= self._next_s or (is_saved and now_s >= self._next_s - POLL_S_MAX + POLL_S_MIN)
        if not is_ready and not is_due:
            return False
        self._saved_step = saved
        try:
            plan, situation = self._observe(replace(job, progress=progress or job.progress), attempt)
        except NoOfferError:
            self._next_s = now_s + POLL_S_MAX
            return False
        decision = self._decide(situation)
        self._next_s = now_s + min(max(decision.hours * 3600, POLL_S_MIN), POLL_S_MAX)
        move = self._choose_move(
            job, plan, situation, decision, has_just_saved=is_saved and bool(saved), is_ready=is_ready
        )
        if move is None:
            return False
        self._record_decision(job, situation, move)
        self._target = move.target
        await self._move(job, attempt, cluster, move)
        return True

    def _choose_move(
        self, job: Job, plan: Plan, situation: Situation, decision: Decision, *, has_just_saved: bool, is_ready: bool
    ) -> Move | None:
        """Return the move to carry out now. A move that is not urgent waits until its machines are up."""
        move = decision if isinstance(decision, Move) and not self._is_here(situation, decision) else None
        if move is not None and not is_voluntary(situation, move):
            return move
        if begun := self._successor.find_placement(job):
            return self._follow_successor(job, plan, situation, begun, is_ready=is_ready)
        if move is None:
            if not isinstance(decision, Wait):  # running machines are not given up for none
                self._record_decision(job, situation, decision)
            return None
        if not self._successor.can_overlap(job):
            return move if has_just_saved else None
        if has_just_saved or loses_little(situation.view, move.target):
            self._ahead = move
            self._successor.begin(job, arrange(plan, move.target, is_alone=True))
        return None

    def _follow_successor(
        self, job: Job, plan: Plan, situation: Situation, begun: Placement, *, is_ready: bool
    ) -> Move | None:
        """Return the move to machines that are up, if a start there is still safe; else wait for or release them."""
        target = find_candidate(situation.candidates, begun) or Candidate(placement=begun)
        if not is_ready:
            self._successor.begin(job, arrange(plan, target, is_alone=True))  # only has an effect after a restart
            return None
        if not is_safe_at(situation, begun, is_up=True):
            self._successor.begin_release(job)
            return None
        return replace(self._ahead or Move(target=target, reason="its machines are up"), target=target)

    def advise(self, task: Task, attempt: Attempt) -> Mapping[str, str]:
        """Return variables for the program: the expected preemptions per hour, and the checkpoint interval."""
        now_s = self._clock.now_s()
        age_s_max = min(SHARED_S_MAX, now_s - attempt.started_s)  # includes the preemption before this attempt
        hazard = estimate_start_hazard(
            task,
            attempt.placement,
            history=self._store.history.read(age_s_max=age_s_max),
            durations=gather_durations(self._store.history.list_stays(), now_s=now_s) if follows_deadline(task) else {},
            availability=self._availability,
            now_s=now_s,
        )
        every_s = advise_every_s(task, hazard)
        advice = {"BROKER_HAZARD_PER_HOUR": f"{hazard:.4g}"}
        return advice if every_s is None else {**advice, "BROKER_CHECKPOINT_EVERY_S": f"{every_s:.0f}"}

    def _observe(self, job: Job, live: Attempt | None) -> tuple[Plan, Situation]:
        now_s = self._clock.now_s()
        spent_usd = self._store.bills.spend_usd(job_id=job.id, now_s=now_s)
        rest = cut_to_rest(job, now_s=now_s, spent_usd=spent_usd)
        steps = self._store.jobs.list_steps(job.id)
        plan = keep_ranks(self._planner(drop_limits(rest), None), job, steps)
        refusals = self._store.refusals.list_active(now_s)
        situation = read_situation(
            job,
            plan,
            now_s=now_s,
            refusals=refusals,
            availability=self._availability,
            durations=gather_durations(self._store.history.list_stays(), now_s=now_s),
            look_hours=(POLL_S_MAX + POLL_S_MIN) / 3600,
            spent_usd=spent_usd,
            live=live,
            saves_on_notice=has_saved_on_notice(job.attempts, steps),
            may_reask=live is None or self._successor.can_overlap(job),
            expect_overlap_hours=lambda cloud: self._successor.expect_overlap_hours(job, cloud),
            steps=steps,
            restored=find_restored_start(self._store, job.task, now_s=now_s, job=job),
        )
        self._availability = situation.availability
        return plan, situation

    def _decide(self, situation: Situation) -> Decision:
        return load_policy(POLICY)(situation.view, situation.candidates)

    def _is_here(self, situation: Situation, decision: Move | Wait) -> bool:
        current = situation.view.current
        if current is None or isinstance(decision, Wait):
            return False
        return is_same_place(situation.candidates[current].placement, decision.target.placement)

    async def _move(self, job: Job, attempt: Attempt, cluster: Cluster, decision: Move) -> None:
        """Make the program save on SIGTERM, as before a preemption; its machines are released afterwards.

        The outcome is recorded first: a run that ended without one would count as cancelled by the user.
        """
        with self._store.transaction():
            outcome = Outcome(kind=OutcomeKind.MOVED, detail=decision.reason)
            self._store.jobs.put_attempt(replace(attempt, outcome=outcome, lost_s=self._clock.now_s()))
            self._store.jobs.set_status(job.id, JobStatus.RECOVERING)
        await self._teardown.end_program(attempt, cluster, grace_s=SAVE_S_MAX)

    def _record_decision(self, job: Job, situation: Situation, decision: Decision) -> None:
        """Record a decision only when it changes."""
        where = decision.target.placement if isinstance(decision, Move) else None
        offer = where.offer if where else None
        kind = f"{type(decision).__name__} {offer.cloud} {offer.zone} {where.is_spot}" if offer and where else ""
        kind = kind or f"{type(decision).__name__} {decision.reason}"
        if kind == self._recorded:
            return
        self._recorded = kind
        self._store.events.add(record_decision(situation, decision), job_id=job.id)
