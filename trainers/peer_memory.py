"""Memory for one rank's part of the state that outlives the program (memfd), and the description of its content."""

import io
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainers.errors import TrainerError
from trainers.optimizer import local

Path = tuple[str, ...]
# Views of every dtype start at a multiple of this.
ALIGNMENT_BYTES = 64
# At the end of the file: length of the data and of the header before it.
FOOTER = struct.Struct("<QQ")


@dataclass(frozen=True, order=True, kw_only=True)
class Box:
    """A part of a tensor: for each dimension the first index and the number of indexes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def intersect(self, other: "Box") -> "Box | None":
        """Return the elements that both have; None if there are none."""
        begins = tuple(map(max, self.offset, other.offset))
        ends = tuple(
            min(first + size, second + length)
            for first, size, second, length in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(offset=begins, shape=shape) if all(size > 0 for size in shape) else None

    def slice(self, within: "Box") -> tuple[slice, ...]:
        """Return the indexes of this box in a tensor that holds the elements of `within`."""
        starts = [mine - base for mine, base in zip(self.offset, within.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor within a part of the state."""

    path: Path
    dtype: str
    box: Box
    start: int  # byte in memory

    @property
    def end(self) -> int:
        """The byte after the last one."""
        element_bytes: int = getattr(torch, self.dtype).itemsize
        return self.start + math.prod(self.box.shape) * element_bytes


@dataclass(frozen=True, kw_only=True)
class Header:
    """The part of the state that a memory holds. Parts with the same world, step and count belong together."""

    world: str  # a random name: steps of different worlds are not bit-identical
    step: int
    index: int
    count: int
    pieces: tuple[Piece, ...]
    others: Mapping[Path, Any]  # values that are not tensors, equal on all ranks

    def encode(self) -> bytes:
        """Return bytes for `decode`."""
        pieces = [(piece.path, piece.dtype, piece.box.offset, piece.box.shape, piece.start) for piece in self.pieces]
        file = io.BytesIO()
        torch.save([self.world, self.step, self.index, self.count, pieces, dict(self.others)], file)
        return file.getvalue()


def decode(content: bytes) -> Header:
    """Return the header that `Header.encode` wrote."""
    world, step, index, count, pieces, others = torch.load(io.BytesIO(content), weights_only=True)
    return Header(
        world=world,
        step=step,
        index=index,
        count=count,
        pieces=tuple(
            Piece(path=path, dtype=dtype, box=Box(offset=offset, shape=shape), start=start)
            for path, dtype, offset, shape, start in pieces
        ),
        others=others,
    )


class PartMemory:
    """Memory for one part. Its content counts only between `complete` and `clear`."""

    def __init__(
        self, data_bytes: int, *, descriptor: int = -1, content: bytes | None = None, is_pinned: bool = False
    ) -> None:
        """Allocate memory, or map that of a descriptor, which is complete and has the header `content`.

        `is_pinned` lets a GPU copy to it asynchronously.
        """
        self.data_bytes = data_bytes
        self.descriptor = descriptor if descriptor >= 0 else os.memfd_create("peer", 0)
        if descriptor < 0:
            os.ftruncate(self.descriptor, data_bytes)
        self._map = mmap.mmap(self.descriptor, data_bytes) if data_bytes else bytearray()
        self.data = torch.frombuffer(self._map, dtype=torch.uint8) if data_bytes else torch.empty(0, dtype=torch.uint8)
        if is_pinned and data_bytes:
            problem = int(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), data_bytes, 0))
            if problem:
                raise TrainerError(f"memory for copies of the state cannot be pinned (CUDA error {problem})")
        self._content = content

    @property
    def header(self) -> Header | None:
        """The description of the data; None while it is incomplete. Decoded when it is needed: not in every step."""
        return None if self._content is None else decode(self._content)

    def view(self, piece: Piece) -> Tensor:
        """Return the tensor of a piece, in this memory."""
        dtype = getattr(torch, piece.dtype)
        return self.data[piece.start : piece.end].view(dtype).view(piece.box.shape)

    def list_pieces(self) -> list[Piece]:
        """Return the pieces in this memory. A peer gets only those that other ranks lack: the first ones."""
        header = self.header
        return [] if header is None else [each for each in header.pieces if each.end <= self.data_bytes]

    def complete(self, content: bytes) -> None:
        """Declare the data complete, and store its header behind it, for `open_memory` in the next program."""
        os.ftruncate(self.descriptor, self.data_bytes)
        footer = FOOTER.pack(self.data_bytes, len(content))
        os.pwrite(self.descriptor, content + footer, self.data_bytes)
        self._content = content

    def clear(self) -> None:
        """Declare the data incomplete: it is about to be overwritten."""
        self._content = None

    def close(self) -> None:
        """Release the memory, once no tensor refers to it."""
        self.clear()
        self.data = torch.empty(0, dtype=torch.uint8)
        self._map = bytearray()
        os.close(self.descriptor)


def open_memory(descriptor: int) -> PartMemory:
    """Open memory that was complete when the program that owned it ended.

    Nothing is written to it: another thread may execute the next program at any moment, which opens it again.
    """
    size = os.fstat(descriptor).st_size
    data_bytes, header_bytes = FOOTER.unpack(os.pread(descriptor, FOOTER.size, size - FOOTER.size))
    return PartMemory(data_bytes, descriptor=descriptor, content=os.pread(descriptor, header_bytes, data_bytes))


def iterate_values(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield all values of nested dicts by their path."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from iterate_values(value, (*path, key))
    else:
        yield path, state


def lay_out(tensors: Mapping[Path, Tensor]) -> tuple[tuple[Piece, ...], int]:
    """Arrange tensors in memory; return their pieces, and the length of those that other ranks lack, which come first.

    Empty tensors have no piece.
    """
    pieces: list[Piece] = []
    start, lengths = 0, []
    for is_split in (True, False):
        for path, tensor in tensors.items():
            if is_split_over_ranks(tensor) == is_split and local(tensor).numel():
                dtype = str(local(tensor).dtype).removeprefix("torch.")
                pieces.append(Piece(path=path, dtype=dtype, box=find_box(tensor), start=start))
                start = -(-pieces[-1].end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        lengths.append(start)
    return tuple(pieces), lengths[0]


def find_end(pieces: Sequence[Piece]) -> int:
    """Return the length of memory for these pieces."""
    return max((piece.end for piece in pieces), default=0)


def is_split_over_ranks(tensor: Tensor) -> bool:
    """Return whether this rank holds only a shard of the tensor."""
    return hasattr(tensor, "placements") and any(place.is_shard() for place in tensor.placements)


def find_box(tensor: Tensor) -> Box:
    """Return the elements of a tensor that this rank holds."""
    if not hasattr(tensor, "placements"):
        return Box(offset=(0,) * tensor.dim(), shape=tuple(tensor.shape))
    sharded: Any = tensor
    (chunk,) = sharded.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    return Box(offset=tuple(chunk.offsets), shape=tuple(chunk.sizes))
