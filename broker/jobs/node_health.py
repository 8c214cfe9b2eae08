"""Replace nodes that failed the check before the first step or that slow the gang down, and remember them.

The agents run the check (`agent/agent_preflight.py`), because only a node can access its own GPUs and network. Faulty
nodes are stored in one row of the store: if a cloud provides the same machine again, the check refuses it by the serial
of its GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from broker.clock import Clock
from broker.errors import CloudError
from broker.jobs.gang import GangReport
from broker.jobs.monitor import is_due
from broker.jobs.progress import complete_progress
from broker.jobs.stragglers import Replacement, Rest, StragglerWatch, choose_replacement
from broker.optimizer.network import find_network_gbs
from broker.optimizer.roofline import NETWORK_EFFICIENCY
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from broker.types import Cluster, EventKind, Job, Node, NodeFault, NodeState, RunStatus, make_event
from broker.wording import describe_slow_node

ROW = "unhealthy_nodes"  # in the store's table `meta`
REMEMBERED_S = 14 * 86400.0  # clouds repair machines; our choice
NODES_MAX = 50  # the newest ones
END_AGAIN_S = 30.0  # before the request to terminate a node that is still running is repeated
VARIABLE = "BROKER_HEALTH"  # as in the agent, which does not import broker


class UnhealthyNodes:
    """The record of nodes that failed a check, shared by all jobs."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def record(self, cluster: Cluster, fault: NodeFault, *, job_id: int, is_slow: bool = False) -> None:
        """Remember a node and its GPUs, and report it once. `is_slow`: it is not faulty, but slows its gang down."""
        node = next(node for node in cluster.nodes if node.rank == fault.rank)
        with self._store.transaction():
            known = self._read()
            if any(each["node"] == node.id for each in known):
                return
            entry = {
                "node": node.id,
                "serials": list(fault.serials),
                "reason": fault.reason,
                "time_s": self._clock.now_s(),
            }
            if is_slow:
                entry |= {"slow_job": job_id, "rank": fault.rank}
            self._store.meta.put(ROW, json.dumps([*known, entry][-NODES_MAX:]))
            event = make_event(
                EventKind.NODE_UNHEALTHY,
                rank=fault.rank,
                node=node.id,
                reason=fault.reason,
                days=REMEMBERED_S / 86400,
                is_remembered=bool(fault.serials),
            )
            self._store.events.add(event, job_id=job_id)

    def explain(self, cluster: Cluster, ranks: Sequence[int]) -> str:
        """Return the fault of the first of these ranks that failed a check; empty if none did."""
        ids = [node.id for node in cluster.nodes if node.rank in ranks]
        return next((str(each["reason"]) for each in self._read() if each["node"] in ids), "")

    def list_slow(self, job_id: int) -> Mapping[str, Replacement]:
        """Return the slow nodes of a job that were replaced or will be, by node ID."""
        return {
            str(each["node"]): Replacement(rank=int(each["rank"]), time_s=float(each["time_s"]))
            for each in self._read()
            if each.get("slow_job") == job_id
        }

    def list_refused(self) -> Sequence[str]:
        """Return the serials of GPUs that must not be used."""
        return sorted({str(serial) for each in self._read() for serial in each["serials"]})

    def _read(self) -> list[Mapping[str, Any]]:
        """Return the entries that are not too old; a damaged row counts as empty: it only saves a few checks."""
        try:
            entries = json.loads(self._store.meta.get(ROW) or "[]")
            return [each for each in entries if self._clock.now_s() - float(each["time_s"]) <= REMEMBERED_S]
        except (ValueError, TypeError, KeyError):
            return []


class NodeHealth:
    """Act on the faults that the nodes of one job report."""

    def __init__(self, store: Store, unhealthy: UnhealthyNodes, provisioner: Provisioner, clock: Clock) -> None:
        self._store = store
        self._unhealthy = unhealthy
        self._watch = StragglerWatch()
        self._networks: set[int] = set()  # attempts whose slow network was reported
        self._watched: tuple[str, ...] = ()  # IDs of the nodes
        self._provisioner = provisioner
        self._clock = clock
        self._asked_s: dict[str, float] = {}  # node ID -> when its termination was last requested

    def make_envs(self, job: Job, cluster: Cluster) -> dict[str, str]:
        """Return the variable that makes nodes check their GPUs; empty for nodes without GPUs."""
        count = cluster.placement.offer.accelerator_count
        if not count or not is_wanted(job, cluster):
            return {}
        order: dict[str, object] = {"gpus": count, "refused": self._unhealthy.list_refused()}
        if len(cluster.nodes) > 1:
            offer = cluster.placement.offer
            order["network_gbs"] = find_network_gbs(offer.cloud, offer.instance_type) * NETWORK_EFFICIENCY
        return {VARIABLE: json.dumps(order)}

    async def observe(self, job: Job, cluster: Cluster, report: GangReport) -> bool:
        """Report slow nodes, and terminate nodes with faults; return whether the run waits for the end of such a node.

        Faulty nodes that join a running elastic gang are terminated like others that cannot join (`NodeReplacer`).
        """
        self._report_slow(job, cluster, report)
        self._report_network(job, report)
        await self._replace_slow(job, cluster, report)
        live = {node.rank: node for node in cluster.nodes if node.state is not NodeState.TERMINATED}
        faults = [fault for fault in report.faults if fault.rank in live]
        for fault in faults:
            self._unhealthy.record(cluster, fault, job_id=job.id)
        if not faults or report.status is not RunStatus.FAILED_SETUP:
            return False
        for fault in faults:
            await self._end(cluster, live[fault.rank])
        return True

    async def _end(self, cluster: Cluster, node: Node) -> None:
        """Request the termination of a node; repeat the request after a while if it is still running."""
        asked_s, now_s = self._asked_s.get(node.id), self._clock.now_s()
        if asked_s is not None and not is_due(asked_s, END_AGAIN_S, now_s):
            return
        self._asked_s[node.id] = now_s
        self._provisioner.avoid_machine(cluster, node, until_s=now_s + REMEMBERED_S)
        try:
            await self._provisioner.end_node(cluster, node)
        except CloudError:
            pass  # retried

    async def _replace_slow(self, job: Job, cluster: Cluster, report: GangReport) -> None:
        """Terminate a slow node if that pays off; the gang then recovers as from any loss of a node.

        The decision is recorded first, so after a crash in between, the next controller repeats the request.
        """
        if not report.own_times or not is_wanted(job, cluster) or not self._provisioner.can_replace_node(cluster):
            return
        slow = self._unhealthy.list_slow(job.id)
        now_s = self._clock.now_s()
        is_quiet = report.status is RunStatus.RUNNING and not report.unreachable and report.progress is not None
        live = {node.rank: node for node in cluster.nodes if node.state is NodeState.RUNNING}
        if is_quiet and len(live) == len(cluster.nodes) and not any(node.id in slow for node in live.values()):
            rest = self._measure_rest(job, cluster, report)
            chosen = choose_replacement(self._watch.list_lasting(now_s), rest, list(slow.values()), now_s=now_s)
            if chosen is not None:
                found, gain = chosen
                reason = describe_slow_node(own_s=found.own_s, usual_s=found.usual_s, saved_s=gain.saved_s)
                fault = NodeFault(rank=found.rank, reason=reason)
                self._unhealthy.record(cluster, fault, job_id=job.id, is_slow=True)
                slow = self._unhealthy.list_slow(job.id)
        for node in live.values():
            if node.id in slow:
                await self._end(cluster, node)

    def _measure_rest(self, job: Job, cluster: Cluster, report: GangReport) -> Rest:
        """Measure the remaining work of a job, and the time of a restart: a new node, then the program."""
        assert report.progress is not None
        attempt, progress = job.attempts[-1], complete_progress(report.progress, job.progress)
        started_s, resumed_s = attempt.running_s, attempt.resumed_s
        program_s = resumed_s - started_s if started_s is not None and resumed_s is not None else 0.0
        return Rest(
            step=progress.step,
            total=progress.total,
            checkpoint_step=progress.checkpoint_step,
            start_s=self._provisioner.measure_start_s(cluster.placement.offer.cloud) + program_s,
        )

    def _report_network(self, job: Job, report: GangReport) -> None:
        """Report a network that is slower than the plan assumes, once for each attempt."""
        number, found = job.attempts[-1].number, report.network
        if found is None or number in self._networks:
            return
        self._networks.add(number)
        events = self._store.events.list(job_id=job.id)
        if not any(each.kind is EventKind.NETWORK_SLOW and each.data.get("number") == number for each in events):
            event = make_event(EventKind.NETWORK_SLOW, number=number, **asdict(found))
            self._store.events.add(event, job_id=job.id)

    def _report_slow(self, job: Job, cluster: Cluster, report: GangReport) -> None:
        """Report nodes that slow the gang down."""
        ids = {node.rank: node.id for node in cluster.nodes}
        if self._watched != tuple(ids.values()):
            self._watch, self._watched = StragglerWatch(), tuple(ids.values())
        for slow in self._watch.observe(report.own_times, now_s=self._clock.now_s()):
            event = make_event(
                EventKind.NODE_SLOW,
                rank=slow.rank,
                node=ids.get(slow.rank, ""),
                own_s=slow.own_s,
                usual_s=slow.usual_s,
            )
            self._store.events.add(event, job_id=job.id)


def is_wanted(job: Job, cluster: Cluster) -> bool:
    """Return whether nodes of the job are checked; by default, only if they are separate machines.

    Processes on this machine (the local cloud, rehearsals) share its GPUs and speed, which their offers do not
    describe.
    """
    is_simulated = any(node.handle.startswith("/") for node in cluster.nodes)
    asked = job.task.recovery.checks_health
    return not is_simulated if asked is None else asked
