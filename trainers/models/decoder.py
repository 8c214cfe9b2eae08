"""The base class of decoder-only transformers: embedding, blocks, output layer, and how they may be split.

This is plain PyTorch, independent of strategy, precision and device.
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

# One id per byte value, if the config has no vocabulary.
VOCABULARY_DEFAULT = 256


class Decoder(nn.Module):
    """Maps token ids `[batch, time]` to logits of the next token, `[batch, time, vocabulary]`."""

    def __init__(self, config: ModelConfig, blocks: list[nn.Module], norm: nn.Module) -> None:
        """Assemble the parts. A subclass may add others, and then calls `draw_weights`."""
        super().__init__()
        self.seed = torch.initial_seed()
        # A pipeline stage may lack the layers before or after the blocks.
        self.token_embedding: nn.Embedding | None
        self.norm: nn.Module | None
        self.head: Head | None
        self.vocabulary = config.vocabulary or VOCABULARY_DEFAULT
        self.token_embedding = make_embedding(self.vocabulary, config.width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = Head(config.width, self.vocabulary, bias=False)
        if config.tie_embeddings:
            self._tie()

    def forward(
        self, tokens: Tensor, *, packing: Packing | None = None, targets: Tensor | None = None, z_weight: float = 0.0
    ) -> Tensor:
        """Return logits for the token after each position, or, given `targets`, the mean loss, a scalar.

        `packing` separates the documents within a window.
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
        """Return the input of the first block, `[batch, time, width]`."""
        assert self.token_embedding is not None, "only the first stage has the embedding"
        hidden: Tensor = self.token_embedding(tokens)
        return hidden

    def slicings(self) -> dict[str, Slicing]:
        """Return the layers that tensor parallelism may shard: the head, along the vocabulary."""
        return {"head": Slicing(way="whole", pieces=self.vocabulary)}

    def cut(self, runs: list[range]) -> list[nn.Module]:
        """Keep these runs of blocks only; see `Segmentable`."""
        segments: list[nn.Module] = [self._segment(run) for run in runs]
        kept = {place for run in runs for place in run}
        for place in range(len(self.blocks)):
            if place not in kept:
                self.blocks[place] = nn.Identity()  # preserves the indexes, and so the names, of the others
        self.drop_ends(is_first=0 in kept, is_last=len(self.blocks) - 1 in kept)
        return segments

    def drop_ends(self, *, is_first: bool, is_last: bool) -> None:
        """Drop the layers before or after the blocks unless this rank has the first or the last stage."""
        if not is_first:
            self.token_embedding = None
        if not is_last:
            self.norm = self.head = None

    def fill(self, device: torch.device) -> None:
        """Allocate a model that was created on the `meta` device, and draw its weights.

        If it is sharded by then, each rank allocates only its own shards. Parameters are drawn whole, one at a time, so
        that the weights equal those of a model that was never sharded.
        """
        is_tied = self.head is not None and self.head.weight is getattr(self.token_embedding, "weight", None)
        allocate(self, device)
        if is_tied:  # `to_empty` allocated the two separately
            self._tie()
        self.draw_weights()

    def _tie(self) -> None:
        assert self.head is not None and self.token_embedding is not None
        self.head.weight = self.token_embedding.weight

    def draw_weights(self) -> None:
        """Draw all parameters. The values depend only on the seed and the name of each parameter."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not parameter.is_meta:
                    self._draw(name, parameter)

    def _draw(self, name: str, parameter: Tensor) -> None:
        if parameter.dim() < 2:
            parameter.fill_(
                0.0 if name.endswith("bias") else 1.0
            )  # as in GPT-2; vectors without "bias" in their name are norm scales
            return
        if name.endswith("lora_b"):
            parameter.zero_()  # an adapter adds nothing at first
            return
        # Two branches per block add to the residual stream; scaling them down keeps its variance near one.
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


def make_embedding(count: int, width: int) -> nn.Embedding:
    """Return an embedding whose weights are not drawn yet; `draw_weights` draws them.

    The constructor of `nn.Embedding` draws weights, which on the `meta` device imports torch's compiler: half the time
    of a start.
    """
    embedding: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(count, width), freeze=False)
    return embedding


def allocate(model: nn.Module, device: torch.device) -> None:
    """Replace all tensors of a model on the `meta` device by uninitialized ones on `device`.

    As `model.to_empty`, which serves sharded models. For others it takes `empty_like` of a tensor on `meta`, which
    imports sympy: a tenth of the time of a start.
    """
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        model.to_empty(device=device)
        return
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def fill_parameter(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, equal on all ranks, into a parameter or into its shard on this rank."""
    if not hasattr(parameter, "device_mesh"):
        parameter.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor  # already imported if parameters are sharded

    spread: Any = parameter
    part: Any = distribute_tensor(whole, spread.device_mesh, spread.placements, src_data_rank=None)  # nothing is sent
    spread.to_local().copy_(part.to_local())
