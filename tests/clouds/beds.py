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
LOOKS_MAX = 2000


def make_node(node_id: str, *, cloud: str = "aws") -> Node:
    """A node by its id alone, as a record might name it."""
    return Node(id=node_id, cloud=cloud, owner=OWNER, cluster="c", attempt=1, rank=0, state=NodeState.RUNNING)


class Bed:
    """A cloud under test. `offer` has a zone and both prices; `clock` is the one that the cloud was given."""

    cloud: Cloud
    clock: Clock
    offer: Offer
    look_s = 0.05  # between two looks, by `clock`
    has_machines = True  # False: nodes on paper, with no address

    def reopen(self) -> Cloud:
        """The adapter as another process makes it, over the same machines."""
        pytest.skip("this bed has one process only")

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    def fill(self) -> None:
        """From now on the offer's zone has no machine left."""
        pytest.skip("this provider never runs out")

    def exhaust_quota(self) -> None:
        """From now on the account may have no more such machines in the region."""
        pytest.skip("this provider has no quotas")

    def log_out(self) -> None:
        pytest.skip("this provider needs no login")

    def lose_next_answer(self) -> None:
        """The next create is carried out and its answer never arrives."""
        pytest.skip("this provider's answers are never lost")

    def throttle_next_create(self) -> None:
        """The next create is refused for its frequency alone."""
        pytest.skip("this provider may be asked as often as one likes")

    def leave_room(self, count: int) -> None:
        """From now on the offer's zone has so many machines left."""
        pytest.skip("this provider's machines are not counted")

    def list_orphans(self) -> Sequence[str]:
        """What the provider has of `OWNER` besides machines that cost or count for something."""
        pytest.skip("this provider has nothing but machines")

    def list_untagged(self) -> Sequence[str]:
        """What was made and does not say whose it is."""
        pytest.skip("this provider has no tags")

    async def preempt(self, node: Node) -> None:
        pytest.skip("this provider takes nothing back")

    async def kill_newborn(self, node: Node) -> str:
        """The provider ends a machine before it runs; returns what it says of it, or a part of that."""
        pytest.skip("machines of this provider run as soon as they are there")

    async def end_from_inside(self, node: Node) -> None:
        """The machine switches itself off, as its agent does when the lease runs out."""
        pytest.skip("machines of this bed have no inside")


def make_request(bed: Bed, *, token: str = "", cluster: str = "train", **more: Any) -> NodeRequest:
    """`node_count`, `is_spot`, and any field of NodeRequest."""
    placement = Placement(offer=bed.offer, is_spot=more.pop("is_spot", False), node_count=more.pop("node_count", 1))
    fields = {"owner": OWNER, "attempt": 1, "placement": placement, **more}
    return NodeRequest(cluster=cluster, token=token or f"{next(TOKENS):032x}", **fields)


async def list_of(bed: Bed, token: str, owner: str = OWNER) -> Sequence[Node]:
    found = [node for node in await bed.cloud.list_nodes(owner) if node.token == token]
    return sorted(found, key=lambda node: node.rank)


async def wait_for(bed: Bed, token: str, is_so: Callable[[Sequence[Node]], bool]) -> Sequence[Node]:
    """Nodes of this token, once they are as wanted."""
    nodes: Sequence[Node] = ()
    for _ in range(LOOKS_MAX):
        nodes = await list_of(bed, token)
        if nodes and is_so(nodes):
            return nodes
        await bed.clock.sleep(bed.look_s)
    raise AssertionError(f"never came true of {nodes}")


async def wait_state(bed: Bed, token: str, state: NodeState, count: int = 1) -> Sequence[Node]:
    return await wait_for(bed, token, lambda nodes: len(nodes) == count and all(node.state is state for node in nodes))


async def settle(bed: Bed) -> None:
    """After this a list has everything."""
    await bed.clock.sleep(bed.cloud.settle_s)


async def count_living(bed: Bed) -> int:
    await settle(bed)
    return sum(node.state is not NodeState.TERMINATED for node in await bed.cloud.list_nodes(OWNER))


def find_stopper(bed: Bed) -> CanStop:
    if not isinstance(bed.cloud, CanStop):
        pytest.skip(f"{bed.cloud.name} cannot stop nodes")
    return bed.cloud
