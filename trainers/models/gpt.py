"""A small decoder-only transformer over bytes.

Plain PyTorch: no strategy, precision or device is known here. (mypy does not read torch, hence the ignores.)
"""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.config import ModelConfig
from trainers.models.cuts import Slicing

# One token per byte value.
VOCABULARY_COUNT = 256


class GPT(nn.Module):  # type: ignore[misc]
    """Maps byte ids `[batch, time]` to next-byte logits `[batch, time, 256]`."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the network with weights drawn from the current torch generator."""
        super().__init__()
        self.width = config.width
        self.token_embedding = nn.Embedding(VOCABULARY_COUNT, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY_COUNT, bias=False)
        self._draw_weights(config.depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict, at every position, the byte that follows it."""
        hidden = tokens if self.token_embedding is None else self._embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = hidden if self.head is None else self.head(self.norm(hidden))
        return logits

    def slicings(self) -> dict[str, Slicing]:
        """The head may be spread over the vocabulary."""
        return {"head": Slicing(way="whole", pieces=VOCABULARY_COUNT)}

    def cut(self, runs: list[range]) -> list[nn.Module]:
        """Keep these runs of blocks only; see `Segmentable`."""
        segments = [self._segment(run) for run in runs]
        kept = {place for run in runs for place in run}
        for place in range(len(self.blocks)):
            if place not in kept:
                self.blocks[place] = nn.Identity()  # keeps the numbers, and so the names, of the others
        self._drop_ends(is_first=0 in kept, is_last=len(self.blocks) - 1 in kept)
        return segments

    def describe_run(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens or hidden states in, hidden states or logits out."""
        hidden = torch.empty(*inputs.shape, self.width, device="meta")
        logits = torch.empty(*inputs.shape, VOCABULARY_COUNT, device="meta")
        return (
            hidden if self.token_embedding is None else torch.empty_like(inputs, device="meta"),
            hidden if self.head is None else logits,
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        return embedded

    def _segment(self, run: range) -> "GPT":
        segment = copy.copy(self)
        segment._modules = dict(self._modules)
        segment.blocks = nn.ModuleList(self.blocks[place] for place in run)
        segment._drop_ends(is_first=run.start == 0, is_last=run.stop == len(self.blocks))
        return segment

    def _drop_ends(self, *, is_first: bool, is_last: bool) -> None:
        if not is_first:
            self.token_embedding = self.position_embedding = None
        if not is_last:
            self.norm = self.head = None

    def _draw_weights(self, depth: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # biases and norms keep their defaults
            # Two branches a block add onto the residual stream; shrinking them keeps its variance near one.
            is_branch_end = name.endswith("project.weight")
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if is_branch_end else 0.02)


class Block(nn.Module):  # type: ignore[misc]
    """Attention, then a two-layer perceptron, each added onto its normalised input."""

    def __init__(self, config: ModelConfig) -> None:
        """Build one layer of the stack."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.perceptron_norm = nn.LayerNorm(config.width)
        self.perceptron = Perceptron(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add both branches onto the residual stream."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        result: Tensor = hidden + self.perceptron(self.perceptron_norm(hidden))
        return result


class Attention(nn.Module):  # type: ignore[misc]
    """Causal self-attention with several heads."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the projections."""
        super().__init__()
        self.heads = config.heads
        self.head_width = config.width // config.heads
        self.dropout_rate = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Let every position read from itself and those before it."""
        batch, time, _ = hidden.shape
        # Packed head by head, so that a rank that holds some of the columns holds whole heads.
        packed = self.query_key_value(hidden).view(batch, time, -1, 3, self.head_width)
        query, key, value = packed.permute(3, 0, 2, 1, 4)
        dropout_rate = self.dropout_rate if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout_rate, is_causal=True)
        result: Tensor = self.dropout(self.project(mixed.transpose(1, 2).flatten(2)))
        return result

    def slicings(self) -> dict[str, Slicing]:
        """Both projections may be spread by heads."""
        return {
            "query_key_value": Slicing(way="column", pieces=self.heads),
            "project": Slicing(way="row", pieces=self.heads),
        }


class Perceptron(nn.Module):  # type: ignore[misc]
    """Two linear layers, four times as wide in between."""

    def __init__(self, config: ModelConfig) -> None:
        """Build both layers."""
        super().__init__()
        self.hidden_width = 4 * config.width
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position by itself."""
        result: Tensor = self.dropout(self.project(functional.gelu(self.expand(hidden))))
        return result

    def slicings(self) -> dict[str, Slicing]:
        """Both layers may be spread by hidden units."""
        return {
            "expand": Slicing(way="column", pieces=self.hidden_width),
            "project": Slicing(way="row", pieces=self.hidden_width),
        }
