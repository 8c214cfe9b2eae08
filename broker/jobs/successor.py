"""Bring up the machines of a job's next attempt while the current one works, so that a refusal costs nothing.

Only machines overlap. The next attempt begins after the program of this one has ended and its nodes are confirmed gone.
The record is the cluster (or the open intents) under the name of the next attempt: a new controller finds it, and `up`
resumes it.
"""

from __future__ import annotations

import asyncio

from broker.clock import Clock
from broker.errors import BrokerError, QuotaError
from broker.jobs.monitor import is_due
from broker.provision.hedge_timer import Answer, HedgeTimer
from broker.provision.lifecycle import Provisioner
from broker.provision.refusals import draw_backoff_s
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, Job, Placement, Plan

RETRY_BASE_S = 15.0
RETRY_S_MAX = 300.0


class Successor:
    """The machines of one job's next attempt."""

    def __init__(self, store: Store, provisioner: Provisioner, clock: Clock) -> None:
        self._store = store
        self._provisioner = provisioner
        self._clock = clock
        self._timer = HedgeTimer(store.response_times)
        self._task: asyncio.Task[Cluster | None] | None = None  # brings them up, or takes them down
        self._refusals = 0  # consecutive
        self._refused_s, self._wait_s = float("-inf"), 0.0  # the newest refusal, and how long to wait after it
        self._has_quota = True  # for machines in addition to the current ones

    @property
    def is_busy(self) -> bool:
        """Whether machines are being started or released."""
        return self._task is not None

    def can_overlap(self, job: Job) -> bool:
        """Return whether machines may run in addition to the current ones.

        Not with a budget: the lease of the current nodes assumes that only they are paid for. Not in a job group: all
        tasks of a group move together.
        """
        has_budget = job.task.goal is not None and job.task.goal.budget_usd is not None
        return self._has_quota and not has_budget and job.task.group is None

    def expect_overlap_hours(self, job: Job, cloud: str) -> float:
        """Return the hours of a move to that cloud during which the job continues: the boot of its next machines."""
        if not self.can_overlap(job):
            return 0.0
        return sum(self._timer.expect_s(cloud, answer) for answer in Answer) / 3600

    def is_up(self, job: Job) -> bool:
        """Return whether machines of the next attempt are up, so that `setup` is the next step of its start."""
        cluster = self._store.clusters.get(job.name_cluster(job.next_attempt))
        return cluster is not None and cluster.attempt == job.next_attempt and cluster.status is ClusterStatus.UP

    def find_placement(self, job: Job) -> Placement | None:
        """Return where machines of the next attempt are up or requested; None if there are none."""
        name = job.name_cluster(job.next_attempt)
        cluster = self._store.clusters.get(name)
        if cluster is not None and (
            cluster.attempt != job.next_attempt or cluster.status not in (ClusterStatus.INIT, ClusterStatus.UP)
        ):
            return None
        if cluster is not None and cluster.status is ClusterStatus.UP:
            return cluster.placement
        requested = [intent.request.placement for intent in self._store.intents.list_open(name)]
        return requested[0] if requested else None

    def begin(self, job: Job, plan: Plan) -> None:
        """Begin or resume bringing up machines at the first place of the plan that has capacity."""
        if self._task is None and is_due(self._refused_s, self._wait_s, self._clock.now_s()):
            name, number = job.name_cluster(job.next_attempt), job.next_attempt
            self._task = asyncio.ensure_future(
                self._provisioner.up(name, plan, attempt=number, job_id=job.id, hedge=job.hedge)
            )

    def begin_release(self, job: Job) -> None:
        """Begin releasing the machines."""
        if self._task is None:
            self._task = asyncio.ensure_future(self.release(job))

    async def release(self, job: Job) -> None:
        """Release the machines; return once they are confirmed gone."""
        await self._provisioner.down(job.name_cluster(job.next_attempt))

    def check(self) -> bool:
        """Return whether the machines have just come up. After a refusal, the current machines are kept."""
        if self._task is None or not self._task.done():
            return False
        task, self._task = self._task, None
        error = task.exception()
        if error is None:
            self._refusals = 0
            return task.result() is not None
        if not isinstance(error, BrokerError):
            raise error
        self._has_quota = self._has_quota and not isinstance(error, QuotaError)
        self._refusals += 1
        self._wait_s = draw_backoff_s(self._refusals, base_s=RETRY_BASE_S, cap_s=RETRY_S_MAX)
        self._refused_s = self._clock.now_s()
        return False

    async def stop(self) -> None:
        """Stop as if this process had ended: requested machines remain for the next attempt, or for `down`."""
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
