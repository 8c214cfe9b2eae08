"""Transfer the state of an elastic run from the memory of survivors to the ranks of its next world.

Each rank kept only its own part, so the state is complete if every part is held by some rank, at one step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.extra_state import pack_extra_state, unpack_extra_state
from trainers.optimizer import local
from trainers.ranks import Ranks
from trainers.strategies.grid import Part


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The part of the state that a rank kept from an earlier world, and its step.

    A rank that was left behind, because its machine was paused, may hold the same step of another world than the rest.
    """

    step: int  # -1 for nothing
    world: int = 0  # the name of the one that computed the step
    part: Part

    @property
    def version(self) -> tuple[int, int]:
        """Parts of equal versions belong together; newer ones compare greater."""
        return self.step, self.world


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One rank sends a part, which it holds by then, to another."""

    source: int
    target: int
    index: int


def transfer_state(
    ranks: Ranks, part: Part, holdings: Sequence[Holding], kept: Callable[[], Any], shared: Mapping[str, Any]
) -> tuple[int, int] | None:
    """Load the newest complete state; return its step and world, or None if there is none. A collective call.

    `holdings` are those of all ranks, `kept` reads this rank's own state, and `part` is the part that it holds from now
    on.
    """
    version = find_version(holdings, part.count)
    if version is None:
        return None
    live = pack_extra_state({key: holder.state_dict() for key, holder in shared.items()})
    held: dict[int, Any] = {}  # index of a part -> its state
    mine = holdings[ranks.rank]
    if mine.version == version:
        held[mine.part.index] = kept()
    if part.index in held:
        held[part.index] = fill(live, held[part.index])
    for transfer in plan_transfers(holdings, version, ranks.collect(part.index)):
        if ranks.rank == transfer.source:
            send(held[transfer.index], transfer.target, ranks)
        elif ranks.rank == transfer.target:
            held[transfer.index] = receive(live, transfer.source, ranks)
    for key, state in held[part.index].items():
        shared[key].load_state_dict(unpack_extra_state(state))
    return version


def find_version(holdings: Sequence[Holding], count: int) -> tuple[int, int] | None:
    """Return the newest version of which all `count` parts are held; None if there is none."""
    indexes_held: dict[tuple[int, int], set[int]] = {}
    for holding in holdings:
        if holding.step >= 0 and holding.part.count == count:
            indexes_held.setdefault(holding.version, set()).add(holding.part.index)
    return max((version for version, indexes in indexes_held.items() if len(indexes) == count), default=None)


def plan_transfers(holdings: Sequence[Holding], version: tuple[int, int], wanted: Sequence[int]) -> list[Transfer]:
    """Return the transfers between ranks, in an order without deadlock. `wanted` is the index of each rank's part.

    A rank that has received a part forwards it, so a part on a single rank reaches n ranks in log2(n) rounds.
    """
    transfers = []
    for index in sorted(set(wanted)):
        holders = [
            rank for rank, holding in enumerate(holdings) if holding.version == version and holding.part.index == index
        ]
        waiting = [rank for rank, index_wanted in enumerate(wanted) if index_wanted == index and rank not in holders]
        while waiting:
            pairs = [
                Transfer(source=source, target=target, index=index)
                for source, target in zip(holders, waiting, strict=False)
            ]
            transfers += pairs
            holders, waiting = holders + waiting[: len(pairs)], waiting[len(pairs) :]
    return transfers


def keep(state: Any) -> Any:
    """Return the state without DTensors: of a sharded tensor, only the shard on this rank."""
    if isinstance(state, dict):
        return {key: keep(value) for key, value in state.items()}
    return local(state).detach() if isinstance(state, Tensor) else state


def fill(live: Any, kept: Any) -> Any:
    """Return the live state with the values of a kept one; tensors are copied in place."""
    if isinstance(live, dict):
        return {key: fill(value, kept[key]) for key, value in live.items()}
    if not isinstance(live, Tensor):
        return kept
    with torch.no_grad():
        local(live).copy_(kept)
    return live


def send(state: Any, target: int, ranks: Ranks) -> None:
    """Send a state to another rank: numbers and text in one message, then the tensors."""
    tensors, others = flatten(state)
    dist.send_object_list([others], dst=target, group=ranks.background_group)
    for tensor in tensors:
        dist.send(local(tensor).detach().to(ranks.device).contiguous(), dst=target)


def receive(live: Any, source: int, ranks: Ranks) -> Any:
    """Receive a state from another rank; return the live state with its values."""
    box: list[Any] = [None]
    dist.recv_object_list(box, src=source, group=ranks.background_group)
    others = iter(box[0])

    def take(place: Any) -> Any:
        if isinstance(place, dict):
            return {key: take(value) for key, value in place.items()}
        if not isinstance(place, Tensor):
            return next(others)
        arrived = torch.empty_like(
            local(place), device=ranks.device, memory_format=torch.contiguous_format
        )  # NCCL receives on the GPU, though offloaded state is in CPU memory
        dist.recv(arrived, src=source)
        return fill(place, arrived)

    return take(live)


def flatten(state: Any) -> tuple[list[Tensor], list[Any]]:
    """Return the tensors and all other values of nested dicts, each in order."""
    if isinstance(state, Tensor):
        return [state], []
    if not isinstance(state, dict):
        return [], [state]
    parts = [flatten(part) for part in state.values()]
    return [item for tensors, _ in parts for item in tensors], [item for _, others in parts for item in others]
