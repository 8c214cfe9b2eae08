"""Tear down attempts: the program, then its nodes, then the record. Every part may be repeated after a crash."""

from __future__ import annotations

from dataclasses import replace

from broker.clock import Clock
from broker.config import Config
from broker.errors import CloudError
from broker.jobs.gang import Gang, GangReport, get_run_id
from broker.jobs.health import list_lost_ranks
from broker.jobs.log_files import copy_log
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from broker.types import Attempt, Cluster, EventKind, Job, RunStatus, make_event

POLL_S = 0.5
END_S = 15.0  # from a cancel until the program is killed and the first uploads have begun
FLUSH_SILENCE_S = 60.0  # seconds without an upload report


class AttemptTeardown:
    """End an attempt: stop its program, wait for its files, release its nodes."""

    def __init__(self, store: Store, provisioner: Provisioner, gang: Gang, clock: Clock, config: Config) -> None:
        self._store = store
        self._provisioner = provisioner
        self._gang = gang
        self._clock = clock
        self._config = config
        self._flush = ""  # as last reported

    async def terminate(self, attempt: Attempt) -> None:
        """Terminate the nodes; return once they are confirmed gone, because no other attempt may start before that."""
        await self._provisioner.down(attempt.cluster)
        self.close(attempt)

    async def end_program(
        self, attempt: Attempt, cluster: Cluster, *, grace_s: float = 0.0, is_final: bool = False
    ) -> bool:
        """Send SIGTERM and wait up to `grace_s` for the program to save its state; return whether it had succeeded.

        Unless `is_final`, wait longer while a node reports that it is uploading written files; the node limits that
        time.
        """
        run_id = get_run_id(attempt, cluster)
        try:
            await self._gang.cancel(cluster, run_id)
        except CloudError:
            return False  # its nodes are terminated next, and the program with them
        until_s = self._clock.now_s() + grace_s
        while self._clock.now_s() < until_s:
            report = await self._gang.poll(cluster, run_id)
            live_count = len(cluster.nodes) - len(list_lost_ranks(cluster.nodes))
            if report.status.is_terminal or len(report.unreachable) >= live_count:
                return report.status is RunStatus.SUCCEEDED
            if report.flush:
                if cluster.job_id is not None:
                    self.report_flush(cluster.job_id, report)
                until_s = until_s if is_final else max(until_s, self._clock.now_s() + FLUSH_SILENCE_S)
            await self._clock.sleep(POLL_S)
        return False

    def report_flush(self, job_id: int, report: GangReport) -> None:
        """Report, once, the reason why a cluster is kept although its program has ended."""
        if report.flush and report.flush != self._flush:
            self._store.events.add(make_event(EventKind.FLUSHING, text=report.flush), job_id=job_id)
        self._flush = report.flush

    async def cancel(self, job: Job, live: Attempt | None) -> None:
        """Stop the program of a cancelled job, keep its log, and terminate its cluster. Idempotent."""
        cluster = self._store.clusters.get(live.cluster) if live else None
        if live and cluster and live.running_s is not None and not live.outcome:
            await self.end_program(live, cluster, grace_s=find_grace_s(job))
            await self.copy_log(live, cluster, is_ended=False)  # its user waits, and the program may still print
        if live:
            await self._provisioner.down(live.cluster)
        await self._release_next(job)

    async def clean_up(self, job: Job, live: Attempt | None) -> None:
        """Remove all resources of an ended job."""
        await self._release_next(job)
        if live is None:
            return
        cluster = self._store.clusters.get(live.cluster)
        if cluster:
            await self.copy_log(live, cluster)
        await self.terminate(live)

    async def _release_next(self, job: Job) -> None:
        """Release machines of the next attempt: `up` may have been interrupted, or have prepared a move."""
        await self._provisioner.down(job.name_cluster(job.next_attempt))

    def close(self, attempt: Attempt) -> None:
        """Close the attempt's record. Its cost is the cluster's minus that of earlier attempts on the same nodes."""
        now_s = self._clock.now_s()
        attempts = self._store.jobs.list_attempts(attempt.job_id)
        earlier = (old.usd for old in attempts if old.cluster == attempt.cluster and old.number < attempt.number)
        usd = max(0.0, self._store.bills.spend_usd(cluster=attempt.cluster, now_s=now_s) - sum(earlier))
        self._store.jobs.put_attempt(replace(attempt, ended_s=now_s, usd=usd))

    async def copy_log(self, attempt: Attempt, cluster: Cluster, *, is_ended: bool = True) -> None:
        """Append the new part of the run's log to the job's log; unreachable nodes are skipped."""
        run_id, logs = get_run_id(attempt, cluster), self._config.logs
        await copy_log(
            self._store, self._gang, logs, attempt=attempt, cluster=cluster, run_id=run_id, is_ended=is_ended
        )


def find_grace_s(job: Job) -> float:
    """Return the seconds that a cancelled program may take to end.

    It has no state to save, but files that it wrote to a mounted bucket may still be on the node's disk. An auxiliary
    task of a group is ended regularly, and may have work to complete.
    """
    if job.task.group is not None and not job.task.group.is_primary:
        return END_S
    return END_S if any(mount.mode.upper() != "COPY" for mount in job.task.storage_mounts) else 0.0
