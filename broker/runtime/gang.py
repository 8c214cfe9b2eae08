"""Run a task on the nodes of a cluster, one call per node, in parallel. The nodes' agents hold the state of runs."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from broker.clock import Clock, within
from broker.errors import CloudError, FencedError, TransientError
from broker.runtime.base import CanStream, GrantsAccess, Transport
from broker.runtime.channels import Channels
from broker.runtime.credentials import make_credential
from broker.runtime.packing import AGENT_FOLDER, UNPACK, digest_setup, pack_agent
from broker.runtime.reports import (
    ExchangeReply,
    GangReport,
    Uploads,
    find_checkpoints,
    find_faults,
    find_head,
    find_newest_progress,
    find_own_times,
    find_setups,
    find_slow_network,
    find_unfit,
    gather_runs,
    read_run_status,
)
from broker.runtime.reserving import count_gpus, describe_cluster, describe_turn, find_reservation
from broker.runtime.samples import gather_samples
from broker.runtime.sending import send_source
from broker.runtime.shipping import needs_trainers, pack_trainers, send_trainers
from broker.sites.openssh import Completed
from broker.types import Autostop, Cluster, GangHead, Node, NodeState, Run, RunStatus, Task

AGENT_ARGV = ("python3", "-I", "-S", f"{AGENT_FOLDER}/agent.py")
CHANNEL_VERBS = ("lease", "cancel", "exchange")  # small and idempotent
EXCHANGE_BYTES_MAX = 256 << 10  # over a session, whose lines have a limit
# Nodes behind SkyPilot and pods already run inside the task's container.
INSIDE_CONTAINER = ("sky://", "k8s://")
EPOCH, SUPERSEDED = "server_epoch", 77  # as in `agent_epoch.py`: a field of each request, the exit code of a refusal
CALL_S = 30.0
POLL_S = 0.5  # between two polls if a node has no channel


class Gang:
    """Control the nodes of a cluster through their agents: `broker.jobs.gang.Gang` plus verbs for clusters."""

    def __init__(
        self,
        transport: Transport,
        *,
        clock: Clock,
        access: GrantsAccess | None = None,
        find_epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create the gang. `access` grants nodes without credentials access to a task's buckets; None grants nothing.

        `find_epoch` returns the epoch of this server, 0 without one. Nodes refuse requests with a lower epoch than the
        highest they have seen: each method then raises FencedError.
        """
        self._transport = transport
        self._clock = clock
        self._access = access
        self._find_epoch = find_epoch
        self._channels: Channels | None = None  # created by the first `wait_news`: a single poll needs none
        self._silent: frozenset[str] = frozenset()  # nodes that did not answer the newest poll
        self._heads: dict[tuple[str, int], int] = {}  # cluster and run id -> rank of the head, as last reported

    async def prepare(self, cluster: Cluster, task: Task) -> None:
        """Put the agent, the trainers, the workdir and the file mounts on every node; unchanged files are not sent."""
        await asyncio.gather(*(self._prepare(node, task) for node in list_live(cluster.nodes)))

    async def _prepare(self, node: Node, task: Task) -> None:
        digest, archive = pack_agent()
        result = await self._transport.run(node, ["sh", "-c", UNPACK, "sh", digest], timeout_s=CALL_S, stdin=archive)
        if result.returncode:
            last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise TransientError(f"the agent cannot be installed on node `{node.id}`: {last[:200]}")
        if needs_trainers(task):
            await send_trainers(self._transport, node)
        if task.workdir:
            await send_source(self._transport, node, field="workdir", source=Path(task.workdir), target="sky_workdir")
        for target, source in task.file_mounts.items():
            field = f"file_mounts: {target}"
            await send_source(self._transport, node, field=field, source=Path(source), target=target)

    async def start(
        self,
        cluster: Cluster,
        task: Task,
        *,
        run_id: int,
        envs: Mapping[str, str],
        lease_s: float | None = None,
        head: GangHead | None = None,
    ) -> None:
        """Submit to the head, which returns ports and a credential, then to the other nodes. Idempotent.

        A task of a job group is only set up; its program starts after `send_peers`. The credential of the first call
        applies: the head keeps it and returns it on every later call.
        """
        nodes = sort_nodes(cluster)
        rank = head.rank if head else 0
        is_managed = "BROKER_JOB_ID" in envs
        reserved = None if is_managed else find_reservation(task, cluster)  # a managed job has its cluster to itself
        image = (
            None if nodes[0].handle.startswith(INSIDE_CONTAINER) else cluster.placement.get_resources(task).container
        )
        spec: dict[str, Any] = {
            "run_id": run_id,
            "name": task.name or "",
            "setup": task.setup,
            "run": task.run,
            # A managed job's next attempt may reuse nodes that the previous one has set up.
            "setup_digest": digest_setup(task, image) if is_managed else None,
            "envs": {"SKYPILOT_CLUSTER_INFO": describe_cluster(cluster), **task.envs, **envs},
            "secrets": {name: secret.value for name, secret in task.secrets.items()},
            "num_nodes": len(nodes),
            "node_ips": [node.address for node in nodes],
            "image": image,
            "trainers": pack_trainers().name if needs_trainers(task) else None,
            "mounts": [target for target in task.file_mounts if target.startswith("/")],
            "gpus_per_node": count_gpus(task, cluster, reserved),
            "accelerators": reserved.text if reserved else "",
            "queue": None if is_managed else describe_turn(reserved),
            "lease_s": lease_s,
            # SkyPilot terminates a whole cluster when one of its nodes shuts itself down.
            "ends_together": nodes[0].handle.startswith("sky://"),
            "nodes_min": task.recovery.nodes_min,
            "is_held": "BROKER_GROUP_NAME" in envs,
            "is_joining": head is not None,
            "head": {
                "address": nodes[rank].address,
                "epoch": head.epoch if head else 0,
                "rank": rank,
                "credential": make_credential(f"broker {cluster.name} run {run_id}").value,
            },
        }
        if self._access and (request := await self._access.grant(cluster, task)):
            await self._call_all(cluster, "access", {**request, "run_id": run_id})
        answer = await self._call(nodes[rank], "submit", {**spec, "rank": rank})
        if answer.get("coordinator_port") is None:
            raise TransientError(f"node `{nodes[rank].id}` does not coordinate the gang yet")
        spec["head"] = {**spec["head"], **answer}
        others = [node for node in list_live(nodes) if node.rank != rank]
        await asyncio.gather(*(self._call(node, "submit", {**spec, "rank": node.rank}) for node in others))

    async def move_head(
        self, cluster: Cluster, run_id: int, head: GangHead, *, members: Sequence[int], log_bytes: int
    ) -> bool:
        """Call the new head first, because the other members need the port that it returns."""
        nodes = sort_nodes(cluster)
        request = {
            "run_id": run_id,
            "epoch": head.epoch,
            "rank": head.rank,
            "address": nodes[head.rank].address,
            "node_ips": [node.address for node in nodes],
            "members": list(members),
            "log_bytes": log_bytes,
        }
        answer = await self._call(nodes[head.rank], "head", request)
        if answer["epoch"] != head.epoch or answer["port"] is None:
            return False
        request["port"] = answer["port"]
        await asyncio.gather(*(self._call(nodes[rank], "head", request) for rank in members))
        return True

    async def poll(self, cluster: Cluster, run_id: int) -> GangReport:
        """Return the state of the run: the head's view, or that of the first other node if the head is silent.

        A node with an open channel has pushed its state already; others are called, and only a failed plain call makes
        a node unreachable.
        """
        nodes = sort_nodes(cluster)
        live = list_live(nodes)
        replies = await asyncio.gather(*(self._read_status(node, run_id) for node in live))
        silent = {node.id for node, answer in zip(live, replies, strict=True) if answer is None}
        self._silent = (self._silent - {node.id for node in nodes}) | silent
        by_rank = {node.rank: answer for node, answer in zip(live, replies, strict=True)}
        await self._refresh_late(live, run_id, by_rank, self._heads.get((cluster.name, run_id), 0))
        answers = [by_rank.get(node.rank) for node in nodes]
        runs = [answer["runs"][0] if answer and answer["runs"] else None for answer in answers]
        head = self._heads[cluster.name, run_id] = find_head(runs)
        speaker: dict[str, Any] = next((run for run in (runs[head], *runs) if run), {})
        return GangReport(
            status=RunStatus(speaker.get("status", "SETTING_UP")),
            returncode=speaker.get("returncode"),
            statuses=tuple(RunStatus(run["status"]) if run else None for run in runs),
            unreachable=tuple(rank for rank, answer in by_rank.items() if answer is None),
            progress=find_newest_progress(runs, head),
            run_id=run_id,
            reason=speaker.get("reason", ""),
            advised=tuple(rank for rank, answer in by_rank.items() if answer and answer.get("is_advised")),
            noticed=tuple(rank for rank, answer in by_rank.items() if answer and answer.get("is_noticed")),
            failed_rank=speaker.get("failed_rank"),
            unflushed=str(speaker.get("unflushed") or ""),
            unfit=find_unfit(runs, head),
            followers=tuple(rank for rank, run in enumerate(runs) if run and run.get("is_followed")),
            faults=find_faults(runs),
            network=find_slow_network(speaker),
            own_times=find_own_times(runs),
            setups=find_setups(runs),
            samples=gather_samples(self._channels, live, run_id, by_rank),
            is_ready=bool(speaker.get("is_ready")),
            port=speaker.get("group_port"),
            checkpoints=find_checkpoints(speaker),
            flush=next((str(run["flush"]) for run in runs if run and run.get("flush")), ""),
        )

    async def _refresh_late(
        self, live: Sequence[Node], run_id: int, by_rank: dict[int, Mapping[str, Any] | None], head: int
    ) -> None:
        """Poll nodes again that reported RUNNING although the head, which ends last, reports a success.

        Nodes answer in any order: without this a report could show a success in which some ranks still run.
        """
        if read_run_status(by_rank.get(head)) is not RunStatus.SUCCEEDED:
            return
        late = [node for node in live if (status := read_run_status(by_rank[node.rank])) and not status.is_terminal]
        replies = await asyncio.gather(*(self._try_status(node, run_id) for node in late))
        by_rank.update({node.rank: answer for node, answer in zip(late, replies, strict=True) if answer is not None})

    async def wait_news(self, cluster: Cluster, run_id: int, *, wake: asyncio.Event, timeout_s: float) -> None:
        """Wait until a node has something new since the last poll, `wake` is set, or the time is up.

        Open a channel to each node if all of them answered the last poll. Until every node has one, sleep briefly.
        """
        if self._channels is None and isinstance(self._transport, CanStream):
            self._channels = Channels(self._transport, [*AGENT_ARGV, "follow"], clock=self._clock)
        live = list_live(cluster.nodes)
        channels = None if any(node.id in self._silent for node in live) else self._channels
        if channels is None or not await channels.wait_news(live, run_id, wake=wake, timeout_s=timeout_s):
            await self._clock.sleep(min(POLL_S, timeout_s))

    async def cancel(self, cluster: Cluster, run_id: int) -> None:
        """Send a cancellation to every reachable node; the gang ends once any of them receives it."""
        await self._call_all(cluster, "cancel", {"run_id": run_id})

    async def send_peers(self, cluster: Cluster, run_id: int, peers: Mapping[str, object]) -> None:
        """Send the addresses of the job group, to the head last: it then starts a held program."""
        request = {"run_id": run_id, "peers": peers}
        head, *others = sort_nodes(cluster)
        await asyncio.gather(*(self._call(node, "peers", request) for node in list_live(others)))
        await self._call(head, "peers", request)

    async def list_runs(self, cluster: Cluster) -> Sequence[Run]:
        """Return all runs, as their heads know them. Raises TransientError if no node answers."""
        first, *others = sort_nodes(cluster)
        answers, failure = dict[int, Mapping[str, Any] | None](), None
        try:
            answers[first.rank] = answer = await self._call(first, "status", {})
            is_moved = any(run.get("head_epoch") for run in answer["runs"])
        except TransientError as error:
            failure, is_moved = error, True
        live = list_live(others) if is_moved else []  # one call is enough while the first node is the head
        replies = await asyncio.gather(*(self._try_status(node, None) for node in live))
        answers.update({node.rank: reply for node, reply in zip(live, replies, strict=True)})
        if failure and not any(answers.values()):
            raise failure
        return gather_runs(cluster.name, answers)

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        """Return new bytes of the head's log and the next offset; from the session if one is open."""
        rank = self._heads.get((cluster.name, run_id), 0)
        head, request = sort_nodes(cluster)[rank], {"run_id": run_id, "offset": offset}
        channel = self._channels.find(head, run_id) if self._channels else None
        if channel is not None:
            if channel.has_read_log(offset):
                return b"", offset
            try:
                data = base64.b64decode(str((await channel.call("log", request)).get("data", "")))
                return data, offset + len(data)
            except (TransientError, ValueError):
                pass  # repeated as a plain call
        result = await self._run_agent(head, "log", request)
        return result.stdout, offset + len(result.stdout)

    async def renew_lease(self, cluster: Cluster, *, lease_s: float) -> None:
        """Let the nodes run for at most another `lease_s` seconds, and renew their bucket access."""
        await self._call_all(cluster, "lease", {"lease_s": lease_s})
        if self._access:
            await self._access.renew(cluster, partial(self._call_all, cluster, "access"))

    async def exchange(self, cluster: Cluster, files: Mapping[str, str], read: Sequence[str]) -> ExchangeReply:
        """Replace files in the first node's exchange folder, in this order, and read others. Raises TransientError.

        Each file is replaced atomically. A call that fails may have replaced some of them; it may be repeated.
        """
        head, request = sort_nodes(cluster)[0], {"files": dict(files), "read": list(read)}
        is_long = sum(map(len, files.values())) > EXCHANGE_BYTES_MAX
        try:
            answer = (
                json.loads((await self._run_agent(head, "exchange", request)).stdout) if is_long
                else await self._call(head, "exchange", request)
            )  # fmt: skip
            return ExchangeReply(files=dict(answer["files"]), digests=dict(answer["digests"]))
        except (KeyError, TypeError, ValueError) as error:
            raise TransientError(f"node `{head.id}` gave no valid answer to an exchange: {error}") from error

    async def set_autostop(self, cluster: Cluster, autostop: Autostop | None) -> None:
        """Make the nodes stop themselves after the idle time, without broker's help; None disables this."""
        rule = {"idle_minutes": autostop.idle_minutes, "is_down": autostop.is_down} if autostop else {}
        await self._call_all(cluster, "autostop", rule)

    async def idle_minutes(self, cluster: Cluster) -> float | None:
        """Return the first node's idle minutes by its agent's clock; None if it does not answer."""
        answer = await self._try_status(sort_nodes(cluster)[0], None)
        return answer["idle_s"] / 60 if answer else None

    async def read_uploads(self, cluster: Cluster, *, timeout_s: float) -> Uploads:
        """Ask every live node, for at most `timeout_s`, which files it has not yet uploaded to mounted buckets."""

        async def read_report(node: Node) -> dict[str, Any] | None:
            try:
                return await within(self._try_status(node, None), timeout_s)
            except TimeoutError:
                return None

        nodes = list_live(cluster.nodes)
        answers = await asyncio.gather(*map(read_report, nodes))
        reports = [answer.get("uploads") for answer in answers if answer]  # older agents report none
        mounts = [each for each in reports if each]
        pending = [each for mount in mounts for each in mount["pending"]]
        return Uploads(
            file_count=sum(int(each["file_count"]) for each in pending),
            size_bytes=sum(int(each["size_bytes"]) for each in pending),
            sent_bytes=sum(int(each["sent_bytes"]) for each in mounts),
            urls=tuple(sorted({str(each["url"]) for each in pending})),
            has_mounts=bool(mounts),
            silent=tuple(node.id for node, answer in zip(nodes, answers, strict=True) if answer is None),
        )

    async def _call_all(self, cluster: Cluster, verb: str, request: Mapping[str, Any]) -> None:
        """Call all live nodes, even if one cannot be reached; then raise the error of the first that failed."""
        calls = (self._call(node, verb, request) for node in list_live(cluster.nodes))
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _read_status(self, node: Node, run_id: int) -> Mapping[str, Any] | None:
        channel = self._channels.find(node, run_id) if self._channels else None
        status = channel.read_status() if channel is not None else None
        return status if status is not None else await self._try_status(node, run_id)

    async def _try_status(self, node: Node, run_id: int | None) -> dict[str, Any] | None:
        try:
            return await self._call(node, "status", {} if run_id is None else {"run_id": run_id})
        except CloudError:
            return None

    async def _call(self, node: Node, verb: str, request: Mapping[str, Any]) -> dict[str, Any]:
        if epoch := self._find_epoch():
            request = {**request, EPOCH: epoch}
        channel = self._channels.find(node) if self._channels and verb in CHANNEL_VERBS else None
        if channel is not None and channel.is_heard():
            try:
                return dict(await channel.call(verb, request))
            except TransientError:
                pass  # repeated as a plain call, which is harmless
        answer = json.loads((await self._run_agent(node, verb, request)).stdout)
        assert isinstance(answer, dict), "the agent answers with an object"
        return answer

    async def _run_agent(self, node: Node, verb: str, request: Mapping[str, Any]) -> Completed:
        result = await self._transport.run(
            node, [*AGENT_ARGV, verb], timeout_s=CALL_S, stdin=json.dumps(request).encode()
        )
        if result.returncode == SUPERSEDED:
            raise FencedError(
                f"node `{node.id}` obeys a server that was restored from this server's backups",
                hints=("log in to the new server, and stop this one",),
            )
        if result.returncode:
            last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise TransientError(f"the agent on node `{node.id}` failed at `{verb}`: {last[:200]}")
        return result


def sort_nodes(cluster: Cluster) -> list[Node]:
    """Return the nodes by rank."""
    assert cluster.nodes, "a gang has nodes"
    return sorted(cluster.nodes, key=lambda node: node.rank)


def list_live(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that the cloud has not confirmed gone; an elastic gang continues without the gone ones."""
    return [node for node in nodes if node.state is not NodeState.TERMINATED]
