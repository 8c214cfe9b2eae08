"""Claims of hosts by their answers alone: hosts to avoid, gangs that stay incomplete, silent and fenced hosts."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.clock import SystemClock
from broker.clouds.ssh.check import inspect
from broker.clouds.ssh.cloud import SshCloud
from broker.config import Config
from broker.errors import AuthError, CapacityError, TransientError
from broker.sites.facts import Machine, find_facts, read_facts, write_facts
from broker.sites.login import SshLogin
from broker.sites.openssh import Completed
from broker.sites.pools import Host, list_offers
from broker.types import Node, NodeRequest, NodeState
from tests.clouds.beds import OWNER, make_request

SIZE = Machine(vcpus=4, memory_gib=16)


class AnsweringHosts:
    """Hosts h1, h2 ... that keep their claim in memory. `silent` ones do not answer; `stubborn` claims do not end."""

    def __init__(self, folder: Path, count: int = 3, **host: Any) -> None:
        self.hosts = [
            Host(pool="lab", login=SshLogin(host=f"h{number}"), machine=SIZE, usd_hour=0.1, **host)
            for number in range(1, count + 1)
        ]
        self.claims: dict[str, Any] = {}
        self.silent, self.stubborn = set[str](), set[str]()
        self.folder, self.clock = folder, SystemClock()
        self.cloud = self.make_cloud()

    def make_cloud(self) -> SshCloud:
        return SshCloud(lambda: self.hosts, folder=self.folder, clock=self.clock, run=self.run)

    async def run(self, host: Host, program: bytes, timeout_s: float) -> Completed:
        if host.name in self.silent:
            raise TransientError(f"host `{host.name}` does not answer")
        (call,) = ast.parse(program.decode().rstrip().rpartition("\n")[2]).body
        request = json.loads(ast.literal_eval(call.value.args[0].args[0]))  # type: ignore[attr-defined]
        answer = json.dumps({"answer": self.answer(host.name, request), "uid": 1000})
        return Completed(returncode=0, stdout=answer.encode(), stderr=b"")

    def answer(self, name: str, request: Any) -> Any:
        held = self.claims.get(name)
        if request["verb"] == "list":
            return [held] if held and held["owner"] == request["owner"] else []
        if request["verb"] == "claim":
            if held:
                return {"taken": f"broker of {held['owner']}"}
            self.claims[name] = {**request["record"], "state": "RUNNING", "ended": None, "now_s": 1.0, "uid": 1000}
            return self.claims[name]
        if held and held["id"] in request["ids"] and held["id"] not in self.stubborn:
            del self.claims[name]
        return [each not in self.stubborn for each in request["ids"]]

    def ask(self, node_count: int = 1) -> NodeRequest:
        offer = replace(list_offers(self.hosts)[0], spot_usd_hour=0.03)
        return make_request(SimpleNamespace(offer=offer), node_count=node_count)  # type: ignore[arg-type]

    def create(self, node_count: int = 1) -> Sequence[Node]:
        return asyncio.run(self.cloud.create_nodes(self.ask(node_count)))

    def list_nodes(self) -> Sequence[Node]:
        return asyncio.run(self.cloud.list_nodes(OWNER)).nodes


def show_hosts(nodes: Sequence[Node]) -> list[str]:
    return [node.handle.split("/")[3] for node in nodes]


def test_avoided_host_is_claimed_once_its_time_is_over(tmp_path: Path) -> None:
    pool = AnsweringHosts(tmp_path)
    (first,) = pool.create()
    (second,) = pool.create()
    assert show_hosts([first, second]) == ["h1", "h2"]
    now_s = pool.clock.now_s()
    pool.cloud.avoid_machine(second, until_s=now_s + 3600.0)
    pool.cloud.avoid_machine(first, until_s=now_s + 3600.0)
    asyncio.run(pool.cloud.terminate_nodes([first, second]))
    pool.cloud = pool.make_cloud()  # another process avoids them, too
    assert show_hosts(pool.create()) == ["h3"]
    with pytest.raises(CapacityError, match="h1 has failed a check of its GPUs; h2 has failed"):
        pool.create(2)
    pool.cloud.avoid_machine(first, until_s=now_s - 1.0)
    assert show_hosts(pool.create()) == ["h1"]


def test_gang_that_cannot_be_whole_keeps_no_host(tmp_path: Path) -> None:
    pool = AnsweringHosts(tmp_path)
    pool.create()
    with pytest.raises(CapacityError, match="no 3 free hosts"):
        pool.create(3)
    assert list(pool.claims) == ["h1"]


def test_repeated_request_claims_only_what_is_missing(tmp_path: Path) -> None:
    pool = AnsweringHosts(tmp_path)
    request = pool.ask(2)
    nodes = asyncio.run(pool.cloud.create_nodes(request))
    assert asyncio.run(pool.cloud.create_nodes(request)) == nodes
    del pool.claims["h2"]
    assert [node.rank for node in asyncio.run(pool.cloud.create_nodes(request))] == [0, 1]
    assert list(pool.claims) == ["h1", "h2"]


def test_two_requests_at_once_share_no_host(tmp_path: Path) -> None:
    pool = AnsweringHosts(tmp_path, 2)

    async def act() -> list[Any]:
        asked = (pool.cloud.create_nodes(pool.ask(2)) for _ in range(2))
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second = asyncio.run(act())
    assert show_hosts(first) == ["h1", "h2"] and isinstance(second, CapacityError)
    assert list(pool.claims) == ["h1", "h2"]


def test_every_claim_must_have_ended(tmp_path: Path) -> None:
    pool = AnsweringHosts(tmp_path, 1)
    (node,) = pool.create()
    another = replace(node, id="another-claim")
    pool.stubborn = {node.id}
    with pytest.raises(TransientError, match="do not end"):
        asyncio.run(pool.cloud.terminate_nodes([node, another]))
    pool.stubborn = set()
    asyncio.run(pool.cloud.terminate_nodes([node, another]))
    assert not pool.claims


def test_silent_host_keeps_its_claims_as_last_seen(tmp_path: Path) -> None:
    pool = AnsweringHosts(tmp_path, 2)
    (node,) = pool.create()
    pool.silent = {"h1"}
    found = asyncio.run(pool.cloud.list_nodes(OWNER))
    assert [each.id for each in found.nodes] == [node.id] and list(found.unseen) == ["lab"]
    assert not asyncio.run(pool.cloud.list_nodes("another-owner")).nodes
    with pytest.raises(TransientError):
        asyncio.run(pool.cloud.terminate_nodes([node]))


@pytest.mark.parametrize(("fence", "is_gone"), [(("true",), True), (("false",), False), (("/missing/fence",), False)])
def test_only_a_fence_that_succeeds_confirms_the_end_of_a_silent_host(
    tmp_path: Path, fence: tuple[str, ...], is_gone: bool
) -> None:
    pool = AnsweringHosts(tmp_path, 2, fence=(*fence, "{host}"))
    (node, other) = pool.create(2)
    pool.silent = {"h1"}
    if not is_gone:
        with pytest.raises(TransientError):
            asyncio.run(pool.cloud.terminate_nodes([node]))
    else:
        asyncio.run(pool.cloud.terminate_nodes([node]))
    found = asyncio.run(pool.cloud.list_nodes(OWNER))
    states = {each.id: (each.state, each.reason) for each in found.nodes}
    assert states[other.id] == (NodeState.RUNNING, "")
    assert states[node.id] == ((NodeState.TERMINATED, "fenced") if is_gone else (NodeState.RUNNING, ""))
    assert list(found.unseen) == ([] if is_gone else ["lab"])


def test_hosts_that_were_fenced_are_remembered_one_by_one(tmp_path: Path) -> None:
    pool = AnsweringHosts(tmp_path, 3, fence=("true", "{host}"))
    nodes = pool.create(3)
    pool.silent = {"h1", "h2"}
    for node in nodes[:2]:
        asyncio.run(pool.cloud.terminate_nodes([node]))
    assert [node.state for node in pool.list_nodes()].count(NodeState.TERMINATED) == 2
    pool.silent = {"h2"}
    del pool.claims["h1"]
    assert {node.id: node.state for node in pool.list_nodes()} == {
        nodes[1].id: NodeState.TERMINATED, nodes[2].id: NodeState.RUNNING,
    }, "the first is on again, and has no claim"  # fmt: skip


def test_end_of_a_claim_before_the_fence_keeps_its_reason(tmp_path: Path) -> None:
    pool = AnsweringHosts(tmp_path, 2, fence=("true", "{host}"))
    (node,) = pool.create()
    pool.claims["h1"] |= {"state": "TERMINATED", "ended": {"reason": "lease", "ended_s": 0.0}}
    pool.list_nodes()
    pool.silent = {"h1"}
    asyncio.run(pool.cloud.terminate_nodes([node]))
    assert [(each.state, each.reason) for each in pool.list_nodes()] == [(NodeState.TERMINATED, "lease")]


def test_host_that_is_off_is_not_asked(tmp_path: Path) -> None:
    pool = AnsweringHosts(tmp_path, 2)
    (node,) = pool.create()
    pool.silent = {"h1"}
    pool.hosts = [replace(host, is_off=host.name == "h1") for host in pool.hosts]
    asyncio.run(pool.cloud.terminate_nodes([node]))
    assert not asyncio.run(pool.cloud.list_nodes(OWNER)).unseen


def test_check_of_a_pool_counts_its_cards_and_keeps_what_is_silent(tmp_path: Path) -> None:
    config = Config(home=tmp_path, owner="0wner")
    (tmp_path / "ssh_pools.yaml").write_text("lab:\n  hosts: [h1, h2]\nattic:\n  hosts: [h3]\n")
    facts = find_facts("ssh", tmp_path)
    write_facts(facts, {"lab/h1": SIZE, "lab/h2": SIZE, "lab/gone": SIZE})
    cards = ["NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "Tesla T4"]
    probe = json.dumps({"answer": {"vcpus": 8, "memory_gib": 64, "cards": cards}, "uid": 1000})

    async def run(host: Host, program: bytes, timeout_s: float) -> Completed:
        if host.name != "h1":
            raise AuthError(f"host `{host.name}` refuses the login")
        return Completed(returncode=0, stdout=probe.encode(), stderr=b"")

    results = {each.name: each for each in asyncio.run(inspect(config, clock=SystemClock(), run=run))}
    assert results["lab"].note.startswith("1 of 2 hosts answer: ") and not results["lab"].is_needed
    assert results["attic"].is_needed and not results["attic"].is_ok, "no host of it answers"
    found = read_facts(facts)
    assert set(found) == {"lab/h1", "lab/h2"} and found["lab/h2"] == SIZE
    assert (found["lab/h1"].accelerator, found["lab/h1"].accelerator_count) == ("A100-80GB", 2)
