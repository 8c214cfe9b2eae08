"""Fill the state of this world from parts that ranks kept in memory, however the last world had divided it.

Tensors are transferred one at a time, and each rank receives only the elements that it holds from now on. Example: a
tensor of 6 rows, of which three ranks held two each; rank 1 is lost, and rank 2 has the copy of its rows:

    held     rank 0: rows 0-1     rank 2: rows 2-3 (of rank 1), 4-5
    wanted   rank 0: rows 0-2     rank 1 (formerly 2): rows 3-5     row 2 is sent, the rest is copied
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.optimizer import local
from trainers.peer_memory import Box, PartMemory, Path, find_box
from trainers.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The description of a part in a rank's memory, as announced to the other ranks."""

    world: str
    step: int
    index: int
    count: int
    boxes: tuple[tuple[Path, Box], ...]
    is_own: bool  # whether the part includes what all ranks of its world had

    @property
    def version(self) -> tuple[int, str, int]:
        """Parts of equal versions belong together; newer ones compare greater."""
        return self.step, self.world, self.count


def describe(memory: PartMemory) -> Kept:
    """Return the description of a complete memory."""
    header = memory.header
    assert header is not None, "only complete memory is kept"
    pieces = memory.list_pieces()
    return Kept(
        world=header.world,
        step=header.step,
        index=header.index,
        count=header.count,
        boxes=tuple((piece.path, piece.box) for piece in pieces),
        is_own=len(pieces) == len(header.pieces),
    )


def find_newest_version(kept: Iterable[Kept]) -> tuple[int, str, int] | None:
    """Return the newest version of which all parts are in memory; None if there is none."""
    indexes_held: dict[tuple[int, str, int], set[int]] = {}
    with_common = set()
    for each in kept:
        indexes_held.setdefault(each.version, set()).add(each.index)
        if each.is_own:
            with_common.add(each.version)
    complete = [version for version in with_common if len(indexes_held[version]) == version[2]]
    return max(complete, default=None)


@dataclass(frozen=True, kw_only=True)
class Move:
    """Elements that one rank has and another one needs. `number` distinguishes the moves between the same two ranks."""

    source: int
    target: int
    held: Box  # the box in which the source has them
    box: Box
    number: int


def plan_moves(held: Mapping[Box, Sequence[int]], wanted: Sequence[Box | None]) -> Iterator[Move]:
    """Plan the moves of one tensor. `held` gives the ranks that have each box; `wanted` is the box of each rank.

    A rank takes from its own memory what it has; other elements come from their holders in turn.
    """
    for number, (box_held, holders) in enumerate(sorted(held.items())):
        for target, box_wanted in enumerate(wanted):
            overlap = None if box_wanted is None else box_held.intersect(box_wanted)
            if overlap is not None:
                source = target if target in holders else holders[target % len(holders)]
                yield Move(source=source, target=target, held=box_held, box=overlap, number=number)


def transfer_parts(
    ranks: Ranks,
    group: Any,
    version: tuple[int, str, int],
    memories: Sequence[PartMemory],
    everyone: Sequence[Sequence[Kept]],
    live: Mapping[Path, Tensor],
) -> None:
    """Copy the state of a version into the live tensors of every rank. A collective call.

    `memories` are those of this rank, `everyone` has the descriptions of all ranks' memories.
    """
    holders: dict[Path, dict[Box, list[int]]] = {}
    for rank, parts in enumerate(everyone):
        for part in parts:
            for path, box in part.boxes if part.version == version else ():
                holders.setdefault(path, {}).setdefault(box, []).append(rank)
    mine: dict[tuple[Path, Box], Tensor] = {}
    for memory in memories:
        if describe(memory).version == version:
            mine.update({(piece.path, piece.box): memory.view(piece) for piece in memory.list_pieces()})
    boxes = {path: find_box(tensor) for path, tensor in live.items() if local(tensor).numel()}
    wanted = ranks.collect(boxes)
    for path in sorted(holders):
        moves = plan_moves(holders[path], [each.get(path) for each in wanted])
        own = [move for move in moves if ranks.rank in (move.source, move.target)]
        _move(own, path, mine, live, boxes.get(path), rank=ranks.rank, group=group)


def _move(
    moves: Sequence[Move],
    path: Path,
    mine: Mapping[tuple[Path, Box], Tensor],
    live: Mapping[Path, Tensor],
    box: Box | None,
    *,
    rank: int,
    group: Any,
) -> None:
    """Make this rank's moves of one tensor. All are started before any is awaited, so ranks cannot block each other."""
    works: list[Any] = []
    values: list[tuple[Move, Tensor]] = []
    for move in moves:
        if move.source == rank:
            value = mine[path, move.held][move.box.slice(move.held)]
            if move.target == rank:
                values.append((move, value))
            else:
                works.append(dist.isend(to_bytes(value.contiguous()), move.target, group=group, tag=move.number))
        else:
            arriving = torch.empty(move.box.shape, dtype=local(live[path]).dtype)
            works.append(dist.irecv(to_bytes(arriving), move.source, group=group, tag=move.number))
            values.append((move, arriving))
    for work in works:
        work.wait()
    with torch.no_grad():
        for move, value in values:
            assert box is not None, "only wanted elements arrive"
            local(live[path])[move.box.slice(box)].copy_(value)


def to_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, which gloo can send regardless of its dtype."""
    return tensor.view(-1).view(torch.uint8)
