"""The base of all decoder-only transformers here: tokens in, blocks, logits out, and where that may be cut.

Plain PyTorch: no strategy, precision or device is known here.
"""

import copy
import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from trainers.config import ModelConfig
from trainers.fused_loss import Head
from trainers.models.cuts import Slicing
from trainers.packing import Packing

# One id for each value of a byte, where a config does not say.
VOCABULARY_DEFAULT = 256


class Decoder(nn.Module):
    """Maps token ids `[batch, time]` to logits of the next `[batch, time, vocabulary]`."""

    def __init__(self, config: ModelConfig, blocks: list[nn.Module], norm: nn.Module) -> None:
        """Put the parts together; a subclass may add more and then calls `draw_weights`."""
        super().__init__()
        self.seed = torch.initial_seed()
        # A stage of a pipeline may lack what comes before the blocks, or after them.
        self.token_embedding: nn.Embedding | None
        self.norm: nn.Module | None
        self.head: Head | None
        self.vocabulary = config.vocabulary or VOCABULARY_DEFAULT
        self.token_embedding = nn.Embedding(self.vocabulary, config.width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = Head(config.width, self.vocabulary, bias=False)
        if config.tie_embeddings:
            self._tie()

    def forward(
        self, tokens: Tensor, *, packing: Packing | None = None, targets: Tensor | None = None, z_weight: float = 0.0
    ) -> Tensor:
        """Predict, at every position, the token that follows it.

        `packing` keeps documents of one window apart. With `targets` the result is the mean loss, a scalar.
        """
        hidden = tokens if self.token_embedding is None else self.embed(tokens, packing)
        for block in self.blocks:
            hidden = block(hidden) if packing is None else block(hidden, packing)
        if self.head is None or self.norm is None:
            return hidden
        outputs: Tensor = (
            self.head(self.norm(hidden)) if targets is None else self.head(self.norm(hidden), targets, z_weight)
        )
        return outputs

    def embed(self, tokens: Tensor, packing: Packing | None = None) -> Tensor:
        """Return what enters the first block."""
        assert self.token_embedding is not None, "the first stage embeds"
        hidden: Tensor = self.token_embedding(tokens)
        return hidden

    def slicings(self) -> dict[str, Slicing]:
        """Return the cuts that tensor parallelism may make: the head, over the vocabulary."""
        return {"head": Slicing(way="whole", pieces=self.vocabulary)}

    def cut(self, runs: list[range]) -> list[nn.Module]:
        """Keep these runs of blocks only; see `Segmentable`."""
        segments: list[nn.Module] = [self._segment(run) for run in runs]
        kept = {place for run in runs for place in run}
        for place in range(len(self.blocks)):
            if place not in kept:
                self.blocks[place] = nn.Identity()  # keeps the numbers, and so the names, of the others
        self.drop_ends(is_first=0 in kept, is_last=len(self.blocks) - 1 in kept)
        return segments

    def drop_ends(self, *, is_first: bool, is_last: bool) -> None:
        """Drop the layers before or after the blocks that this rank does not hold."""
        if not is_first:
            self.token_embedding = None
        if not is_last:
            self.norm = self.head = None

    def fill(self, device: torch.device) -> None:
        """Take memory for a model that was made without, on torch's `meta` device, and draw its weights.

        By then it may be spread over ranks: each takes memory for its own part only, and one parameter at a time is
        drawn whole, so that the weights are those of a model that was never spread.
        """
        is_tied = self.head is not None and self.head.weight is getattr(self.token_embedding, "weight", None)
        self.to_empty(device=device)
        if is_tied:  # each of the two was given memory of its own
            self._tie()
        self.draw_weights()

    def _tie(self) -> None:
        assert self.head is not None and self.token_embedding is not None
        self.head.weight = self.token_embedding.weight

    def draw_weights(self) -> None:
        """Fill all parameters. What is drawn depends on the seed and a parameter's name, not on what else there is."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not parameter.is_meta:
                    self._draw(name, parameter)

    def _draw(self, name: str, parameter: Tensor) -> None:
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # as GPT-2; other vectors scale a norm
            return
        if name.endswith("lora_b"):
            parameter.zero_()  # an adapter starts as none
            return
        # Two branches a block add onto the residual stream; shrinking them keeps its variance near one.
        deviation = 0.02 / math.sqrt(2 * len(self.blocks)) if name.endswith("project.weight") else 0.02
        if name.endswith("lora_a"):
            deviation = 1 / math.sqrt(3 * parameter.shape[1])
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest, "big"))
        whole = torch.empty(parameter.shape, device=parameter.device, dtype=parameter.dtype)
        whole.normal_(std=deviation, generator=generator)
        fill_parameter(parameter, whole)

    def _segment(self, run: range) -> "Decoder":
        segment = copy.copy(self)
        segment._modules = dict(self._modules)
        segment.blocks = nn.ModuleList(self.blocks[place] for place in run)
        segment.drop_ends(is_first=run.start == 0, is_last=run.stop == len(self.blocks))
        return segment


def fill_parameter(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter, or the part of it that lies on this rank. Every rank has the same whole."""
    if not hasattr(parameter, "device_mesh"):
        parameter.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor  # imported already where parameters are spread

    spread: Any = parameter
    part: Any = distribute_tensor(whole, spread.device_mesh, spread.placements, src_data_rank=None)  # nothing is sent
    spread.to_local().copy_(part.to_local())
