"""Llama's blocks: rotary positions, RMSNorm, SwiGLU, and keys and values shared by groups of heads.

This is plain PyTorch, independent of strategy, precision and device.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.config import ModelConfig
from trainers.errors import TrainerError
from trainers.models.attention import WholeSequence
from trainers.models.cuts import Sequence, Slicing
from trainers.models.decoder import Decoder
from trainers.models.experts import MixtureOfExperts
from trainers.packing import Packing


class Llama(Decoder):
    """A decoder with rotary position embedding and, by default, without biases."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the network with weights drawn from the current torch generator."""
        self._shape = config.context, config.find_head_width(), config.rope_theta, config.rope_scaling
        waves = make_waves(*self._shape)
        blocks: list[nn.Module] = [Block(config, waves) for _ in range(config.depth)]
        super().__init__(config, blocks, nn.RMSNorm(config.width, eps=config.norm_epsilon))
        self.draw_weights()

    def fill(self, device: torch.device) -> None:
        """Allocate and draw the model; also compute the rotary table, which is not a parameter."""
        super().fill(device)
        with device:
            waves = make_waves(*self._shape)
        for module in self.modules():
            if isinstance(module, Attention):
                module.waves = waves


class Block(nn.Module):
    """Attention, then a gated perceptron, each on a normalized input and added to the residual stream."""

    def __init__(self, config: ModelConfig, waves: tuple[Tensor, Tensor]) -> None:
        """Build one block."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = Attention(config, waves)
        self.perceptron_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.perceptron = MixtureOfExperts(config) if config.experts else Perceptron(config)

    def forward(self, hidden: Tensor, packing: Packing | None = None) -> Tensor:
        """Add both branches to the residual stream, `[batch, time, width]`."""
        hidden = hidden + self.attention(self.attention_norm(hidden), packing)
        result: Tensor = hidden + self.perceptron(self.perceptron_norm(hidden))
        return result


class Attention(nn.Module):
    """Self-attention with grouped queries: fewer key and value heads than query heads (arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig, waves: tuple[Tensor, Tensor]) -> None:
        """Build the projections. `waves`, the rotary table, is shared by all layers and already on their device."""
        super().__init__()
        self.heads, self.key_value_heads = config.heads, config.key_value_heads or config.heads
        self.head_width = config.find_head_width()
        is_biased = config.attention_bias != "none"
        self.query = nn.Linear(config.width, self.heads * self.head_width, bias=is_biased)
        self.key = nn.Linear(config.width, self.key_value_heads * self.head_width, bias=is_biased)
        self.value = nn.Linear(config.width, self.key_value_heads * self.head_width, bias=is_biased)
        self.project = nn.Linear(self.heads * self.head_width, config.width, bias=config.attention_bias == "all")
        self.query_norm = self.key_norm = None
        if config.query_key_norm:
            self.query_norm = nn.RMSNorm(self.head_width, eps=config.norm_epsilon)
            self.key_norm = nn.RMSNorm(self.head_width, eps=config.norm_epsilon)
        # Not buffers: those are broadcast at every step, and these never change.
        self.waves = waves
        self.sequence: Sequence = WholeSequence(is_causal=not config.bidirectional)

    def forward(self, hidden: Tensor, packing: Packing | None = None) -> Tensor:
        """Attend to the positions that `sequence` allows, within the document if a window has several."""
        query, key, value = (self._split_heads(layer(hidden)) for layer in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        length, device = query.shape[2], query.device
        positions = packing.positions if packing else self.sequence.find_positions(length, device)[None]
        query, key = turn(query, self.waves, positions), turn(key, self.waves, positions)
        mixed = self.sequence.attend(query, key, value, mask=packing.mask if packing else None)
        result: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return result

    def slicings(self) -> dict[str, Slicing]:
        """Return all projections, sharded by heads. Query heads stay with the key heads that they share."""
        if self.query_norm is not None:
            raise TrainerError(
                "`tensor` cannot be combined with `--model.query_key_norm`, because heads share one norm"
            )
        return {
            "query": Slicing(way="column", pieces=self.heads),
            "key": Slicing(way="column", pieces=self.key_value_heads),
            "value": Slicing(way="column", pieces=self.key_value_heads),
            "project": Slicing(way="row", pieces=self.heads),
        }

    def _split_heads(self, packed: Tensor) -> Tensor:
        """Reshape `[batch, time, heads x width]` to `[batch, heads, time, width]`, for the heads on this rank."""
        heads: Tensor = packed.unflatten(2, (-1, self.head_width))
        return heads.transpose(1, 2)


class Perceptron(nn.Module):
    """SwiGLU (arXiv:2002.05202): one linear layer gates another."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the three layers."""
        super().__init__()
        self.hidden_width = config.find_hidden_width()
        self.gate = nn.Linear(config.width, self.hidden_width, bias=False)
        self.expand = nn.Linear(config.width, self.hidden_width, bias=False)
        self.project = nn.Linear(self.hidden_width, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position independently."""
        result: Tensor = self.project(functional.silu(self.gate(hidden)) * self.expand(hidden))
        return result

    def slicings(self) -> dict[str, Slicing]:
        """Return all layers, sharded by hidden units."""
        return {
            "gate": Slicing(way="column", pieces=self.hidden_width),
            "expand": Slicing(way="column", pieces=self.hidden_width),
            "project": Slicing(way="row", pieces=self.hidden_width),
        }


def make_waves(context: int, head_width: int, theta: float, scaling: str = "") -> tuple[Tensor, Tensor]:
    """Return the rotary table: cosines and sines `[context, head_width / 2]` of the angles (arXiv:2104.09864)."""
    frequencies = theta ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    if scaling:
        frequencies = scale_frequencies(frequencies, scaling)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def scale_frequencies(frequencies: Tensor, scaling: str) -> Tensor:
    """Lower the frequencies for longer contexts: all (`linear`), or the lowest ones (`llama3`, arXiv:2407.21783)."""
    name, _, text = scaling.partition(":")
    factor, *bounds = map(float, text.split(","))
    if name == "linear":
        return frequencies / factor
    low, high, context = bounds
    # Turns within the original training context: scaled below `low`, unchanged above `high`, interpolated between.
    turns = context * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * frequencies / factor + share * frequencies


def turn(heads: Tensor, waves: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    """Rotate each pair of `[batch, heads, time, width]` by the angle of its position. A pair has one entry per half.

    `positions` is `[batch, time]`, or `[1, time]` if equal for all samples.
    """
    cosines, sines = (wave[positions].unsqueeze(1) for wave in waves)
    left, right = heads.float().chunk(2, dim=-1)
    turned = torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)
    return turned.to(heads.dtype)
