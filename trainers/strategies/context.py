"""Context parallelism: split each sequence over ranks, for contexts whose activations exceed one device."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainers.data import map_tensors
from trainers.errors import TrainerError
from trainers.models.attention import WholeSequence
from trainers.models.cuts import KnowsSequence
from trainers.recipe import Forward
from trainers.strategies.allreduce import reduce_gradients
from trainers.strategies.base import Passes, Strategy
from trainers.strategies.ring_attention import Ring, attend_in_ring


class ContextParallel(Strategy):
    """Ranks of the axis hold the whole model and compute different parts of the same sequences."""

    AXES = ("context",)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Replace attention and positions by those of the ring. Raises TrainerError if the model lacks support."""
        self._count = self.grid.size("context")
        if self._count == 1:
            return model
        ring = Ring(group=self.grid.group("context"), rank=self.grid.index("context"), count=self._count)
        self._sequence = CutSequence(ring)
        modules = [module for module in model.modules() if isinstance(module, KnowsSequence)]
        if not modules:
            raise TrainerError("this model does not declare how its sequences may be split; `context` cannot be used")
        for module in modules:
            module.sequence = self._sequence
        return model

    def cut(self, passes: Passes) -> Passes:
        """Keep two chunks of every sequence: the mean over them is this rank's part of the mean loss."""
        if self._count == 1:
            return passes
        micro_batches = [
            dataclasses.replace(
                micro_batch,
                inputs=map_tensors(micro_batch.inputs, self._choose),
                targets=map_tensors(micro_batch.targets, self._choose),
                weight=micro_batch.weight / self._count,
            )
            for micro_batch in passes.micro_batches
        ]
        return dataclasses.replace(passes, micro_batches=micro_batches, forward=self._wrap_forward(passes.forward))

    @contextlib.contextmanager
    def micro_step(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Sum gradients over the axis after the last backward pass."""
        if self._count == 1:
            yield
            return
        with self._sequence.active():  # also in the backward pass, in which blocks may be recomputed
            yield
        if last:
            reduce_gradients(
                model.parameters(), self.options.allreduce, group=self.grid.group("context"), divisor=1
            )  # fmt: skip

    def _choose(self, tensor: Tensor) -> Tensor:
        length, pieces = tensor.shape[1], 2 * self._count
        if length % pieces:
            raise TrainerError(f"sequences of {length} tokens cannot be cut into {pieces} equal chunks")
        positions = self._sequence.ring.find_positions(length // self._count, tensor.device)
        return tensor.index_select(1, positions)

    def _wrap_forward(self, forward: Forward) -> Forward:
        def run(model: nn.Module, inputs: Any) -> Any:
            with self._sequence.active():
                return forward(model, inputs)

        return run


class CutSequence(WholeSequence):
    """Passes contain this rank's part of each sequence while `active`, and whole sequences otherwise."""

    def __init__(self, ring: Ring) -> None:
        """Start with whole sequences."""
        super().__init__()
        self.ring = ring
        self._is_active = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Enclose passes over parts of sequences."""
        before, self._is_active = self._is_active, True
        try:
            yield
        finally:
            self._is_active = before

    def find_positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens."""
        return self.ring.find_positions(length, device) if self._is_active else super().find_positions(length, device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, dropout_rate: float = 0.0, mask: Tensor | None = None
    ) -> Tensor:
        """Attend to all earlier positions, on any rank."""
        if not self._is_active:
            return super().attend(query, key, value, dropout_rate=dropout_rate, mask=mask)
        assert mask is None, "document masks need whole windows"
        return attend_in_ring(query, key, value, self.ring, dropout_rate=dropout_rate)
