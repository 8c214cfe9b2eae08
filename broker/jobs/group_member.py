"""Act for one job of a job group: hold back its program, send it the addresses, restart and move it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from broker.clock import Clock
from broker.errors import CloudError
from broker.jobs.gang import Gang, GangReport, get_run_id
from broker.jobs.group_placement import GroupPlacement
from broker.jobs.groups import (
    Judgement,
    find_generation,
    find_live,
    get_role,
    judge,
    list_addresses,
    may_start,
)
from broker.jobs.monitor import is_due
from broker.state.store import Store
from broker.types import Attempt, Cluster, Event, EventKind, Job, JobStatus, OutcomeKind, Plan, make_event

MOVE_POLL_S = 15.0  # planning for the whole group takes a while
RESEND_S = 5.0  # after nodes did not accept the addresses


class GroupMember:
    """One job's part in its group. For a job without a group, the methods have no effect."""

    def __init__(self, store: Store, gang: Gang, clock: Clock, placement: GroupPlacement) -> None:
        self._store = store
        self._gang = gang
        self._clock = clock
        self._placement = placement
        self._sent: tuple[int, frozenset[str], str] | None = None  # attempt, its nodes, and the addresses sent to them
        self._refused_s = float("-inf")
        self._looked_s = float("-inf")

    def judge(self, job: Job) -> Judgement:
        """Return the current effect of the group on this job, from the records of all its jobs."""
        if job.task.group is None:
            return Judgement()
        return judge(job, self._read(job), self._clock.now_s())

    def place(self, job: Job, plan: Plan) -> Plan:
        """Return the plan with the placements near the other tasks."""
        return plan if job.task.group is None else self._placement.place(job, self._read(job), plan)

    def find_generation(self, job: Job) -> int:
        """Return the generation of a new attempt of this job; 1 without a group."""
        return 1 if job.task.group is None else find_generation(self._read(job))

    def name_cause(self, job: Job) -> str:
        """Return the task whose loss restarts the group; empty if it is unknown."""
        live = find_live(job)
        generation = live.generation if live else 0
        lost = [
            (each.lost_s or 0.0, member.name)
            for member in self._read(job)
            for each in member.attempts
            if member.id != job.id and each.generation == generation and each.released_s is not None
            if each.outcome is not None and (get_role(member).may_restart_group or _has_moved(each))
        ]
        return min(lost, default=(0.0, ""))[1]

    def make_envs(self, job: Job) -> Mapping[str, str]:
        """Return the variables that do not change during the job."""
        if job.task.group is None:
            return {}
        tasks = [member.name for member in self._read(job)]
        return {
            "SKYPILOT_JOBGROUP_NAME": job.task.group.name,
            "BROKER_GROUP_NAME": job.task.group.name,
            "BROKER_GROUP_TASK": job.name,
            "BROKER_GROUP_TASKS": "\n".join(tasks),
        }

    def find_move(self, job: Job, attempt: Attempt) -> str:
        """Return the reason to release the job's nodes so that the group can continue elsewhere; empty to stay."""
        if job.task.group is None or not is_due(self._looked_s, MOVE_POLL_S, self._clock.now_s()):
            return ""
        self._looked_s = self._clock.now_s()
        return self._placement.find_move(job, self._read(job), attempt)

    async def follow(self, job: Job, attempt: Attempt, cluster: Cluster, report: GangReport) -> Attempt:
        """Record the gang's report, release its program once the group is up, and send changed addresses."""
        if job.task.group is None:
            return attempt
        attempt = self._record(job, self._read(job), attempt, report)
        if attempt.released_s is not None:
            await self._send(job, self._read(job), attempt, cluster)
        return attempt

    def _record(self, job: Job, members: Sequence[Job], attempt: Attempt, report: GangReport) -> Attempt:
        """Commit that the gang is set up, and then that its program may start; both facts never change."""
        now_s, name = self._clock.now_s(), get_role(job).name
        generation = find_generation(members)
        if attempt.released_s is None and attempt.generation < generation:
            attempt = self._put(replace(attempt, generation=generation))  # its program has not started: no restart
            members = self._read(job)
        if attempt.ready_s is None and report.is_ready:
            waiting = [each.name for each in members if each.id != job.id and not _is_ready(each, generation)]
            event = make_event(EventKind.GROUP_READY, group=name, waiting=waiting)
            attempt = self._put(replace(attempt, ready_s=now_s, port=report.port), event)
            members = self._read(job)
        if attempt.ready_s is not None and attempt.released_s is None and may_start(members, attempt.generation):
            event = make_event(EventKind.GROUP_STARTED, group=name, generation=attempt.generation)
            with self._store.transaction():
                attempt = self._put(replace(attempt, released_s=now_s), event)
                self._store.jobs.set_status(job.id, JobStatus.RUNNING)
        return attempt

    def _put(self, attempt: Attempt, event: Event | None = None) -> Attempt:
        with self._store.transaction():
            self._store.jobs.put_attempt(attempt)
            if event is not None:
                self._store.events.add(event, job_id=attempt.job_id)
        return attempt

    async def _send(self, job: Job, members: Sequence[Job], attempt: Attempt, cluster: Cluster) -> None:
        """Send the addresses to nodes that do not have them; the first time, this starts the program."""
        peers = describe_peers(job, members, self._store.clusters.get)
        sent = (attempt.number, frozenset(node.id for node in cluster.nodes), json.dumps(peers, sort_keys=True))
        now_s = self._clock.now_s()
        if sent == self._sent or not is_due(self._refused_s, RESEND_S, now_s):
            return
        try:
            await self._gang.send_peers(cluster, get_run_id(attempt, cluster), peers)
            self._sent = sent
        except CloudError:
            self._refused_s = now_s

    def _read(self, job: Job) -> Sequence[Job]:
        return self._store.jobs.list_pipeline(job.pipeline)


def describe_peers(
    job: Job, members: Sequence[Job], find_cluster: Callable[[str], Cluster | None]
) -> dict[str, object]:
    """Return the content of BROKER_GROUP_FILE; a task without machines has no addresses."""
    tasks: dict[str, object] = {}
    for member in members:
        live = None if member.status.is_terminal else find_live(member)
        addresses = list_addresses(find_cluster(live.cluster)) if live and live.ready_s else []
        port = live.port if live and addresses else None
        tasks[member.name] = {"addresses": addresses, "port": port, "attempt": live.number if live else None}
    return {"group": get_role(job).name, "tasks": tasks}


def _is_ready(job: Job, generation: int) -> bool:
    live = find_live(job)
    return job.status.is_terminal or (live is not None and live.generation == generation and bool(live.ready_s))


def _has_moved(attempt: Attempt) -> bool:
    return attempt.outcome is not None and attempt.outcome.kind is OutcomeKind.GROUP_MOVED
