"""The ranks as a grid with one named axis per strategy; later axes vary fastest.

Positions are computed. Process groups are created on first use, by all ranks together.
"""

import math
from dataclasses import dataclass
from typing import Any

from trainers.data import samples_of_rank
from trainers.errors import TrainerError
from trainers.ranks import Ranks

# Ranks that differ along these axes read different samples; along the others, the same ones.
DATA_AXES = ("island", "replicate", "shard", "expert")


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of each batch that a rank reads and reports for."""

    index: int
    count: int  # number of shares of a batch; 0 for a rank that reads no samples
    is_counted: bool = True  # of the ranks that read the same samples, one reports their loss
    draw: int = 0  # ranks with equal values draw equal random numbers

    def find_samples(self, first: int, batch: int) -> range:
        """Return the global indexes of this share of a step's batch. Consecutive shares are contiguous."""
        return samples_of_rank(first, batch, self.index, self.count) if self.count else range(first, first)

    def find_passes(self, first: int, batch: int, micro_batch: int) -> list[tuple[range, float]]:
        """Return the samples of each forward pass of a step, and their weight in the batch.

        Every share makes equally many passes, because some strategies communicate in each: a share without further
        samples repeats its last one with weight 0.
        """
        samples = self.find_samples(first, batch)
        if not samples:
            return []
        largest = math.ceil(batch / self.count)
        passes = []
        for start in range(samples.start, samples.start + largest, micro_batch):
            some = range(start, min(start + micro_batch, samples.stop))
            passes.append((some, len(some) / batch) if some else (samples[-1:], 0.0))
        return passes


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of the whole state that one rank holds. Ranks with the same part hold bit-identical state."""

    index: int
    count: int  # number of parts; 1 if each rank holds everything


class Grid:
    """All ranks, by axis."""

    def __init__(self, ranks: Ranks, axes: tuple[str, ...], mesh: str) -> None:
        """Lay out the ranks as `mesh` says. Raises TrainerError if it does not fit their number."""
        self._ranks = ranks
        self.axes = axes
        self.sizes = parse_mesh(mesh, axes, ranks.world_size, ranks.local_world_size)
        self._device_mesh: Any = None

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; 1 for an axis that the grid lacks."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def index(self, axis: str) -> int:
        """Return this rank's position along an axis."""
        if axis not in self.axes:
            return 0
        place = self.axes.index(axis)
        return self._ranks.rank // math.prod(self.sizes[place + 1 :]) % self.sizes[place]

    def group(self, axis: str) -> Any:
        """Return the process group along an axis; None (all ranks, in torch's API) if the axis spans all ranks."""
        if self.size(axis) == self._ranks.world_size:
            return None
        return self.device_mesh(axis).get_group()

    def device_mesh(self, *axes: str) -> Any:
        """Return the sub-mesh of torch's DeviceMesh along some axes."""
        if self._device_mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            self._device_mesh = init_device_mesh(self._ranks.device.type, self.sizes, mesh_dim_names=self.axes)
        return self._device_mesh if axes == self.axes else self._device_mesh[axes]

    def find_part(self) -> Part | None:
        """Return the part of the state on this rank, which replicas hold too; None without replicas."""
        if "replicate" not in self.axes:
            return None
        index, count = 0, 1
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if axis != "replicate":
                index, count = index * size + self.index(axis), count * size
        return Part(index=index, count=count)

    @property
    def is_whole(self) -> bool:
        """Return whether every rank holds the whole state, for any number of ranks."""
        return self.axes == ("replicate",)

    def name_draws(self) -> str:
        """Return a suffix for random numbers in checkpoints. Ranks restore only those of a layout like theirs.

        Under `tensor`, some ranks must draw equal numbers; everywhere else all draw different ones.
        """
        if self.size("tensor") == 1:
            return ""
        return "".join(f"-{axis}{size}" for axis, size in zip(self.axes, self.sizes, strict=True) if size > 1)

    def find_share(self) -> Share:
        """Return this rank's share where every data axis divides the samples."""
        index, count, draw = 0, 1, 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if axis in DATA_AXES:
                index, count = index * size + self.index(axis), count * size
            # Ranks with slices of one layer must drop the same activations of the common parts.
            if axis != "tensor":
                draw = draw * size + self.index(axis)
        # Only the last stage of a pipeline has the loss.
        is_counted = self.index("tensor") == 0 and self.index("pipeline") == self.size("pipeline") - 1
        return Share(index=index, count=count, is_counted=is_counted, draw=draw)


def parse_mesh(text: str, axes: tuple[str, ...], world_size: int, local_world_size: int) -> tuple[int, ...]:
    """Return the sizes of the axes. Without a text, the last axis is within a node and the first spans the nodes."""
    if not text:
        if len(axes) == 1:
            return (world_size,)
        inner = local_world_size if world_size % local_world_size == 0 else world_size
        return (world_size // inner, *(1 for _ in axes[2:]), inner)
    words = text.split("x")
    if len(words) != len(axes):
        raise TrainerError(
            f"`--mesh {text}` has {len(words)} axes, but the strategy has {len(axes)}: {' x '.join(axes)}"
        )
    if words.count("*") > 1 or not all(word == "*" or (word.isdecimal() and int(word) > 0) for word in words):
        raise TrainerError(f"`--mesh {text}` is not like `2x4` or `*x4`")
    fixed = math.prod(int(word) for word in words if word != "*")
    if world_size % fixed or ("*" not in words and fixed != world_size):
        reason = "a multiple of " if "*" in words else ""
        raise TrainerError(
            f"`--mesh {text}` is for {reason}{fixed} ranks and there are {world_size}; "
            "with `*` for one axis it follows the number of ranks"
        )
    return tuple(world_size // fixed if word == "*" else int(word) for word in words)
