"""Llama's blocks: rotary positions, RMSNorm, SwiGLU, and keys and values shared by groups of heads.

Plain PyTorch: no strategy, precision or device is known here.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.config import ModelConfig
from trainers.models.cuts import Slicing
from trainers.models.decoder import Decoder

NORM_EPSILON = 1e-5
# Hidden widths that are multiples of this suit every GPU's matrix units.
WIDTH_MULTIPLE = 64


class Llama(Decoder):
    """A decoder that turns queries and keys by their position, and has no biases."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the network with weights drawn from the current torch generator."""
        self._shape = config.context, config.width // config.heads, config.rope_theta
        waves = make_waves(*self._shape)
        blocks: list[nn.Module] = [Block(config, waves) for _ in range(config.depth)]
        super().__init__(config, blocks, nn.RMSNorm(config.width, eps=NORM_EPSILON))
        self.draw_weights()

    def fill(self, device: torch.device) -> None:
        """The waves are no parameters, and have their values from the start."""
        super().fill(device)
        with device:
            waves = make_waves(*self._shape)
        for module in self.modules():
            if isinstance(module, Attention):
                module.waves = waves


class Block(nn.Module):
    """Attention, then a gated perceptron, each added onto its normalised input."""

    def __init__(self, config: ModelConfig, waves: tuple[Tensor, Tensor]) -> None:
        """Build one layer of the stack."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=NORM_EPSILON)
        self.attention = Attention(config, waves)
        self.perceptron_norm = nn.RMSNorm(config.width, eps=NORM_EPSILON)
        self.perceptron = Perceptron(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add both branches onto the residual stream."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        result: Tensor = hidden + self.perceptron(self.perceptron_norm(hidden))
        return result


class Attention(nn.Module):
    """Causal self-attention whose keys and values may be fewer than its queries (arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig, waves: tuple[Tensor, Tensor]) -> None:
        """Build the projections. `waves` is shared by all layers and made on the device where they will run."""
        super().__init__()
        self.heads, self.key_value_heads = config.heads, config.key_value_heads or config.heads
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, self.heads * self.head_width, bias=False)
        self.key = nn.Linear(config.width, self.key_value_heads * self.head_width, bias=False)
        self.value = nn.Linear(config.width, self.key_value_heads * self.head_width, bias=False)
        self.project = nn.Linear(self.heads * self.head_width, config.width, bias=False)
        # No buffers: DDP would send them round at every step, though they never change.
        self.waves = waves

    def forward(self, hidden: Tensor) -> Tensor:
        """Let every position read from itself and those before it."""
        query = turn(self._split_heads(self.query(hidden)), self.waves)
        key = turn(self._split_heads(self.key(hidden)), self.waves)
        value = self._split_heads(self.value(hidden))
        is_grouped = self.heads != self.key_value_heads
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
        result: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return result

    def slicings(self) -> dict[str, Slicing]:
        """All projections may be spread by heads; queries stay with the keys they share."""
        return {
            "query": Slicing(way="column", pieces=self.heads),
            "key": Slicing(way="column", pieces=self.key_value_heads),
            "value": Slicing(way="column", pieces=self.key_value_heads),
            "project": Slicing(way="row", pieces=self.heads),
        }

    def _split_heads(self, packed: Tensor) -> Tensor:
        """`[batch, time, heads x width]` to `[batch, heads, time, width]`; a rank may hold some of the heads."""
        heads: Tensor = packed.unflatten(2, (-1, self.head_width))
        return heads.transpose(1, 2)


class Perceptron(nn.Module):
    """SwiGLU (arXiv:2002.05202): one linear layer gates another."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the three layers. Two thirds of four times the width makes as many weights as GPT's two layers."""
        super().__init__()
        multiples = -(-8 * config.width // (3 * WIDTH_MULTIPLE))
        self.hidden_width = config.hidden_width or multiples * WIDTH_MULTIPLE
        self.gate = nn.Linear(config.width, self.hidden_width, bias=False)
        self.expand = nn.Linear(config.width, self.hidden_width, bias=False)
        self.project = nn.Linear(self.hidden_width, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position by itself."""
        result: Tensor = self.project(functional.silu(self.gate(hidden)) * self.expand(hidden))
        return result

    def slicings(self) -> dict[str, Slicing]:
        """All layers may be spread by hidden units."""
        return {
            "gate": Slicing(way="column", pieces=self.hidden_width),
            "expand": Slicing(way="column", pieces=self.hidden_width),
            "project": Slicing(way="row", pieces=self.hidden_width),
        }


def make_waves(context: int, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[context, head_width / 2]` of each position's angles (arXiv:2104.09864)."""
    frequencies = theta ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def turn(heads: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of `[batch, heads, time, width]` by its position's angle; a pair is one entry of each half."""
    cosines, sines = (each[: heads.shape[2]] for each in waves)
    left, right = heads.float().chunk(2, dim=-1)
    turned = torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)
    return turned.to(heads.dtype)
