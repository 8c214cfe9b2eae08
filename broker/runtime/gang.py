"""A task on a cluster: all nodes at once, one call a node; what a run is, the nodes' agents know."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from broker import agent
from broker.clock import Clock
from broker.errors import CloudError, InvalidRequestError, TransientError
from broker.nouns import noun
from broker.runtime.base import CanStream, Completed, GrantsAccess, Transport
from broker.runtime.channels import Channels
from broker.runtime.credentials import make_credential
from broker.runtime.reserving import count_gpus, describe_turn, find_reservation
from broker.runtime.shipping import needs_trainers, pack_trainers, send_trainers
from broker.types import Autostop, Cluster, Node, NodeState, Progress, Run, RunStatus, Task

AGENT_FOLDER = ".broker/agent"
AGENT_ARGV = ("python3", "-I", "-S", f"{AGENT_FOLDER}/agent.py")
CHANNEL_VERBS = ("lease", "cancel")  # small, and asked twice they change nothing
CALL_S = 30.0
LOOK_S = 0.5  # between two polls where a node has no channel
# One call for all files, and nothing is touched where they are there: an agent may be starting from them.
UNPACK = f"""\
cd && mkdir -p {AGENT_FOLDER} && cd {AGENT_FOLDER} || exit 1
if [ "$(cat digest 2>/dev/null)" = "$1" ]; then exec cat >/dev/null; fi
new=$(mktemp -d .new.XXXXXX) && tar -xf - -C "$new" && mv -f "$new"/* . && rmdir "$new" && echo "$1" >digest"""


@noun
class GangReport:
    """`returncode` is None where no program of ours failed by itself (lost node, preemption); `reason` says so.

    `advised`: ranks whose cloud thinks a preemption likelier than usual; most live on. `failed_rank`: whose program
    ended first with an exit code of its own. `flush`: while the program has ended, but not all that it wrote lies in
    its bucket, what a node says about that. `unflushed`: of a run whose program succeeded and whose files did not
    arrive in time, why and where they lie; it has FAILED, and no program of it did. `unfit`: ranks that were to
    join an elastic gang at work and whose `setup` failed, with the reason.
    """

    status: RunStatus
    returncode: int | None
    statuses: tuple[RunStatus | None, ...]
    unreachable: tuple[int, ...]
    progress: Progress | None
    run_id: int
    reason: str = ""
    advised: tuple[int, ...] = ()
    failed_rank: int | None = None
    flush: str = ""
    unflushed: str = ""
    unfit: tuple[tuple[int, str], ...] = ()


class Gang:
    """The nodes of a cluster through their agents: `broker.jobs.gang.Gang`, and what clusters need besides."""

    def __init__(self, transport: Transport, *, clock: Clock, access: GrantsAccess | None = None) -> None:
        """`access`: to the buckets of tasks, for nodes that have none of their own; None grants nothing."""
        self._transport = transport
        self._clock = clock
        self._access = access
        self._channels: Channels | None = None  # made by the first `wait_news`: a command that only looks opens none
        self._silent: frozenset[str] = frozenset()  # nodes that did not answer the newest poll

    async def prepare(self, cluster: Cluster, task: Task) -> None:
        """Put the agent, the trainers, the workdir and the file mounts on every node; unchanged files stay."""
        await asyncio.gather(*(self._prepare(node, task) for node in list_live(cluster.nodes)))

    async def _prepare(self, node: Node, task: Task) -> None:
        digest, archive = pack_agent()
        done = await self._transport.run(node, ["sh", "-c", UNPACK, "sh", digest], timeout_s=CALL_S, stdin=archive)
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise TransientError(f"the agent cannot be put on node `{node.id}`: {last[:200]}")
        if needs_trainers(task):
            await send_trainers(self._transport, node)
        if task.workdir:
            await self._put(node, "workdir", Path(task.workdir), "sky_workdir")
        for target, source in task.file_mounts.items():
            await self._put(node, f"file_mounts: {target}", Path(source), target)

    async def _put(self, node: Node, field: str, source: Path, target: str) -> None:
        """A source that has gone since the task was loaded is the user's to mend, not ours to try again."""
        path = source.expanduser()
        if not path.exists():
            raise InvalidRequestError(f"`{field}`: {path} is not there any more")
        await self._transport.put(node, path, target)

    async def start(
        self, cluster: Cluster, task: Task, *, run_id: int, envs: Mapping[str, str], lease_s: float | None = None
    ) -> None:
        """Submit to the head, which names ports and credential, then to the rest; asked again it changes nothing.

        The credential of the first call counts: the head keeps it, and answers with it ever after.
        """
        nodes = sort_nodes(cluster)
        is_managed = "BROKER_JOB_ID" in envs
        reserved = None if is_managed else find_reservation(task, cluster)  # a managed job has its cluster to itself
        # What SkyPilot has put up is in the container already.
        image = None if nodes[0].handle.startswith("sky://") else cluster.placement.get_resources(task).container
        spec: dict[str, Any] = {
            "run_id": run_id,
            "name": task.name or "",
            "setup": task.setup,
            "run": task.run,
            # A managed job's next attempt may come to nodes that its last one has set up.
            "setup_digest": digest_setup(task, image) if is_managed else None,
            "envs": {**task.envs, **envs},
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
            # SkyPilot takes a whole cluster down when one of its nodes ends itself.
            "ends_together": nodes[0].handle.startswith("sky://"),
            "nodes_min": task.recovery.nodes_min,
            "head": {
                "address": nodes[0].address,
                "credential": make_credential(f"broker {cluster.name} run {run_id}").value,
            },
        }
        if self._access and (request := await self._access.grant(cluster, task)):
            await self._call_all(cluster, "access", {**request, "run_id": run_id})
        head = await self._call(nodes[0], "submit", {**spec, "rank": 0})
        spec["head"] = {**spec["head"], **head}
        await asyncio.gather(
            *(self._call(node, "submit", {**spec, "rank": node.rank}) for node in list_live(nodes) if node.rank)
        )

    async def poll(self, cluster: Cluster, run_id: int) -> GangReport:
        """What every node says of the run. The head speaks for the gang; where it is silent, the others do.

        A node whose channel is open has said it already; any other is asked, and only a plain call that fails makes
        it unreachable.
        """
        nodes = sort_nodes(cluster)
        live = list_live(nodes)
        found = await asyncio.gather(*(self._read_status(node, run_id) for node in live))
        silent = {node.id for node, answer in zip(live, found, strict=True) if answer is None}
        self._silent = (self._silent - {node.id for node in nodes}) | silent
        by_rank = {node.rank: answer for node, answer in zip(live, found, strict=True)}
        await self._ask_again(live, run_id, by_rank)
        answers = [by_rank.get(node.rank) for node in nodes]
        runs = [answer["runs"][0] if answer and answer["runs"] else None for answer in answers]
        statuses = tuple(RunStatus(run["status"]) if run else None for run in runs)
        unreachable = tuple(rank for rank, answer in by_rank.items() if answer is None)
        speaker: dict[str, Any] = next((run for run in runs if run), {})
        return GangReport(
            status=RunStatus(speaker.get("status", "SETTING_UP")),
            returncode=speaker.get("returncode"),
            statuses=statuses,
            unreachable=unreachable,
            progress=parse_progress(runs[0]["progress"]) if runs and runs[0] else None,
            run_id=run_id,
            reason=speaker.get("reason", ""),
            advised=tuple(rank for rank, answer in by_rank.items() if answer and answer.get("is_advised")),
            failed_rank=speaker.get("failed_rank"),
            unflushed=str(speaker.get("unflushed") or ""),
            unfit=find_unfit(runs),
            flush=next((str(run["flush"]) for run in runs if run and run.get("flush")), ""),
        )

    async def _ask_again(self, live: Sequence[Node], run_id: int, by_rank: dict[int, Mapping[str, Any] | None]) -> None:
        """The head says last that a run has succeeded, so a node that said RUNNING was only asked before it ended.

        Nodes answer in any order: without this a report could show a success in which some ranks still run.
        """
        if _read_run_status(by_rank.get(0)) is not RunStatus.SUCCEEDED:
            return
        late = [node for node in live if (status := _read_run_status(by_rank[node.rank])) and not status.is_terminal]
        found = await asyncio.gather(*(self._try_status(node, run_id) for node in late))
        by_rank.update({node.rank: answer for node, answer in zip(late, found, strict=True) if answer is not None})

    async def wait_news(self, cluster: Cluster, run_id: int, *, wake: asyncio.Event, timeout_s: float) -> None:
        """Until a node has something new since the last poll, `wake` is set, or the time is up.

        Opens a channel to each node that answered the last poll; while one of them has none, this is a short sleep.
        """
        if self._channels is None and isinstance(self._transport, CanStream):
            self._channels = Channels(self._transport, [*AGENT_ARGV, "follow"], clock=self._clock)
        live = list_live(cluster.nodes)
        channels = None if any(node.id in self._silent for node in live) else self._channels
        if channels is None or not await channels.wait_news(live, run_id, wake=wake, timeout_s=timeout_s):
            await self._clock.sleep(min(LOOK_S, timeout_s))

    async def cancel(self, cluster: Cluster, run_id: int) -> None:
        """Ask every node that can be reached; the gang ends when any of them heard it."""
        await self._call_all(cluster, "cancel", {"run_id": run_id})

    async def list_runs(self, cluster: Cluster) -> Sequence[Run]:
        """All that the head remembers. Raises TransientError when it does not answer."""
        answer = await self._call(sort_nodes(cluster)[0], "status", {})
        return [
            Run(
                id=run["id"],
                cluster=cluster.name,
                name=run["name"],
                status=RunStatus(run["status"]),
                started_s=run["started_s"],
                ended_s=run["ended_s"],
                returncode=run["returncode"],
                accelerators=str(run.get("accelerators") or ""),
                cards=tuple((run.get("held") or {}).get("cards") or ()),
            )
            for run in answer["runs"]
        ]

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        head, request = sort_nodes(cluster)[0], {"run_id": run_id, "offset": offset}
        channel = self._channels.find(head, run_id) if self._channels else None
        if channel is not None:
            if channel.has_read_log(offset):
                return b"", offset
            try:
                data = base64.b64decode(str((await channel.call("log", request)).get("data", "")))
                return data, offset + len(data)
            except (TransientError, ValueError):
                pass  # asked again, on a connection of its own
        done = await self._run_agent(head, "log", request)
        return done.stdout, offset + len(done.stdout)

    async def renew_lease(self, cluster: Cluster, *, lease_s: float) -> None:
        """Let the nodes run for at most `lease_s` seconds from now, unless it is renewed; and keep their access."""
        await self._call_all(cluster, "lease", {"lease_s": lease_s})
        if self._access:
            await self._access.renew(cluster, partial(self._call_all, cluster, "access"))

    async def set_autostop(self, cluster: Cluster, autostop: Autostop | None) -> None:
        """Nodes end themselves once idle for so long, whoever is there to see it; None: they do not."""
        rule = {"idle_minutes": autostop.idle_minutes, "is_down": autostop.is_down} if autostop else {}
        await self._call_all(cluster, "autostop", rule)

    async def idle_minutes(self, cluster: Cluster) -> float | None:
        """Of the head, by the agent's own clock; None when it cannot be asked."""
        answer = await self._try_status(sort_nodes(cluster)[0], None)
        return answer["idle_s"] / 60 if answer else None

    async def _call_all(self, cluster: Cluster, verb: str, request: Mapping[str, Any]) -> None:
        """All nodes hear it even if one cannot be reached; then that is raised."""
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
        channel = self._channels.find(node) if self._channels and verb in CHANNEL_VERBS else None
        if channel is not None and channel.is_heard():
            try:
                return dict(await channel.call(verb, request))
            except TransientError:
                pass  # repeated on a connection of its own: that does no harm
        answer = json.loads((await self._run_agent(node, verb, request)).stdout)
        assert isinstance(answer, dict), "the agent answers with an object"
        return answer

    async def _run_agent(self, node: Node, verb: str, request: Mapping[str, Any]) -> Completed:
        done = await self._transport.run(
            node, [*AGENT_ARGV, verb], timeout_s=CALL_S, stdin=json.dumps(request).encode()
        )
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise TransientError(f"the agent on node `{node.id}` failed at `{verb}`: {last[:200]}")
        return done


@cache
def pack_agent() -> tuple[str, bytes]:
    """The agent's files as an archive, and a digest of it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in agent.FILES:
            content = (agent.FOLDER / name).read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return hashlib.sha256(packed.getvalue()).hexdigest(), packed.getvalue()


def digest_setup(task: Task, image: str | None) -> str:
    parts = [task.setup or "", image or "", *(f"{name}={value}" for name, value in sorted(task.envs.items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def find_unfit(runs: Sequence[Mapping[str, Any] | None]) -> tuple[tuple[int, str], ...]:
    """Ranks whose `setup` failed while the head's program runs, with the reason: they replaced lost ones."""
    if not runs or not runs[0] or runs[0]["status"] != RunStatus.RUNNING:
        return ()
    failed = ((rank, run) for rank, run in enumerate(runs) if run and run["status"] == RunStatus.FAILED_SETUP)
    return tuple((rank, str(run.get("reason") or "")) for rank, run in failed)


def sort_nodes(cluster: Cluster) -> list[Node]:
    """By rank: the head first."""
    assert cluster.nodes, "a gang has nodes"
    return sorted(cluster.nodes, key=lambda node: node.rank)


def list_live(nodes: Sequence[Node]) -> list[Node]:
    """Without those that the cloud has confirmed gone: a gang may go on without them."""
    return [node for node in nodes if node.state is not NodeState.TERMINATED]


def _read_run_status(answer: Mapping[str, Any] | None) -> RunStatus | None:
    return RunStatus(answer["runs"][0]["status"]) if answer and answer["runs"] else None


def parse_progress(line: Mapping[str, Any] | None) -> Progress | None:
    """The program wrote it: what is not of the right kind is left out."""
    if line is None:
        return None

    def number(name: str) -> float | None:
        value = line.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def whole(name: str) -> int | None:
        value = number(name)
        return int(value) if value is not None and abs(value) < 2**63 else None

    return Progress(
        step=whole("step") or 0,
        total=whole("total"),
        loss=number("loss"),
        tokens_per_s=number("tokens_per_s"),
        checkpoint_step=whole("checkpoint_step"),
        time_s=number("time_s") or number("time") or 0.0,
        busy_s=number("busy_s"),
    )
