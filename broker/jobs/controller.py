"""One managed job: compares what the store wants with what cloud and gang show, and takes one step.

All it must know is in the store: a new controller continues where a killed one stopped. An attempt moves
up -> (running) -> outcome set -> nodes confirmed gone -> ended; the next one starts only after that.
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
from broker.errors import (
    AuthError,
    CloudError,
    InvalidRequestError,
    UnreachedError,
)
from broker.jobs.acquisition import Acquisition, Planner
from broker.jobs.allowance import find_lease_s
from broker.jobs.budget import find_overspending
from broker.jobs.burial import Undertaker
from broker.jobs.endings import NOT_STARTED_OUTCOME, OVERSPENT_OUTCOME, REFUSED_OUTCOME, STALLED_OUTCOME, Endings
from broker.jobs.environment import make_envs
from broker.jobs.gang import Gang, GangReport, HearsNews, get_run_id
from broker.jobs.in_place import InPlace, Kept, are_running
from broker.jobs.judgement import Verdict, judge, list_lost_ranks
from broker.jobs.keeping import Keeping
from broker.jobs.lost_gang import LostGang
from broker.jobs.mending import Mender
from broker.jobs.order import get_recovery
from broker.jobs.outcomes import BucketOutcomes, Outcomes
from broker.jobs.pilot import Pilot
from broker.jobs.run_end import RunEnd, read_run_end
from broker.jobs.watch import Watch, list_answering
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from broker.storage.mounts import add_mounts
from broker.types import Attempt, Cluster, Job, JobStatus, Progress

POLL_S = 0.5
NEWS_S = 5.0  # where the gang tells of news by itself: for what time alone changes, such as budget and lists
PIPELINE_POLL_S = 1.0
ADOPTION_POLL_S = 5.0
LIST_AGE_S_MAX = 5.0  # where nothing is amiss, jobs share their looks at a cloud
BOOT_S_MAX = 420.0  # large GPU machines and images take minutes until somebody answers
GRACE_S = 30.0  # for a program that is stopped at its budget
T = TypeVar("T")


class _Interrupted(Exception):
    """While something long was under way, the user asked for the end, or the money ran out."""


class JobController:
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
    ) -> None:
        """`outcomes`: of gangs that are gone; None reads them from their buckets."""
        self.job_id = job_id
        self._store = store
        self._provisioner = provisioner
        self._gang = gang
        self._clock = clock
        self._config = config
        self._undertaker = Undertaker(store, provisioner, gang, clock, config)
        self._pilot = Pilot(store, planner, clock, self._undertaker)
        self._endings = Endings(job_id, store, clock)
        self._acquisition = Acquisition(store, provisioner, planner, clock, self._pilot, self._endings)
        self._mender = Mender(store, provisioner, gang, clock)
        self._in_place = InPlace(store, provisioner, gang, clock, self._undertaker)
        self._keeping = Keeping(store, provisioner, self._acquisition, clock)
        self._lost_gang = LostGang(store, config, self._endings, outcomes or BucketOutcomes())
        self._watch: Watch | None = None
        self._watched = 0  # number of the attempt
        self._blind_to = ""  # why lists tell nothing of its nodes, as last told
        self._quiet: tuple[Cluster, int] | None = None  # runs, with this id, and only news or time changes what to do

    async def rest(self, wait_s: float, wake: asyncio.Event) -> None:
        """Between two steps: less than `wait_s` when `wake` is set, longer where the gang itself tells of news."""
        if self._quiet is not None and isinstance(self._gang, HearsNews):
            cluster, run_id = self._quiet
            await self._gang.wait_news(cluster, run_id, wake=wake, timeout_s=NEWS_S)
        else:
            await self._clock.sleep(wait_s)

    async def step(self) -> float:
        """Seconds until the next step is wished; infinity when the job has ended and nothing of it is left."""
        self._quiet = None
        job = self._store.get_job(self.job_id)
        if job is None:
            return math.inf  # a user has dropped its damaged row: the collector ends what it left
        live = next((attempt for attempt in job.attempts if attempt.ended_s is None), None)
        if live is None or live.outcome or job.status.is_terminal or job.cancel_requested:
            self._mender.stop()
        if live is None or live.kept_until_s is None or job.status.is_terminal or job.cancel_requested:
            self._in_place.stop()
        if job.status.is_terminal:
            await self._undertaker.clean_up(job, live)
            return math.inf
        if job.cancel_requested:
            return await self._cancel(job, live)
        try:
            if live is None:
                if wait_s := await self._wait_for_adoption(job) or self._wait_for_others(job):
                    return wait_s
                return await self._until_unwanted(job, self._bring_up(job))
            if live.outcome:
                return await self._follow(job, live)
            if live.running_s is None:
                if find_overspending(job, self._store, self._clock):
                    return self._endings.refuse(live, OVERSPENT_OUTCOME)
                return await self._until_unwanted(job, self._start(job, live))
            return await self._look(job, live)
        except _Interrupted:
            return 0.0

    async def _wait_for_adoption(self, job: Job) -> float:
        """Seconds to wait, after a restore, until all clouds were asked: an attempt that is not recorded may run."""
        if job.submitted_s > self._store.restored_s or self._provisioner.is_adopted():
            return 0.0
        await self._provisioner.adopt()
        return ADOPTION_POLL_S

    def _wait_for_others(self, job: Job) -> float:
        """Seconds to wait for the jobs it needs; one that did not succeed ends this one too."""
        for other in (self._store.get_job(job_id) for job_id in job.needs):
            if other is None or (other.status.is_terminal and other.status is not JobStatus.SUCCEEDED):
                status = other.status.value if other else "gone"
                name = f"job {other.id} ({other.name})" if other else "a job"
                return self._endings.finish(job, JobStatus.CANCELLED, f"{name}, which it needs, is {status}") or POLL_S
            if not other.status.is_terminal:
                return PIPELINE_POLL_S
        return 0.0

    async def _bring_up(self, job: Job) -> float:
        attempt = await self._acquisition.begin_attempt(job)
        return await self._start(job, attempt) if isinstance(attempt, Attempt) else attempt

    async def _follow(self, job: Job, live: Attempt) -> float:
        """What comes after an attempt that has ended."""
        if live.kept_until_s is not None:
            return await self._until_unwanted(job, self._continue_in_place(job, live))
        await self._undertaker.bury(live)
        return self._endings.conclude_unstarted(job, live)

    async def _continue_in_place(self, job: Job, live: Attempt) -> float:
        """The next attempt on the nodes of this one, once they are whole and its program has ended."""
        kept = await self._in_place.look(job, live)
        if kept is Kept.WAITING:
            return POLL_S
        if kept is Kept.GIVEN_UP:
            return self._endings.give_up_nodes(live)
        return await self._start(job, self._in_place.begin_attempt(job, live))

    async def _start(self, job: Job, attempt: Attempt) -> float:
        cluster = self._store.get_cluster(attempt.cluster)
        if cluster is None:
            return self._endings.lose(attempt, "its cluster was taken down")
        watch = self._get_watch(attempt)
        try:
            task = add_mounts(job.task)
            await self._gang.prepare(cluster, task)
            lease_s = find_lease_s(job, cluster, self._store, self._clock)
            envs = self._make_envs(job, attempt, cluster)
            await self._gang.start(cluster, task, run_id=get_run_id(attempt, cluster), envs=envs, lease_s=lease_s)
        except InvalidRequestError as error:
            return self._endings.refuse(attempt, f"{REFUSED_OUTCOME}: {error.message}")
        except CloudError as error:
            return await self._judge_start(job, attempt, cluster, watch, error)
        now_s = self._clock.now_s()
        with self._store.transaction():
            self._store.put_attempt(replace(attempt, running_s=now_s))
            self._store.set_job_status(job.id, JobStatus.RUNNING)
            self._tell("started", "the program was started")
        watch.note_lease(now_s)
        return POLL_S

    async def _judge_start(
        self, job: Job, attempt: Attempt, cluster: Cluster, watch: Watch, error: CloudError
    ) -> float:
        """Lost nodes are replaced; a start that fails on cluster after cluster is not the cluster's fault."""
        cluster = await self._provisioner.refresh(cluster)
        if list_lost_ranks(cluster.nodes):
            wait_s = await self._lost_gang.conclude_success(job, attempt, cluster)
            if wait_s is not None:  # a process that died had started it
                return wait_s
            return self._endings.lose(attempt, f"lost while starting: {error.message}")
        now_s = self._clock.now_s()
        is_silent = watch.note_silence(now_s)
        # Not from the start of the attempt, which is that of the search: a long search must not use up the boot.
        is_booting = isinstance(error, UnreachedError) and watch.measure_boot_s(error.node_id, now_s) < BOOT_S_MAX
        if is_booting or not is_silent:
            return POLL_S
        return self._endings.refuse(attempt, f"{NOT_STARTED_OUTCOME}: {error.message}")

    async def _look(self, job: Job, attempt: Attempt) -> float:
        cluster, watch = self._store.get_cluster(attempt.cluster), self._get_watch(attempt)
        if cluster is None and watch.has_succeeded:
            return self._endings.end(job, attempt, JobStatus.SUCCEEDED, "succeeded", "")
        if cluster is None and watch.unflushed:
            return self._endings.conclude(job, attempt, Verdict.FAILED, RunEnd(unflushed=watch.unflushed))
        if cluster is None:
            return self._endings.lose(attempt, "its cluster was taken down")
        report = await self._gang.poll(cluster, get_run_id(attempt, cluster))
        watch.hear(report)
        self._undertaker.note_flush(job.id, report)
        if report.progress is not None and report.progress != job.progress:
            attempt = self._note_progress(job, attempt, report.progress)
        for rank in watch.take_advised(report, cluster):
            self._tell("advised", f"the cloud expects to take node {rank} sooner than usual")
        refreshed = await self._refresh(watch, report, cluster)
        if refreshed is None:  # no answer is no evidence, and a failure is not judged without the list
            await self._renew_lease(job, watch, cluster)
            return POLL_S
        cluster = refreshed
        await self._undertaker.copy_log(attempt, cluster)
        nodes_min = get_recovery(job.task).nodes_min
        signs = watch.read_signs(report, cluster, self._clock.now_s(), nodes_min=nodes_min)
        verdict = judge(signs)
        if verdict in (Verdict.RUNNING, Verdict.UNCLEAR):
            await self._renew_lease(job, watch, cluster)
            find_envs = partial(self._make_envs, job, attempt, cluster)
            find_lease = partial(find_lease_s, job, cluster, self._store, self._clock)
            run_id = get_run_id(attempt, cluster)
            await self._mender.look(job, cluster, report, run_id=run_id, make_envs=find_envs, find_lease_s=find_lease)
            return await self._look_closer(job, attempt, cluster, watch, report)
        if verdict is Verdict.LOST:
            was_attended = watch.is_attended(self._clock.now_s())
            return await self._lost_gang.conclude(
                job,
                attempt,
                cluster,
                report,
                is_noticed=signs.is_noticed,
                was_attended=was_attended,
                find_kept_until_s=partial(self._keeping.find_until_s, job, attempt, cluster, report),
            )
        run = replace(self._read_end(attempt, cluster, report), unflushed=watch.unflushed)
        return self._endings.conclude(job, attempt, verdict, run)

    def _read_end(self, attempt: Attempt, cluster: Cluster, report: GangReport) -> RunEnd:
        return read_run_end(
            self._store,
            self._config.logs,
            attempt=attempt,
            told=report,
            progress=report.progress,
            is_whole=are_running(cluster.nodes) and not report.unreachable,
        )

    async def _refresh(self, watch: Watch, report: GangReport, cluster: Cluster) -> Cluster | None:
        """As the cloud lists it now, where it is time to look; None where a list that is needed tells nothing."""
        if not watch.needs_list(report, self._clock.now_s()):
            return cluster
        age_s_max = 0.0 if watch.is_suspicious(report) else LIST_AGE_S_MAX
        answering = list_answering(report, cluster)
        try:
            cluster = await self._provisioner.refresh(cluster, age_s_max=age_s_max, answering=answering)
            self._blind_to = ""
        except CloudError as error:
            if not watch.has_succeeded:
                self._tell_blind(error)
                return None
        watch.note_list(self._clock.now_s())
        return cluster

    async def _look_closer(
        self, job: Job, attempt: Attempt, cluster: Cluster, watch: Watch, report: GangReport
    ) -> float:
        """It runs: but does it get anywhere, and is there money left?"""
        now_s = self._clock.now_s()
        if failure := find_overspending(job, self._store, self._clock):
            await self._undertaker.end_program(attempt, cluster, grace_s=GRACE_S)
            return self._endings.end(job, attempt, JobStatus.FAILED, OVERSPENT_OUTCOME, failure)
        if await self._pilot.reconsider(job, attempt, cluster, report.progress):
            return 0.0
        recovery = get_recovery(job.task)
        timeout_s = None if report.flush else recovery.stall_timeout_s
        if timeout_s is None or watch.measure_stall_s(report, now_s) < timeout_s:
            # A gang that is being mended, or whose signs are not clear, is looked at closely.
            is_clear = not watch.is_suspicious(report) and recovery.nodes_min is None
            self._quiet = (cluster, get_run_id(attempt, cluster)) if is_clear else None
            return POLL_S
        what = f"no new step for {timeout_s:g} s"
        return self._endings.repeat(job, attempt, STALLED_OUTCOME, what, self._read_end(attempt, cluster, report))

    def _note_progress(self, job: Job, attempt: Attempt, progress: Progress) -> Attempt:
        """The first step of an attempt ends its recovery: that is when work goes on."""
        now_s = self._clock.now_s()
        with self._store.transaction(is_durable=False):  # what a power cut takes is seen again
            self._store.set_progress(job.id, progress)
            if attempt.resumed_s is not None or not self._is_new_step(attempt, progress):
                return attempt
            attempt = replace(attempt, resumed_s=now_s)
            self._store.put_attempt(attempt)
            lost_s = next((old.lost_s for old in reversed(job.attempts) if old.number < attempt.number), None)
            if lost_s is not None:
                took = f" came {now_s - lost_s:.1f} s after the loss" if now_s >= lost_s else ""  # or the clock was set
                self._tell("recovered", f"recovered: step {progress.step}{took}")
        return attempt

    def _is_new_step(self, attempt: Attempt, progress: Progress) -> bool:
        """A program that has just restored, or started from nothing, reports a step that is no new one."""
        first_step = self._store.list_steps(attempt.job_id)[attempt.number].first_step
        return progress.step > 0 and progress.step > min(
            first_step, progress.checkpoint_step if progress.checkpoint_step is not None else -1
        )

    async def _cancel(self, job: Job, live: Attempt | None) -> float:
        if job.status is not JobStatus.CANCELLING:
            self._store.set_job_status(job.id, JobStatus.CANCELLING)
        await self._undertaker.cancel(job, live)
        with self._store.transaction():
            if live:
                self._undertaker.close(replace(live, outcome=live.outcome or "cancelled"))
            self._endings.finish(job, JobStatus.CANCELLED, "")
        return 0.0

    async def _until_unwanted(self, job: Job, work: Coroutine[Any, Any, T]) -> T:
        """Give up long work when a cancel is asked for, or when nodes that only boot have used up the budget.

        What it leaves half done is found by its intents.
        """
        doing = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._wait_until_unwanted(job))
        try:
            await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise _Interrupted
            return doing.result()
        finally:
            doing.cancel()
            watching.cancel()
            await asyncio.gather(doing, watching, return_exceptions=True)

    async def _wait_until_unwanted(self, job: Job) -> None:
        while not self._store.is_cancel_requested(self.job_id) and not find_overspending(job, self._store, self._clock):
            await self._clock.sleep(POLL_S)

    async def _renew_lease(self, job: Job, watch: Watch, cluster: Cluster) -> None:
        if not watch.needs_lease(self._clock.now_s()):
            return
        try:
            await self._gang.renew_lease(cluster, lease_s=find_lease_s(job, cluster, self._store, self._clock))
        except CloudError:
            return  # tried again at the next step; the lease holds for many of them
        watch.note_lease(self._clock.now_s())

    def _get_watch(self, attempt: Attempt) -> Watch:
        if self._watch is None or self._watched != attempt.number:
            self._watch, self._watched = Watch(attempt.cluster), attempt.number
        return self._watch

    def _make_envs(self, job: Job, attempt: Attempt, cluster: Cluster) -> dict[str, str]:
        return make_envs(self._config, job, attempt, cluster, advice=self._pilot.advise(job.task, attempt))

    def _tell_blind(self, error: CloudError) -> None:
        """Once for each reason that only the user can mend; what passes by itself is no news."""
        if isinstance(error, AuthError) and error.message != self._blind_to:
            self._blind_to = error.message
            self._tell("unseen", f"its nodes cannot be looked at: {error.message}")

    def _tell(self, kind: str, message: str) -> None:
        self._store.add_event(kind, message, job_id=self.job_id)
