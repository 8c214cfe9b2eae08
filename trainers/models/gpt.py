"""GPT-2's blocks: learned positions, LayerNorm, GELU.

This is plain PyTorch, independent of strategy, precision and device.
"""

from torch import Tensor, nn
from torch.nn import functional

from trainers.config import ModelConfig
from trainers.models.attention import WholeSequence
from trainers.models.cuts import Sequence, Slicing
from trainers.models.decoder import Decoder, make_embedding
from trainers.models.experts import MixtureOfExperts
from trainers.packing import Packing


class GPT(Decoder):
    """A decoder with learned position embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the network with weights drawn from the current torch generator."""
        blocks: list[nn.Module] = [Block(config) for _ in range(config.depth)]
        super().__init__(config, blocks, nn.LayerNorm(config.width, eps=config.norm_epsilon))
        self.position_embedding: nn.Embedding | None = make_embedding(config.positions or config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.sequence: Sequence = WholeSequence()
        self.draw_weights()

    def embed(self, tokens: Tensor, packing: Packing | None = None) -> Tensor:
        """Return the sum of token and position embeddings, `[batch, time, width]`."""
        assert self.position_embedding is not None, "only the first stage has the embedding"
        positions = packing.positions if packing else self.sequence.find_positions(tokens.shape[1], tokens.device)
        hidden: Tensor = self.dropout(super().embed(tokens) + self.position_embedding(positions))
        return hidden

    def drop_ends(self, *, is_first: bool, is_last: bool) -> None:
        """Drop the position embedding together with the token embedding."""
        super().drop_ends(is_first=is_first, is_last=is_last)
        if not is_first:
            self.position_embedding = None


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on a normalized input and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        """Build one block."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.perceptron_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.perceptron = MixtureOfExperts(config) if config.experts else Perceptron(config)

    def forward(self, hidden: Tensor, packing: Packing | None = None) -> Tensor:
        """Add both branches to the residual stream, `[batch, time, width]`."""
        hidden = hidden + self.attention(self.attention_norm(hidden), packing)
        result: Tensor = hidden + self.perceptron(self.perceptron_norm(hidden))
        return result


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the projections."""
        super().__init__()
        self.heads = config.heads
        self.head_width = config.width // config.heads
        self.dropout_rate = config.dropout
        self.sequence: Sequence = WholeSequence(is_causal=not config.bidirectional)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, packing: Packing | None = None) -> Tensor:
        """Attend causally, or to all positions in an encoder, within the document if a window has several."""
        batch, time, _ = hidden.shape
        # Packed head by head, so that a column shard contains whole heads.
        packed = self.query_key_value(hidden).view(batch, time, -1, 3, self.head_width)
        query, key, value = packed.permute(3, 0, 2, 1, 4)
        dropout_rate = self.dropout_rate if self.training else 0.0
        mask = packing.mask if packing else None
        mixed = self.sequence.attend(query, key, value, dropout_rate=dropout_rate, mask=mask)
        result: Tensor = self.dropout(self.project(mixed.transpose(1, 2).flatten(2)))
        return result

    def slicings(self) -> dict[str, Slicing]:
        """Return both projections, sharded by heads."""
        return {
            "query_key_value": Slicing(way="column", pieces=self.heads),
            "project": Slicing(way="row", pieces=self.heads),
        }


class Perceptron(nn.Module):
    """Two linear layers with a wider hidden layer."""

    def __init__(self, config: ModelConfig) -> None:
        """Build both layers."""
        super().__init__()
        self.hidden_width = config.find_hidden_width()
        self.approximation = "tanh" if config.activation == "gelu_tanh" else "none"
        self.expand = nn.Linear(config.width, self.hidden_width)
        self.project = nn.Linear(self.hidden_width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position independently."""
        result: Tensor = self.dropout(
            self.project(functional.gelu(self.expand(hidden), approximate=self.approximation))
        )
        return result

    def slicings(self) -> dict[str, Slicing]:
        """Return both layers, sharded by hidden units."""
        return {
            "expand": Slicing(way="column", pieces=self.hidden_width),
            "project": Slicing(way="row", pieces=self.hidden_width),
        }
