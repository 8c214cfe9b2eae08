"""A small decoder-only transformer over bytes.

Plain PyTorch: no strategy, precision or device is known here. (mypy does not read torch, hence the ignores.)
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.config import ModelConfig

# One token per byte value.
VOCABULARY_COUNT = 256


class GPT(nn.Module):  # type: ignore[misc]
    """Maps byte ids `[batch, time]` to next-byte logits `[batch, time, 256]`."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the network with weights drawn from the current torch generator."""
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY_COUNT, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY_COUNT, bias=False)
        self._draw_weights(config.depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict, at every position, the byte that follows it."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

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
        self.dropout_rate = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Let every position read from itself and those before it."""
        batch, time, width = hidden.shape
        packed = self.query_key_value(hidden).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        dropout_rate = self.dropout_rate if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout_rate, is_causal=True)
        result: Tensor = self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, time, width)))
        return result


class Perceptron(nn.Module):  # type: ignore[misc]
    """Two linear layers, four times as wide in between."""

    def __init__(self, config: ModelConfig) -> None:
        """Build both layers."""
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position by itself."""
        result: Tensor = self.dropout(self.project(functional.gelu(self.expand(hidden))))
        return result
