"""A cloud under test and its provider, for the contract of all clouds and for the adapters' own tests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from broker.clock import Clock
from broker.clouds.base import CanStop, Cloud
from broker.types import Node, NodeRequest, NodeState, Offer, Placement

OWNER = "0123456789ab"
TOKENS = itertools.count(1)
POLLS_MAX = 2000


def make_node(node_id: str, *, cloud: str = "aws") -> Node:
    """Make a node from its id alone, as a record might name it."""
    return Node(id=node_id, cloud=cloud, owner=OWNER, cluster="c", attempt=1, rank=0, state=NodeState.RUNNING)


class Bed:
    """A cloud under test. `offer` has a zone and both prices; `clock` is the cloud's clock."""

    cloud: Cloud
    clock: Clock
    offer: Offer
    look_s = 0.05  # between two looks, by `clock`
    has_machines = True  # False: nodes on paper, without addresses

    def reopen(self) -> Cloud:
        """Make the adapter as another process would, over the same machines."""
        pytest.skip("this bed has one process only")

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    def fill(self) -> None:
        """Leave no machine in the offer's zone from now on."""
        pytest.skip("this provider never runs out")

    def exhaust_quota(self) -> None:
        """Exhaust the account's quota for such machines in the region."""
        pytest.skip("this provider has no quotas")

    def log_out(self) -> None:
        pytest.skip("this provider needs no login")

    def lose_next_answer(self) -> None:
        """Carry out the next create, and lose its response."""
        pytest.skip("this provider's answers are never lost")

    def throttle_next_create(self) -> None:
        """Throttle the next create."""
        pytest.skip("this provider does not throttle")

    def leave_room(self, count: int) -> None:
        """Leave this many machines in the offer's zone."""
        pytest.skip("this provider's machines are not counted")

    def list_orphans(self) -> Sequence[str]:
        """List the provider's resources of `OWNER` other than machines that are billed or use a limit."""
        pytest.skip("this provider has nothing but machines")

    def list_untagged(self) -> Sequence[str]:
        """List resources without an owner's tag."""
        pytest.skip("this provider has no tags")

    async def preempt(self, node: Node) -> None:
        pytest.skip("this provider never preempts")

    async def kill_newborn(self, node: Node) -> str:
        """Terminate a machine before it runs; return the provider's reason, or a part of it."""
        pytest.skip("machines of this provider run as soon as they are there")

    async def end_from_inside(self, node: Node) -> None:
        """Shut the machine down from inside, as its agent does when the lease expires."""
        pytest.skip("machines of this bed have no inside")


def make_request(bed: Bed, *, token: str = "", cluster: str = "train", **more: Any) -> NodeRequest:
    """Make a request with `node_count`, `is_spot`, and any field of NodeRequest."""
    placement = Placement(offer=bed.offer, is_spot=more.pop("is_spot", False), node_count=more.pop("node_count", 1))
    fields = {"owner": OWNER, "attempt": 1, "placement": placement, **more}
    return NodeRequest(cluster=cluster, token=token or f"{next(TOKENS):032x}", **fields)


async def list_of(bed: Bed, token: str, owner: str = OWNER) -> Sequence[Node]:
    found = [node for node in await bed.cloud.list_nodes(owner) if node.token == token]
    return sorted(found, key=lambda node: node.rank)


async def wait_for(bed: Bed, token: str, is_so: Callable[[Sequence[Node]], bool]) -> Sequence[Node]:
    """Return the nodes of this token once they are in the given state."""
    nodes: Sequence[Node] = ()
    for _ in range(POLLS_MAX):
        nodes = await list_of(bed, token)
        if nodes and is_so(nodes):
            return nodes
        await bed.clock.sleep(bed.look_s)
    raise AssertionError(f"never came true for {nodes}")


async def wait_for_none(bed: Bed, token: str) -> None:
    """Wait until no node of this token is listed: a part of a gang that could not be created is deleted."""
    await settle(bed)
    for _ in range(POLLS_MAX):
        if not (nodes := await list_of(bed, token)):
            return
        await bed.clock.sleep(bed.look_s)
    raise AssertionError(f"still listed: {nodes}")


async def wait_state(bed: Bed, token: str, state: NodeState, count: int = 1) -> Sequence[Node]:
    return await wait_for(bed, token, lambda nodes: len(nodes) == count and all(node.state is state for node in nodes))


async def settle(bed: Bed) -> None:
    """Wait until lists are complete."""
    await bed.clock.sleep(bed.cloud.settle_s)


async def count_living(bed: Bed) -> int:
    await settle(bed)
    return sum(node.state is not NodeState.TERMINATED for node in await bed.cloud.list_nodes(OWNER))


def find_stopper(bed: Bed) -> CanStop:
    if not isinstance(bed.cloud, CanStop):
        pytest.skip(f"{bed.cloud.name} cannot stop nodes")
    return bed.cloud
