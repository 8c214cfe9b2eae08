"""The queue of jobs under `max_live_jobs` and the limits of projects: read from the store, decided by `queueing.py`.

A slot is a status: a job that is neither PENDING nor ended has one. A slot is taken in a transaction that counts them,
so that any number of controllers respects the limit; a job returns its slot when it ends, or when clouds refuse its
first machines and it becomes PENDING again. A job group has one slot. Replicas of services neither need nor take slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from broker.clock import Clock
from broker.frozen import frozen
from broker.jobs.checkpoints import keeps_its_own
from broker.jobs.displacement import take_slot
from broker.jobs.displacing import Holder
from broker.jobs.queueing import GPUS_MIN, Waiting, list_startable, order_queue
from broker.jobs.slot_limits import SlotLimits
from broker.state.events import EventRow
from broker.state.jobs import REPLICA_REQUEST
from broker.state.people import Owned
from broker.state.queue import LiveJob
from broker.state.store import Store
from broker.types import EventKind, Job, JobStatus, JobWait, WaitReason, make_event

POLL_S = 2.0  # until the first job in the queue checks again; later ones wait longer
POLL_S_MAX = 10.0
AGE_S_MAX = 1.0  # maximum age of a snapshot that jobs share
USAGE_AGE_S_MAX = 60.0
USAGE_DAYS = 7.0
EXPLAINED_MAX = 10  # number of newest jobs, if there is no limit
IDS_MAX = 10_000  # per query: databases limit the number of parameters


@frozen
class _Facts:
    """Facts about a job that never change. `unit` is its job group or the job itself; None for a service's replica."""

    unit: str | None
    priority: int
    gpus: float
    keeps_its_own: bool = False  # it saves in a mounted bucket, so it reports no checkpoint


_UNKNOWN = _Facts(unit=None, priority=0, gpus=0.0)  # damaged, or dropped in the meantime: it does not block other jobs


@frozen
class _Snapshot:
    """The queue at one time: the position of each waiting unit, from 1, and the units with slots.

    `others` are jobs that wait for something else. A unit may start if it is in `startable`; that remains true when the
    units before it have taken their slots. `projects` are the projects of the waiting units.
    """

    time_s: float
    positions: Mapping[str, int]
    held: frozenset[str]
    others: Mapping[int, JobWait]
    startable: frozenset[str]
    projects: Mapping[str, str]
    leading: frozenset[int]  # waiting jobs; of a job group only the first, which acts for the group

    def knows(self, job_id: int, unit: str) -> bool:
        """Return whether the job had been submitted when this was read."""
        return unit in self.positions or unit in self.held or job_id in self.others

    def explain(self, job_id: int, unit: str | None, limits: SlotLimits) -> JobWait:
        """Return the reason why a PENDING job waits."""
        if job_id in self.others:
            return self.others[job_id]
        position = None if unit is None else self.positions.get(unit)
        if unit is None or position is None or unit in self.startable:
            return JobWait(reason=WaitReason.START)
        project = self.projects.get(unit, "")
        own = project if project in limits.by_project else ""
        return JobWait(reason=WaitReason.LIMIT, position=position, limit=limits.find(project), project=own)


class JobQueue:
    """Admit waiting jobs to the slots; shared by the controllers of a process. Without a limit, every job starts."""

    def __init__(self, store: Store, clock: Clock, *, read_limits: Callable[[], SlotLimits]) -> None:
        self._store = store
        self._clock = clock
        self._read_limits = read_limits
        self._facts: dict[int, _Facts] = {}
        self._snapshot: _Snapshot | None = None
        self._reported: set[int] = set()  # jobs whose wait is recorded
        self._usage: tuple[float, Mapping[str, float]] = (-math.inf, {})

    def admit(self, job: Job) -> float:
        """Take a slot for a PENDING job, which makes it STARTING, and return 0; otherwise return seconds to wait.

        Jobs with any other status already have a slot: return 0. Raises StateError, FencedError.
        """
        if job.displaced_by is not None:
            return self._return_slot(job)
        limits = self._read_limits()
        if not limits.is_set or job.status is not JobStatus.PENDING:
            return 0.0
        unit = self._find_facts(job.id).unit
        if unit is None:
            return 0.0
        snapshot = self._get_snapshot(limits)
        if not snapshot.knows(job.id, unit):
            snapshot = self._snapshot = self._read(limits, self._clock.now_s())
        if (unit in snapshot.held or unit in snapshot.startable) and self._take(job.id, unit, limits):
            self._reported.discard(job.id)
            return 0.0
        position = snapshot.positions.get(unit)
        if position is None:
            return POLL_S
        wait = snapshot.explain(job.id, unit, limits)
        self._report_wait(job, wait)
        if limits.preempt_after_s is not None and job.id in snapshot.leading and wait.position is not None:
            after_s = limits.preempt_after_s
            take_slot(self._store, self._clock, job, wait, self._list_holders, after_s=after_s)
        return min(POLL_S_MAX, POLL_S + 0.01 * position)

    def _return_slot(self, job: Job) -> float:
        """Make a displaced job, whose machines are gone, PENDING again; it keeps its position in the queue."""
        assert job.displaced_by is not None
        with self._store.transaction():
            self._store.jobs.set_status(job.id, JobStatus.PENDING)
            self._store.queue.end_displacement(job.id)
            self._store.events.add(make_event(EventKind.SLOT_RETURNED, by=job.displaced_by), job_id=job.id)
        self._snapshot = None  # outdated
        return POLL_S

    def _list_holders(self) -> Sequence[Holder]:
        """Return the jobs with slots that may be returned: not job groups or replicas of services."""
        projects = self._read_projects()
        return [
            Holder(
                job_id=each.id, priority=facts.priority, project=projects.get(each.id, ""),
                is_preemptible=each.status is JobStatus.RUNNING and not each.is_cancelled and facts.unit == str(each.id)
                and (each.has_checkpoint or facts.keeps_its_own),
                displaced_by=each.displaced_by, displaced_s=each.displaced_s,
            )
            for each in self._store.queue.list_running() for facts in [self._find_facts(each.id)]
        ]  # fmt: skip

    def _take(self, job_id: int, unit: str, limits: SlotLimits) -> bool:
        """Take a slot if one is free; return whether the job has one."""
        with self._store.transaction():
            projects = self._read_projects() if limits.by_project else {}
            held = self._list_units_with_slots(self._store.queue.list_live(has_started=True), projects)
            next_one = {unit: projects.get(job_id, "")}
            if unit in held or list_startable(next_one, held, total=limits.total, by_project=limits.by_project):
                return self._store.jobs.set_status(job_id, JobStatus.STARTING)
        self._snapshot = None  # outdated
        return False

    def explain(self, wanted: Collection[int]) -> Mapping[int, JobWait]:
        """Return the reasons why the PENDING jobs among these wait, by ID. Only reads.

        Without a limit, positions are not needed, and only the newest jobs are examined.
        """
        limits = self._read_limits()
        if not limits.is_set:
            return self._explain_newest(sorted(wanted)[-EXPLAINED_MAX:])
        snapshot = self._get_snapshot(limits)
        return {
            each.id: snapshot.explain(each.id, self._find_facts(each.id).unit, limits)
            for each in self._store.queue.list_live()
            if each.id in wanted and each.status is JobStatus.PENDING and not each.is_cancelled
        }

    def _explain_newest(self, job_ids: Sequence[int]) -> Mapping[int, JobWait]:
        found = [job for job_id in job_ids if (job := self._store.jobs.get(job_id)) is not None]
        pending = [job for job in found if job.status is JobStatus.PENDING and not job.cancel_requested]
        needs = (self._store.jobs.get(job_id) for job_id in {need for job in pending for need in job.needs})
        live_ids = {each.id for each in needs if each is not None and not each.status.is_terminal}
        others = self._list_other_waits(pending, live_ids, self._clock.now_s())
        return {job.id: others.get(job.id, JobWait(reason=WaitReason.START)) for job in pending}

    def _report_wait(self, job: Job, wait: JobWait) -> None:
        """Record once per wait that the job waits; `explain` returns its position at any time."""
        if job.id in self._reported or wait.position is None:
            return
        self._reported.add(job.id)
        newest = self._store.events.list_newest([job.id]).get(job.id)
        if newest is None or newest.kind is not EventKind.QUEUED:
            whose = {"project": wait.project} if wait.project else {}
            event = make_event(EventKind.QUEUED, position=wait.position, limit=wait.limit, **whose)
            self._store.events.add(event, job_id=job.id)

    def _get_snapshot(self, limits: SlotLimits) -> _Snapshot:
        """Return the queue, reading it again unless it was read a moment ago."""
        now_s = self._clock.now_s()
        if self._snapshot is None or not 0.0 <= now_s - self._snapshot.time_s < AGE_S_MAX:
            self._snapshot = self._read(limits, now_s)
        return self._snapshot

    def _read(self, limits: SlotLimits, now_s: float) -> _Snapshot:
        live = self._store.queue.list_live()
        live_ids = {each.id for each in live}
        self._facts = {job_id: facts for job_id, facts in self._facts.items() if job_id in live_ids}
        pending = [each for each in live if each.status is JobStatus.PENDING and not each.is_cancelled]
        projects = self._read_projects()
        held = self._list_units_with_slots(live, projects)
        others = self._list_other_waits(pending, live_ids, now_s)
        waiting: list[Waiting] = []
        units: dict[int, str] = {}
        seen: set[str] = set()
        for each in pending:
            facts = self._find_facts(each.id)
            if each.id in others or facts.unit is None or facts.unit in held or facts.unit in seen:
                continue
            seen.add(facts.unit)
            units[each.id] = facts.unit
            waiting.append(
                Waiting(
                    job_id=each.id, priority=facts.priority, project=projects.get(each.id, ""), gpus=facts.gpus,
                    submitted_s=each.submitted_s,
                )
            )  # fmt: skip
        order = order_queue(waiting, self._read_usage(projects, now_s))
        ordered = {units[job_id]: projects.get(job_id, "") for job_id in order}
        startable = list_startable(ordered, held, total=limits.total, by_project=limits.by_project)
        return _Snapshot(
            time_s=now_s, positions={unit: index for index, unit in enumerate(ordered, 1)}, held=frozenset(held),
            others=others, startable=startable, projects=ordered, leading=frozenset(order),
        )  # fmt: skip

    def _list_other_waits(
        self, pending: Sequence[LiveJob | Job], live_ids: set[int], now_s: float
    ) -> Mapping[int, JobWait]:
        """Return the jobs that cannot use a slot now: they depend on others, or wait to retry clouds."""
        waits = {each.id: JobWait(reason=WaitReason.NEEDS) for each in pending if live_ids & set(each.needs)}
        job_ids = [each.id for each in pending if each.id not in waits]
        newest: dict[int, EventRow] = {}
        for begin in range(0, len(job_ids), IDS_MAX):
            newest.update(self._store.events.list_newest(job_ids[begin : begin + IDS_MAX]))
        for job_id, event in newest.items():
            wait_s = event.data.get("wait_s")
            if event.kind is not EventKind.WAITING or not isinstance(wait_s, int | float):
                continue
            if event.time_s <= now_s < event.time_s + wait_s:
                waits[job_id] = JobWait(reason=WaitReason.CAPACITY, until_s=event.time_s + wait_s)
        return waits

    def _list_units_with_slots(self, live: Sequence[LiveJob], projects: Mapping[int, str]) -> Mapping[str, str]:
        """Return the project of each unit that has a slot."""
        holders = ((self._find_facts(each.id).unit, each.id) for each in live if each.status is not JobStatus.PENDING)
        return {unit: projects.get(job_id, "") for unit, job_id in holders if unit is not None}

    def _find_facts(self, job_id: int) -> _Facts:
        if job_id not in self._facts:
            self._read_facts(job_id)
        return self._facts.get(job_id, _UNKNOWN)

    def _read_facts(self, first_id: int) -> None:
        """Read the unchanging facts about live jobs, starting at this ID."""
        for each in self._store.queue.list_tasks(first_id):
            task = each.task
            unit: str | None = str(each.id) if task.group is None else f"group {each.pipeline}"
            if (each.request_id or "").startswith(REPLICA_REQUEST):
                unit = None
            gpus = task.num_nodes * task.resources[0].accelerator_count
            self._facts[each.id] = _Facts(
                unit=unit, priority=task.priority, gpus=gpus, keeps_its_own=keeps_its_own(task)
            )

    def _read_projects(self) -> Mapping[int, str]:
        """Return the project of each job that a server admitted for a project."""
        return {
            int(name): each.project
            for each in self._store.commitments.list() if each.kind is Owned.JOB
            for name in each.names if name.isdigit()
        }  # fmt: skip

    def _read_usage(self, projects: Mapping[int, str], now_s: float) -> Mapping[str, float]:
        """Return the GPU-hours of each project in the last USAGE_DAYS. Without projects, read nothing."""
        if not projects:
            return {}
        read_s, usage = self._usage
        if 0.0 <= now_s - read_s < USAGE_AGE_S_MAX:
            return usage
        since_s = now_s - USAGE_DAYS * 86400.0
        found: dict[str, float] = {}
        for attempt in self._store.queue.list_recent_attempts(since_s):
            end_s = now_s if attempt.ended_s is None else attempt.ended_s
            gpus = attempt.placement.node_count * attempt.placement.offer.accelerator_count
            hours = max(0.0, end_s - max(since_s, attempt.started_s)) / 3600
            project = projects.get(attempt.job_id, "")
            found[project] = found.get(project, 0.0) + max(GPUS_MIN, gpus) * hours
        self._usage = now_s, found
        return found
