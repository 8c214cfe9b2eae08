"""Peer checkpoints: each rank's part of the state, copied to the memory of another node while training continues.

A part that exists once is lost with its rank. With a copy on another node, a lost node costs only the steps since the
last copy. A copy of step n, with two ranks on two nodes:

    rank 0   own part -> memory | send it to rank 1, receive rank 1's | wait until all ranks have done so
    rank 1   own part -> memory | send it to rank 0, receive rank 0's | wait until all ranks have done so

Every rank has two memories for its own part and two for each part that it receives, used in turns. The older ones are
overwritten only after all ranks have the newer, so at any moment one step is complete in the memory of all nodes but
one. The memory outlives the program, which restarts when the ranks change (`elastic.py`).
"""

import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.extra_state import pack_extra_state, read_extra_state, unpack_extra_state
from trainers.live_state import find_buffers
from trainers.optimizer import local
from trainers.peer_memory import Header, PartMemory, Path, Piece, find_end, iterate_values, lay_out, open_memory
from trainers.peer_transfer import describe, find_newest_version, transfer_parts
from trainers.ranks import Ranks
from trainers.snapshot import CudaStreams, HostStreams, Snapshot, find_addresses, hold_still

# Larger messages are split.
MESSAGE_BYTES_MAX = 2**30


class PeerCheckpoint:
    """The copies of one rank's part, and of the parts of others that it keeps. Created by all ranks together."""

    def __init__(
        self,
        ranks: Ranks,
        shared: Mapping[str, Any],
        *,
        every_steps: int,
        node: str,
        inherited: Sequence[int] = (),
        timeout_s: float = 0.0,
    ) -> None:
        """Copy `shared` state after every `every_steps` steps. `node` names this rank's node.

        `inherited` are descriptors of memory from the previous world; `timeout_s` limits the wait for a peer.
        """
        self._ranks, self._shared, self._every_steps = ranks, shared, every_steps
        # Requested in the middle of a step, the state dict of a sharded module would reshard its parameters.
        self._fixed = {
            key: pack_extra_state(holder.state_dict(keep_vars=True))
            for key, holder in shared.items()
            if isinstance(holder, torch.nn.Module)
        }
        self._group = None if ranks.world_size == 1 else ranks.open_group(timeout_s)
        self._world = ranks.share(uuid.uuid4().hex[:8])
        self._pieces, self._sent_bytes = lay_out(self._read_state()[0])
        told = ranks.collect((node, self._sent_bytes))
        self._targets = choose_targets([name for name, _ in told])
        sources = [rank for rank, target in enumerate(self._targets) if target == ranks.rank]
        is_cuda = ranks.device.type == "cuda"
        own_bytes = max(find_end(self._pieces), self._sent_bytes)
        self._own = [PartMemory(own_bytes, is_pinned=is_cuda) for _ in range(2)]
        self._received = [{source: PartMemory(told[source][1]) for source in sources} for _ in range(2)]
        self._inherited = [open_memory(descriptor) for descriptor in inherited]
        streams = CudaStreams(ranks.device) if is_cuda else HostStreams()
        self._snapshots = [
            Snapshot(streams, buffers={(name_piece(piece),): memory.view(piece) for piece in self._pieces})
            for memory in self._own
        ]
        self._turn = 0
        self._step: int | None = None  # the step of the last copy
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._lock = threading.Lock()  # held while memory becomes incomplete

    def restore(self, step_min: int) -> int | None:
        """Load the newest state that the ranks have in memory; return its step. A collective call.

        Returns None, without effect, if no complete state of step `step_min` or later is in memory.
        """
        everyone = self._ranks.collect([describe(memory) for memory in self._inherited])
        version = find_newest_version(part for parts in everyone for part in parts)
        if version is None or version[0] < step_min:
            return None
        mine = [each.header.others for each in self._inherited if each.header and describe(each).version == version]
        others: Mapping[Path, Any] = next(each[0] for each in self._ranks.collect(mine) if each)
        states = pack_extra_state({key: holder.state_dict() for key, holder in self._shared.items()})
        live = {path: value for path, value in iterate_values(states) if isinstance(value, Tensor)}
        transfer_parts(self._ranks, self._group, version, self._inherited, everyone, live)
        for key, holder in self._shared.items():
            holder.load_state_dict(unpack_extra_state(_replace(states[key], (key,), others)))
        # Later losses must not accumulate memory; these parts are needed until this world has copies of its own.
        self._release_inherited(except_version=version)
        return version[0]

    def is_due(self, step: int) -> bool:
        """Return whether the state is copied after this step."""
        return self._ranks.world_size > 1 and step % self._every_steps == 0

    def begin(self, step: int) -> None:
        """Copy the state of this step in the background. Wait for a copy in progress first. All ranks call it.

        No tensor of the state may change before `wait_for_copy` returns. Raises the error of the previous copy: a peer
        was lost.
        """
        self.wait()
        self._turn = 1 - self._turn
        with self._lock:
            for memory in (self._own[self._turn], *self._received[self._turn].values()):
                memory.clear()
        tensors, others = self._read_state()
        live = {name_piece(piece): local(tensors[piece.path]) for piece in self._pieces}
        modules = [self._shared[key] for key in self._fixed]
        live = hold_still(live, find_addresses(buffer for module in modules for buffer in module.buffers()))
        header = Header(
            world=self._world,
            step=step,
            index=self._ranks.rank,
            count=self._ranks.world_size,
            pieces=self._pieces,
            others=others,
        )
        self._step = step
        self._thread = threading.Thread(target=self._copy, args=(self._turn, live, header), name=f"peer-{step}")
        self._snapshots[self._turn].begin()
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Block until the state may change: it has been copied, though perhaps not sent."""
        self._snapshots[self._turn].wait_for_copy()

    def wait(self) -> None:
        """Wait until all ranks have the current copy; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def secure(self, step: int, *, is_leaving: bool) -> bool:
        """Copy the state of this step, unless that was done; return whether it survives the leaving of some ranks.

        A collective call. A leaving rank's part survives if the rank that has its copy stays.
        """
        if self._step != step:
            self.begin(step)
        self.wait()
        leaving = self._ranks.collect(is_leaving)
        return all(self._targets and not leaving[self._targets[rank]] for rank, leaves in enumerate(leaving) if leaves)

    def hold(self) -> list[int]:
        """Return the descriptors of all complete memory, from now on unchanged: the program is about to restart."""
        self._lock.acquire()  # never released
        received = [memory for memories in self._received for memory in memories.values()]
        return [each.descriptor for each in (*self._inherited, *self._own, *received) if each.header is not None]

    def _read_state(self) -> tuple[dict[Path, Tensor], dict[Path, Any]]:
        """Return tensors and other values of the state, by path."""
        states = {
            key: {
                **self._fixed[key],
                **find_buffers(holder, self._fixed[key]),
                **read_extra_state(holder, self._fixed[key]),
            }
            if key in self._fixed
            else holder.state_dict()
            for key, holder in self._shared.items()
        }
        tensors: dict[Path, Tensor] = {}
        others: dict[Path, Any] = {}
        for path, value in iterate_values(states):
            if isinstance(value, Tensor):
                tensors[path] = value.detach()
            else:
                others[path] = value
        return tensors, others

    def _copy(self, turn: int, live: dict[str, Tensor], header: Header) -> None:
        """Copy this rank's part, exchange it, and wait for the others; keep an error for the next `wait`."""
        try:
            self._snapshots[turn].take(live)
            content = header.encode()
            self._own[turn].complete(content)
            if self._group is not None:
                self._exchange(self._own[turn], content, self._received[turn])
                dist.barrier(self._group)
            self._release_inherited()  # all ranks have a complete copy of this world
        except BaseException as error:
            self._failure = error

    def _exchange(self, own: PartMemory, content: bytes, received: Mapping[int, PartMemory]) -> None:
        """Send this rank's part to its target, and receive the parts of others. Lengths of headers travel first."""
        target = self._targets[self._ranks.rank]
        header = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        lengths = {source: torch.zeros(1, dtype=torch.int64) for source in received}
        works = [self._send(torch.tensor([len(content)]), target)]
        works += [self._receive(length, source) for source, length in lengths.items()]
        _wait(works)
        headers = {source: torch.zeros(int(length), dtype=torch.uint8) for source, length in lengths.items()}
        works = [self._send(header, target)]
        works += [self._receive(place, source) for source, place in headers.items()]
        # The target has reserved memory for the pieces that other ranks lack.
        works += [self._send(part, target) for part in own.data[: self._sent_bytes].split(MESSAGE_BYTES_MAX)]
        for source, memory in received.items():
            works += [self._receive(part, source) for part in memory.data.split(MESSAGE_BYTES_MAX)]
        _wait(works)
        for source, memory in received.items():
            memory.complete(headers[source].numpy().tobytes())

    def _send(self, tensor: Tensor, target: int) -> Any:
        return dist.isend(tensor, target, group=self._group)

    def _receive(self, tensor: Tensor, source: int) -> Any:
        return dist.irecv(tensor, source, group=self._group)

    def _release_inherited(self, except_version: tuple[int, str, int] | None = None) -> None:
        """Release memory of previous worlds."""
        with self._lock:
            released = [memory for memory in self._inherited if describe(memory).version != except_version]
            self._inherited = [memory for memory in self._inherited if memory not in released]
        for memory in released:
            memory.close()


def choose_targets(nodes: Sequence[str]) -> list[int]:
    """Return the rank that keeps the copy of each rank's part, given their nodes; empty for a single rank.

    It is on another node if there is one, and all ranks keep as equal numbers of copies as possible. Two nodes with two
    ranks each: `[2, 3, 0, 1]`.
    """
    count = len(nodes)
    targets: list[int] = []
    for rank in range(count if count > 1 else 0):
        elsewhere = [other for other in range(count) if nodes[other] != nodes[rank]]
        others = elsewhere or [other for other in range(count) if other != rank]
        targets.append(min(others, key=lambda other: (targets.count(other), (other - rank) % count)))
    return targets


def name_piece(piece: Piece) -> str:
    """Return the name of a piece in a snapshot."""
    return "/".join(piece.path)


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


def _replace(state: Any, path: Path, others: Mapping[Path, Any]) -> Any:
    """Return a live state, whose tensors are filled already, with the other values of a kept one."""
    if isinstance(state, dict):
        return {key: _replace(value, (*path, key), others) for key, value in state.items()}
    return state if isinstance(state, Tensor) else others[path]
