"""Reconcile one managed job: compare the store with the observed cloud and gang, and take one step.

All durable state is in the store: a new controller continues where a killed one stopped. An attempt moves through
up -> (running) -> outcome set -> nodes confirmed gone -> ended; the next attempt starts only after that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from broker.clock import Clock
from broker.config import Config
from broker.errors import AuthError, CloudError, InvalidRequestError
from broker.jobs.acquisition import Acquisition, Planner
from broker.jobs.booting import StartVerdict, judge_start
from broker.jobs.displacement import Displacement
from broker.jobs.environment import make_envs
from broker.jobs.gang import Gang, GangReport, PushesNews, get_run_id
from broker.jobs.group_member import GroupMember
from broker.jobs.group_placement import GroupPlacement
from broker.jobs.groups import GroupStep, Judgement
from broker.jobs.health import Verdict, classify
from broker.jobs.in_place import InPlace, ReuseState, are_running
from broker.jobs.interruption import Interrupted, run_unless
from broker.jobs.job_limits import JobLimits
from broker.jobs.lost_gang import LostGang
from broker.jobs.monitor import AttemptMonitor, list_answering
from broker.jobs.node_health import NodeHealth, UnhealthyNodes
from broker.jobs.node_replacement import NodeReplacer
from broker.jobs.node_retention import NodeRetention
from broker.jobs.node_samples import SampleRecorder
from broker.jobs.outcome_recorder import OutcomeRecorder
from broker.jobs.outcomes import BucketOutcomes, Outcomes
from broker.jobs.policy_runner import PolicyRunner
from broker.jobs.progress import record_progress, record_silence
from broker.jobs.run_end import RunEnd, read_run_end
from broker.jobs.setup_cache import SetupCache
from broker.jobs.signs import record_signs
from broker.jobs.slots import JobQueue
from broker.jobs.successor import Successor
from broker.jobs.teardown import AttemptTeardown
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from broker.storage.mounts import add_mounts
from broker.types import Attempt, Cluster, Event, EventKind, Job, JobStatus, Outcome, OutcomeKind, make_event
from broker.wording import describe_lost_start, explain_dependency, explain_group_failure

POLL_S = 0.5
NEWS_S = 5.0  # for gangs that push updates: interval of checks that depend only on time, such as budget and lists
PIPELINE_POLL_S = 1.0
ADOPTION_POLL_S = 5.0
LIST_AGE_S_MAX = 5.0  # jobs without suspicious signals share one listing of a cloud
T = TypeVar("T")


class JobController:
    """Reconcile one job: compare its record with its cluster and program, and take one step."""

    def __init__(
        self,
        job_id: int,
        *,
        store: Store,
        provisioner: Provisioner,
        gang: Gang,
        planner: Planner,
        clock: Clock,
        config: Config,
        outcomes: Outcomes | None = None,
        queue: JobQueue | None = None,
    ) -> None:
        """Create the controller. `outcomes` reads the results of gangs that are gone, by default from their buckets."""
        self.job_id = job_id
        self._store = store
        self._provisioner = provisioner
        self._gang = gang
        self._clock = clock
        self._config = config
        self._teardown = AttemptTeardown(store, provisioner, gang, clock, config)
        self._successor = Successor(store, provisioner, clock)
        self._displacement = Displacement(store, clock, self._teardown)
        self._policy_runner = PolicyRunner(store, planner, clock, self._teardown, self._successor)
        self._limits = JobLimits(store, clock)
        self._recorder = OutcomeRecorder(job_id, store, clock, self._limits)
        self._group = GroupMember(store, gang, clock, GroupPlacement(store, planner, clock))
        self._acquisition = Acquisition(
            store, provisioner, planner, clock, self._policy_runner, self._recorder, self._limits, self._group, queue
        )
        self._replacer = NodeReplacer(store, provisioner, gang, clock)
        self._in_place = InPlace(store, provisioner, gang, clock, self._teardown, self._group)
        self._retention = NodeRetention(store, provisioner, self._acquisition, clock)
        unhealthy = UnhealthyNodes(store, clock)
        self._health = NodeHealth(store, unhealthy, provisioner, clock)
        self._lost_gang = LostGang(store, config, self._recorder, outcomes or BucketOutcomes(), unhealthy)
        self._samples = SampleRecorder(config.logs, job_id)
        self._setups = SetupCache(store, planner, clock, config)
        self._monitor: AttemptMonitor | None = None
        self._monitored = 0  # number of the attempt
        self._list_error = ""  # last reported reason why the nodes cannot be listed
        self._quiet: tuple[Cluster, int] | None = None  # cluster and run ID, while only pushed updates and time matter

    async def rest(self, wait_s: float, wake: asyncio.Event) -> None:
        """Wait between two steps: less than `wait_s` if `wake` is set, longer if the gang pushes its updates."""
        if self._quiet is not None and isinstance(self._gang, PushesNews):
            await self._gang.wait_news(*self._quiet, wake=wake, timeout_s=NEWS_S)
        else:
            await self._clock.sleep(wait_s)

    async def step(self) -> float:
        """Take one step; return the seconds until the next one, infinity once the job has ended and is cleaned up."""
        try:
            return await self._step()
        except AuthError as error:  # nodes can be neither listed nor terminated until a user acts
            self._report_list_error(error)
            raise

    async def _step(self) -> float:
        self._quiet = None
        job = self._store.jobs.get(self.job_id)
        if job is None:
            return math.inf  # a user has dropped the damaged row: the collector terminates the job's nodes
        live = next((attempt for attempt in job.attempts if attempt.ended_s is None), None)
        if live is None or live.outcome or job.status.is_terminal or job.cancel_requested:
            self._replacer.stop()
            await self._successor.stop()
        if live is None or live.kept_until_s is None or job.status.is_terminal or job.cancel_requested:
            self._in_place.stop()
        if job.status.is_terminal:
            await self._teardown.clean_up(job, live)
            return math.inf
        if job.cancel_requested:
            return await self._end(job, live, JobStatus.CANCELLED, OutcomeKind.CANCELLED, "")
        judgement = self._group.judge(job)
        if judgement.ends_job:
            return await self._end_with_group(job, live, judgement)
        return await self._advance(job, live, judgement)

    async def _advance(self, job: Job, live: Attempt | None, judgement: Judgement) -> float:
        """Take one step of a job that should continue."""
        try:
            if live is None:
                if wait_s := await self._wait_for_adoption(job) or self._wait_for_others(job):
                    return wait_s
                return await self._unless_interrupted(job, self._bring_up(job))
            if live.outcome:
                return await self._follow_up(job, live)
            if live.running_s is None:
                if breach := self._limits.find_breach(job):
                    return self._recorder.record_refusal(live, Outcome(kind=breach.kind))
                return await self._unless_interrupted(job, self._start(job, live))
            return await self._poll(job, live, judgement)
        except Interrupted:
            return 0.0

    async def _wait_for_adoption(self, job: Job) -> float:
        """Return the seconds to wait, after a restore, until all clouds are listed: an attempt may be unrecorded."""
        if job.submitted_s > self._store.meta.restored_s or self._provisioner.is_adopted():
            return 0.0
        await self._provisioner.adopt()
        return ADOPTION_POLL_S

    def _wait_for_others(self, job: Job) -> float:
        """Return the seconds to wait for the jobs that this job needs; end this job too if one of them failed."""
        for other in (self._store.jobs.get(job_id) for job_id in job.needs):
            if other is None or (other.status.is_terminal and other.status is not JobStatus.SUCCEEDED):
                status = other.status.value if other else "gone"
                failure = explain_dependency(other.id if other else None, other.name if other else "", status)
                kind = OutcomeKind.DEPENDENCY_FAILED
                return self._recorder.finish_job(job, JobStatus.CANCELLED, kind, failure) or POLL_S
            if not other.status.is_terminal:
                return PIPELINE_POLL_S
        return 0.0

    async def _bring_up(self, job: Job) -> float:
        await self._policy_runner.review_successor(job)
        attempt = await self._acquisition.begin_attempt(job)
        return await self._start(job, attempt) if isinstance(attempt, Attempt) else attempt

    async def _follow_up(self, job: Job, live: Attempt) -> float:
        """Follow up on an attempt that has ended: reuse its nodes or terminate them."""
        if live.kept_until_s is not None and self._successor.find_placement(job) is not None:
            return self._recorder.release_nodes(live)
        if live.kept_until_s is not None:
            return await self._unless_interrupted(job, self._continue_in_place(job, live))
        await self._teardown.terminate(live)
        return self._recorder.resolve_refusal(job, live)

    async def _continue_in_place(self, job: Job, live: Attempt) -> float:
        """Start the next attempt on the nodes of this one, once the gang is complete and the program has ended."""
        kept = await self._in_place.step(job, live)
        if kept is ReuseState.WAITING:
            return POLL_S
        if kept is ReuseState.GIVEN_UP:
            return self._recorder.release_nodes(live)
        return await self._start(job, self._in_place.begin_attempt(job, live))

    async def _start(self, job: Job, attempt: Attempt) -> float:
        cluster = self._store.clusters.get(attempt.cluster)
        if cluster is None:
            return self._recorder.record_takedown(attempt)
        monitor = self._get_monitor(attempt)
        try:
            task = add_mounts(job.task)
            await self._gang.prepare(cluster, task)
            lease_s = self._limits.find_lease_s(job, cluster)
            envs = self._make_envs(job, attempt, cluster)
            await self._gang.start(cluster, task, run_id=get_run_id(attempt, cluster), envs=envs, lease_s=lease_s)
        except InvalidRequestError as error:
            return self._recorder.record_refusal(attempt, Outcome(kind=OutcomeKind.REFUSED, detail=error.message))
        except CloudError as error:
            return await self._handle_failed_start(job, attempt, cluster, monitor, error)
        now_s = self._clock.now_s()
        with self._store.transaction():
            self._store.jobs.put_attempt(replace(attempt, running_s=now_s))
            if job.task.group is None:  # the program of a group's task waits for the others
                self._store.jobs.set_status(job.id, JobStatus.RUNNING)
                self._add_event(make_event(EventKind.STARTED))
        monitor.record_lease(now_s)
        return POLL_S

    async def _handle_failed_start(
        self, job: Job, attempt: Attempt, cluster: Cluster, monitor: AttemptMonitor, error: CloudError
    ) -> float:
        """Handle a failed start: replace lost nodes, retry silent ones, and refuse an attempt that cannot start."""
        cluster = await self._provisioner.refresh(cluster)
        verdict = judge_start(error, cluster, monitor, self._clock.now_s())
        if verdict is StartVerdict.LOST:
            wait_s = await self._lost_gang.record_success(job, attempt, cluster)
            if wait_s is not None:  # a killed controller had started it
                return wait_s
            return self._recorder.record_loss(attempt, describe_lost_start(error.message))
        if verdict is StartVerdict.WAIT:
            return POLL_S
        return self._recorder.record_refusal(attempt, Outcome(kind=OutcomeKind.LAUNCH_FAILED, detail=error.message))

    async def _poll(self, job: Job, attempt: Attempt, judgement: Judgement) -> float:
        cluster, monitor = self._store.clusters.get(attempt.cluster), self._get_monitor(attempt)
        if cluster is None and monitor.has_succeeded:
            return self._recorder.record_success(job, attempt)
        if cluster is None and monitor.unflushed:
            return self._recorder.record_exit(job, attempt, Verdict.FAILED, RunEnd(unflushed=monitor.unflushed))
        if cluster is None:
            return self._recorder.record_takedown(attempt)
        report = await self._gang.poll(cluster, get_run_id(attempt, cluster))
        monitor.observe(report)
        self._samples.record(report.samples)
        self._setups.report(job, attempt, report)
        self._teardown.report_flush(job.id, report)
        if report.progress is not None:
            attempt = record_progress(self._store, self._clock, job, attempt, report.progress)
        record_signs(self._store, self.job_id, monitor, report, cluster)
        refreshed = await self._refresh(monitor, report, cluster)
        if refreshed is None:  # a missing response proves nothing, and a failure is not judged without the list
            await self._renew_lease(job, monitor, cluster)
            return POLL_S
        cluster = refreshed
        await self._teardown.copy_log(attempt, cluster, is_ended=report.status.is_terminal)
        if await self._health.observe(job, cluster, report):
            return POLL_S
        nodes_min, head = job.task.recovery.nodes_min, attempt.head.rank
        signals = monitor.read_signals(report, cluster, self._clock.now_s(), nodes_min=nodes_min, head=head)
        attempt = record_silence(self._store, attempt, signals.unreachable_s)
        verdict = classify(signals)
        if verdict in (Verdict.RUNNING, Verdict.UNCLEAR):
            await self._renew_lease(job, monitor, cluster)
            if judgement.step is GroupStep.RESTART:
                end, group = self._read_end(attempt, cluster, report), self._group
                return self._recorder.record_group_restart(job, attempt, end, cause=group.name_cause(job))
            attempt = await self._group.follow(job, attempt, cluster, report)
            if reason := self._group.find_move(job, attempt):
                return self._recorder.record_group_move(job, attempt, reason=reason)
            attempt = await self._replacer.step(
                job, attempt, cluster, report, signals,
                make_envs=partial(self._make_envs, job, attempt, cluster),
                find_lease_s=partial(self._limits.find_lease_s, job, cluster),
            )  # fmt: skip
            return await self._check_running(job, attempt, cluster, monitor, report)
        if verdict is Verdict.LOST:
            return await self._lost_gang.record_loss(
                job, attempt, cluster, report, is_noticed=signals.is_noticed,
                was_attended=monitor.is_attended(self._clock.now_s()),
                find_kept_until_s=partial(self._retention.find_until_s, job, attempt, cluster, report),
            )  # fmt: skip
        run = replace(self._read_end(attempt, cluster, report), unflushed=monitor.unflushed)
        return self._recorder.record_exit(job, attempt, verdict, run)

    def _read_end(self, attempt: Attempt, cluster: Cluster, report: GangReport) -> RunEnd:
        return read_run_end(
            self._store, self._config.logs, attempt=attempt, report=report, progress=report.progress,
            is_whole=are_running(cluster.nodes) and not report.unreachable and not report.noticed,
            checkpoints=report.checkpoints,
        )  # fmt: skip

    async def _refresh(self, monitor: AttemptMonitor, report: GangReport, cluster: Cluster) -> Cluster | None:
        """Return the cluster as the cloud lists it, if a list is due; None if a required list failed."""
        if not monitor.needs_list(report, self._clock.now_s()):
            return cluster
        age_s_max = 0.0 if monitor.is_suspicious(report) else LIST_AGE_S_MAX
        answering = list_answering(report, cluster)
        try:
            cluster = await self._provisioner.refresh(cluster, age_s_max=age_s_max, answering=answering)
            self._list_error = ""
        except CloudError as error:
            if not monitor.has_succeeded:
                self._report_list_error(error)
                return None
        monitor.record_list(self._clock.now_s())
        return cluster

    async def _check_running(
        self, job: Job, attempt: Attempt, cluster: Cluster, monitor: AttemptMonitor, report: GangReport
    ) -> float:
        """Check a running attempt for limits, policy moves and stalls."""
        now_s = self._clock.now_s()
        if breach := self._limits.find_breach(job):
            is_last = breach.kind is OutcomeKind.MAX_DURATION_EXCEEDED
            if await self._teardown.end_program(attempt, cluster, grace_s=breach.grace_s, is_final=is_last):
                return 0.0  # the next poll records its success
            return self._recorder.record_breach(job, attempt, breach)
        if await self._policy_runner.reconsider(job, attempt, cluster, report.progress):
            return 0.0
        if await self._displacement.step(job, attempt, cluster):
            return 0.0
        if job.task.group is not None and attempt.released_s is None:
            return POLL_S
        recovery = job.task.recovery
        timeout_s = None if report.flush else recovery.stall_timeout_s
        if timeout_s is None or monitor.measure_stall_s(report, now_s) < timeout_s:
            # An elastic gang, or a gang with suspicious signals, is polled at the full rate.
            is_clear = not monitor.is_suspicious(report) and recovery.nodes_min is None
            self._quiet = (cluster, get_run_id(attempt, cluster)) if is_clear else None
            return POLL_S
        return self._recorder.record_stall(job, attempt, timeout_s, self._read_end(attempt, cluster, report))

    async def _end_with_group(self, job: Job, live: Attempt | None, judgement: Judgement) -> float:
        """End a job whose group has ended: another task failed, or all primary tasks succeeded."""
        if (culprit := judgement.culprit) is None:
            return await self._end(job, live, JobStatus.SUCCEEDED, OutcomeKind.GROUP_ENDED, "")
        failure = explain_group_failure(culprit.id, culprit.name, culprit.status.value)
        return await self._end(job, live, JobStatus.CANCELLED, OutcomeKind.DEPENDENCY_FAILED, failure)

    async def _end(self, job: Job, live: Attempt | None, status: JobStatus, kind: OutcomeKind, failure: str) -> float:
        """End the program and its nodes, then the job. Each step may be repeated after a crash."""
        ended = OutcomeKind.GROUP_ENDED if kind is OutcomeKind.GROUP_ENDED else OutcomeKind.CANCELLED
        if job.status is not JobStatus.CANCELLING:
            self._store.jobs.set_status(job.id, JobStatus.CANCELLING)
        await self._teardown.cancel(job, live)
        with self._store.transaction():
            if live:
                self._teardown.close(replace(live, outcome=live.outcome or Outcome(kind=ended)))
            self._recorder.finish_job(job, status, kind, failure)
        return 0.0

    async def _unless_interrupted(self, job: Job, work: Coroutine[Any, Any, T]) -> T:
        """Interrupt a long operation on a cancel request, a limit (booting nodes cost money), or the group's end."""

        def is_pointless() -> bool:
            return (
                self._store.jobs.is_cancel_requested(self.job_id)
                or self._limits.find_breach(job) is not None
                or self._group.judge(job).ends_job
            )

        return await run_unless(work, is_pointless=is_pointless, clock=self._clock, look_s=POLL_S)

    async def _renew_lease(self, job: Job, monitor: AttemptMonitor, cluster: Cluster) -> None:
        if not monitor.needs_lease(self._clock.now_s()):
            return
        try:
            await self._gang.renew_lease(cluster, lease_s=self._limits.find_lease_s(job, cluster))
        except CloudError:
            return  # retried at the next step; the lease outlasts several renewals
        monitor.record_lease(self._clock.now_s())

    def _get_monitor(self, attempt: Attempt) -> AttemptMonitor:
        if self._monitor is None or self._monitored != attempt.number:
            self._monitor = AttemptMonitor(attempt.cluster, silent_s=attempt.silent_s)
            self._monitored = attempt.number
        return self._monitor

    def _make_envs(self, job: Job, attempt: Attempt, cluster: Cluster) -> dict[str, str]:
        advice = {**self._policy_runner.advise(job.task, attempt), **self._group.make_envs(job)}
        advice |= {**self._health.make_envs(job, cluster), **self._setups.make_envs(job, attempt, cluster)}
        find, members = self._store.jobs.get, self._store.jobs.list_pipeline(job.pipeline) if job.pipeline else ()
        return make_envs(self._config, job, attempt, cluster, advice=advice, find_job=find, members=members)

    def _report_list_error(self, error: CloudError) -> None:
        """Report each login error once, with its remedy: only the user can fix it, whereas others are temporary."""
        if isinstance(error, AuthError) and error.message != self._list_error:
            self._list_error = error.message
            hint = error.hints[0] if error.hints else ""
            self._add_event(make_event(EventKind.UNSEEN, error=error.message, hint=hint))

    def _add_event(self, event: Event) -> None:
        self._store.events.add(event, job_id=self.job_id)
