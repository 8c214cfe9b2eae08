"""The cloud of SSH pools: hosts of your own, claimed whole by one gang at a time.

A claim lives on its host, so another broker sees it as well, and two commands cannot give one host to two gangs.

  create     hosts of the offer's size in the order of the file: claim until the gang is whole, else release all
  list       ask every host; the claims of one that does not answer are listed as last seen, and its pool as unseen
  terminate  end all processes of the claim, remove its files, release the host. A host that is silent, or was removed
             from the file, counts as gone only if its `fence` command confirms that it is off, or the file says
             `is_off: true`
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from broker.clock import Clock
from broker.clouds.ssh.hosts import RunOnHost, ask_host, fence, run_by_ssh
from broker.clouds.ssh.memory import HostMemory
from broker.config import Config
from broker.errors import (
    AuthError,
    BrokerError,
    CapacityError,
    CloudError,
    TransientError,
    UnknownOutcomeError,
)
from broker.sites import find_file
from broker.sites.backends import find_other_backend
from broker.sites.facts import find_facts
from broker.sites.pools import Host, name_offer, read_hosts
from broker.types import Node, NodeList, NodeRequest, NodeState
from broker.user_files import UserFile

UID = "?uid="  # in a handle, before the user on the host whose home folder has the claim
REALLY_OFF = "if the host is switched off for good, add it with `is_off: true`"
HOST_LOCK = "/var/tmp/broker-host/lock"  # one for all users of a host; released with the last process that holds it


def make_cloud(config: Config, *, clock: Clock) -> SshCloud | None:
    """Make the cloud; None without a file of pools."""
    path = find_file("ssh", config.home)
    if path is None:
        return None
    facts = find_facts("ssh", config.home)
    file = UserFile(path, lambda: read_hosts(path, facts), beside=[facts])
    return SshCloud(file.read, folder=facts.parent, clock=clock)


class SshCloud:
    """`Cloud` and `ReadsSites` for the hosts of `ssh_pools.yaml`, which is read at every call."""

    name: ClassVar[str] = "ssh"
    settle_s: ClassVar[float] = 0.0
    extends_gangs: ClassVar[bool] = True

    def __init__(
        self,
        read: Callable[[], Sequence[Host]],
        *,
        folder: Path,
        clock: Clock,
        run: RunOnHost = run_by_ssh,
        find_lock: Callable[[Host], str] = lambda host: HOST_LOCK,
    ) -> None:
        self._read = read
        self._memory = HostMemory(folder)
        self._clock = clock
        self._run = run
        self._find_lock = find_lock
        self._creating = asyncio.Lock()
        self._uids: dict[str, int] = {}  # host -> the user that the login reaches, as of the newest answer

    async def check(self) -> None:
        """Return if any host answers; otherwise raise the first host's error."""
        answers = await self._call_all_hosts("list", owner="")
        if answers and all(isinstance(answer, CloudError) for answer in answers.values()):
            raise next(answer for answer in answers.values() if isinstance(answer, CloudError))

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        """Claim hosts for the whole gang and boot its nodes; the same token gives the same nodes.

        Raises CapacityError if the pool has too few free hosts (the claims of this token are released), and
        UnknownOutcomeError if a host did not answer a claim (list the nodes before retrying).
        """
        async with self._creating:
            return await self._create(request)

    async def list_nodes(self, owner: str) -> NodeList:
        """List the claims on every host. A host that does not answer keeps its claims as last seen.

        A host that its fence command switched off has no live claims.
        """
        answers = await self._call_all_hosts("list", owner=owner)
        heard = {host: answer for host, answer in answers.items() if not isinstance(answer, CloudError)}
        silent = {host: answer for host, answer in answers.items() if isinstance(answer, CloudError)}
        self._memory.note_answers(heard, owner)
        unseen = {host.pool: error for host, error in silent.items() if not self._memory.is_off(host)}
        if unseen and not heard:
            raise next(iter(unseen.values()))
        now_s = self._clock.now_s()
        claims = {**heard, **{host: self._memory.read_claims(host, owner, now_s=now_s) for host in silent}}
        return NodeList(nodes=tuple(self._make_nodes(claims)), unseen=unseen)

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        """End all processes of the nodes and free their hosts; a host that the file says is off counts as gone.

        Every host is attempted, then the first failure is raised. Raises TransientError for a silent host, unless its
        fence command confirms that it is off, and for processes that do not end; AuthError for a host that was removed
        from the file.
        """
        hosts = {host.key: host for host in self._read_file()}
        by_host: dict[str, list[str]] = {}
        for node in nodes:
            pool, name, node_id = split_handle(node)
            by_host.setdefault(f"{pool}/{name}", []).append(node_id)
        ends = (self._end(hosts[key], ids) for key, ids in by_host.items() if key in hosts and not hosts[key].is_off)
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        for node in nodes:
            if removal := self.find_removal(node.region, node):
                raise removal

    def find_removal(self, region: str, node: Node | None = None) -> CloudError | None:
        """Return an AuthError for a pool, or for the host of a node, that `ssh_pools.yaml` does not list.

        Also for a host that it reaches as another user than the node's: each user's claims are in their home folder.
        """
        hosts = self._read_file()
        if node is None:
            return None if any(host.pool == region for host in hosts) else make_removal(f"pool `{region}`")
        if other := find_other_backend(node, is_native=True):
            return other
        pool, name, _ = split_handle(node)
        if any((host.pool, host.name) == (pool, name) for host in hosts):
            return self._find_other_user(f"{pool}/{name}", node)
        return make_removal(f"host `{name}` of pool `{pool}`", node)

    def _find_other_user(self, key: str, node: Node) -> CloudError | None:
        owner, uid = node.handle.rpartition(UID)[2], self._uids.get(key)
        if UID not in node.handle or uid is None or owner == str(uid):
            return None
        return AuthError(
            f"host `{key}` is now reached as user {uid}, so node `{node.id}` of user {owner} can be neither checked "
            "nor terminated",
            hints=("restore the host's `user` until its nodes have ended", REALLY_OFF),
        )

    def avoid_machine(self, node: Node, *, until_s: float) -> None:
        """Claim the node's host for no other node before `until_s`, in this state folder."""
        pool, name, _ = split_handle(node)
        self._memory.note_avoided(f"{pool}/{name}", until_s=until_s)

    async def _end(self, host: Host, ids: Sequence[str], *, is_forgotten: bool = False) -> None:
        try:
            answer = await self._ask(host, "end", ids=list(ids), is_forgotten=is_forgotten)
        except TransientError:
            if not await fence(host):
                raise
            self._memory.note_off(host, now_s=self._clock.now_s())
            return
        if not all(answer):
            raise TransientError(f"processes of a node on host `{host.name}` do not end")

    async def _create(self, request: NodeRequest) -> Sequence[Node]:
        offer = request.placement.offer
        wanted = (offer.region, offer.instance_type, offer.ondemand_usd_hour)
        pool = [host for host in self._list_hosts() if host.pool == offer.region]
        answers = await self._call_hosts(pool, "list", owner=request.owner)
        heard = {host: answer for host, answer in answers.items() if not isinstance(answer, CloudError)}
        listed = [node for node in self._make_nodes(heard) if node.token == request.token]
        count = request.placement.node_count
        ranks = {node.rank: node for node in listed}
        if len(ranks) == count or any(node.state is NodeState.TERMINATED for node in listed):
            return sorted(listed, key=lambda node: node.rank)
        fitting = [host for host in pool if name_offer(host) == wanted]
        avoided = [host for host in fitting if self._memory.is_avoided(host, now_s=self._clock.now_s())]
        ready = [host for host in fitting if not isinstance(answers[host], CloudError) and host not in avoided]
        claimed, holders = await self._claim(request, ready, ranks)
        holders += [f"{host.name} has failed a check of its GPUs" for host in avoided]
        if len(claimed) < count:
            try:
                await self._release(pool, claimed.values())
            except CloudError as error:  # even a refused login, which would mean that nothing was claimed
                raise UnknownOutcomeError(f"a part of the gang is still claimed: {error.message}") from error
            raise self._explain_shortage(request, fitting, answers, holders)
        return [claimed[rank] for rank in range(count)]

    async def _claim(
        self, request: NodeRequest, hosts: Sequence[Host], ranks: Mapping[int, Node]
    ) -> tuple[dict[int, Node], list[str]]:
        """Claim hosts for the missing ranks, and others where a host is taken.

        Return the nodes by rank, and the holders of the taken hosts.

        Hosts are claimed in the order of the file, so that two calls with one token claim the same hosts.
        """
        claimed, holders = dict(ranks), list[str]()
        used = {split_handle(node)[1] for node in ranks.values()}
        left = [host for host in hosts if host.name not in used]
        missing = [rank for rank in range(request.placement.node_count) if rank not in ranks]
        while missing and len(left) >= len(missing):
            chosen, left = left[: len(missing)], left[len(missing) :]
            answers = await asyncio.gather(
                *(self._claim_host(request, rank, host) for rank, host in zip(missing, chosen, strict=True)),
                return_exceptions=True,
            )
            for answer in answers:
                if isinstance(answer, Node):
                    claimed[answer.rank] = answer
                elif isinstance(answer, str):
                    holders.append(answer)
            if failed := next((each for each in answers if isinstance(each, BaseException)), None):
                if claimed and isinstance(failed, AuthError):  # which would mean that nothing was claimed
                    raise UnknownOutcomeError(f"a part of the gang was claimed: {failed.message}") from failed
                raise failed
            missing = [rank for rank in missing if rank not in claimed]
        return claimed, holders

    async def _claim_host(self, request: NodeRequest, rank: int, host: Host) -> Node | str:
        """Return the node, or why the host is unavailable. Raises UnknownOutcomeError if the answer is lost."""
        record = make_record(request, rank, host, lock=self._find_lock(host), now_s=self._clock.now_s())
        try:
            answer = await self._ask(
                host, "claim", record=record, has_accelerator=bool(host.machine and host.machine.accelerator)
            )
        except TransientError as error:
            raise UnknownOutcomeError(f"the claim of host `{host.name}` was not answered: {error.message}") from error
        if "taken" in answer:
            return f"{host.name} is in use" + (f" by {answer['taken']}" if answer["taken"] else "")
        if "failed" in answer:
            return f"{host.name}: no node starts there, {answer['failed']}"
        self._memory.note_claim(host, answer)
        return self._make_node(host, answer)

    async def _release(self, pool_hosts: Sequence[Host], nodes: Iterable[Node]) -> None:
        """End new claims. `pool_hosts`: as read before the claims; the file may have changed since."""
        hosts = {host.key: host for host in pool_hosts}
        for node in nodes:
            pool, name, node_id = split_handle(node)
            await self._end(hosts[f"{pool}/{name}"], [node_id], is_forgotten=True)

    def _explain_shortage(
        self,
        request: NodeRequest,
        fitting: Sequence[Host],
        answers: Mapping[Host, Any],
        holders: Sequence[str],
    ) -> CapacityError:
        silent = [f"{host.name} does not answer" for host in fitting if isinstance(answers[host], CloudError)]
        why = "; ".join([*holders, *silent][:8]) or "it has too few of them"
        count, offer = request.placement.node_count, request.placement.offer
        return CapacityError(
            f"pool `{offer.region}` has no {count} free hosts of {offer.instance_type}: {why}", scope="zone"
        )

    def _make_nodes(self, claims: Mapping[Host, Sequence[Mapping[str, Any]]]) -> Sequence[Node]:
        """Return each node once, by the name of its claim: the file may list a machine under several names."""
        found: dict[str, Node] = {}
        for host, records in claims.items():
            for each in records:
                if each["id"] not in found or each["id"].endswith(digest_claim(each["owner"], each["token"], host)):
                    found[each["id"]] = self._make_node(host, each)
        return list(found.values())

    def _make_node(self, host: Host, claim: Mapping[str, Any]) -> Node:
        ended = claim["ended"]
        return Node(
            id=claim["id"],
            cloud=self.name,
            owner=claim["owner"],
            cluster=claim["cluster"],
            attempt=claim["attempt"],
            rank=claim["rank"],
            state=NodeState(claim["state"]),
            address=claim["address"],
            region=host.pool,
            zone=claim["zone"],
            token=claim["token"],
            is_spot=claim["is_spot"],
            usd_hour=claim["usd_hour"],
            created_s=claim["asked_s"],
            # By our clock; the host's may differ.
            ended_s=self._clock.now_s() - max(0.0, claim["now_s"] - ended["ended_s"]) if ended else None,
            reason=ended["reason"] if ended else "",
            handle=f"pool://{host.pool}/{host.name}/{claim['id']}" + (f"{UID}{claim['uid']}" if "uid" in claim else ""),
        )

    def _list_hosts(self) -> Sequence[Host]:
        return [host for host in self._read_file() if not host.is_off]

    def _read_file(self) -> Sequence[Host]:
        """Read the file. Raises TransientError if it is invalid: it may be half-written."""
        try:
            return self._read()
        except BrokerError as error:
            raise TransientError(error.message, hints=error.hints) from error

    async def _ask(self, host: Host, verb: str, **fields: object) -> Any:
        found = await ask_host(self._run, host, verb, **fields)
        self._uids[host.key] = found["uid"]
        return found["answer"]

    async def _call_all_hosts(self, verb: str, **fields: object) -> Mapping[Host, Any]:
        return await self._call_hosts(self._list_hosts(), verb, **fields)

    async def _call_hosts(self, hosts: Sequence[Host], verb: str, **fields: object) -> Mapping[Host, Any]:
        """Call hosts concurrently; the value of a host that does not answer is its error."""

        async def call(host: Host) -> Any:
            try:
                return await self._ask(host, verb, **fields)
            except CloudError as error:
                return error

        return dict(zip(hosts, await asyncio.gather(*map(call, hosts)), strict=True))


def make_record(request: NodeRequest, rank: int, host: Host, *, lock: str, now_s: float) -> Mapping[str, object]:
    """Return the record of a claim on its host. The id names the host, so a claim made on two hosts lists two nodes."""
    placement = request.placement
    digest = digest_claim(request.owner, request.token, host)
    return {
        "id": f"{re.sub(r'[^a-zA-Z0-9-]', '-', request.cluster)[:40]}-{request.attempt}-{rank}-{digest}",
        "owner": request.owner,
        "cluster": request.cluster,
        "attempt": request.attempt,
        "rank": rank,
        "token": request.token,
        "zone": placement.offer.zone,
        "is_spot": placement.is_spot,
        "usd_hour": placement.usd_hour / placement.node_count,
        "asked_s": now_s,
        "labels": dict(request.spec.labels),
        "address": host.name,
        "host_lock": lock,
    }


def digest_claim(owner: str, token: str, host: Host) -> str:
    """Return the end of the id of a claim that was made under this name of its host."""
    return hashlib.sha256(f"{owner}\0{token}\0{host.key}".encode()).hexdigest()[:10]


def make_removal(what: str, node: Node | None = None) -> AuthError:
    """Return the error for nodes on a host that the file no longer lists: their programs may still run there."""
    whose = f"node `{node.id}`" if node else "nodes there"
    return AuthError(
        f"{what} is no longer in `ssh_pools.yaml`, so {whose} can be neither checked nor terminated",
        hints=(
            "add the host to `ssh_pools.yaml` again; remove it after its nodes have ended",
            REALLY_OFF,
        ),
    )


def split_handle(node: Node) -> tuple[str, str, str]:
    """Return pool, host and claim of a node: `pool://POOL/HOST/NODE`."""
    pool, _, rest = node.handle.removeprefix("pool://").partition("/")
    name, _, _ = rest.rpartition("/")
    return pool, name, node.id
