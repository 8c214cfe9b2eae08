"""The shape of a transformer, and what follows from it alone: its parameters and its arithmetic a token."""

from __future__ import annotations

from dataclasses import dataclass

# GPT-3 175B (96 x 12288), GPT-3 13B (40 x 5140) and Llama-2 7B (32 x 4096) all have a width of about 128 times the
# depth, and heads of 128; the published smaller and larger ones lie between 80 and 250.
WIDTH_PER_LAYER = 128
HEAD_WIDTH = 128
VOCABULARY = 50_304  # GPT-2's 50,257, rounded up to a multiple of 128 as Megatron-LM does


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer: `layers` blocks of size `width`.

    `mlp_width` counts all of the block's MLP as two matrices; a gated MLP has three, so give it 1.5 times its size.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = VOCABULARY
    kv_heads: int | None = None  # None: as many as heads
    mlp_width: float | None = None  # None: 4 times the width

    @property
    def layer_parameters(self) -> float:
        """Of one block: attention and MLP; 12 h^2 for GPT (norms and biases, 13 h, are left out)."""
        share = (self.kv_heads or self.heads) / self.heads
        attention = (2 + 2 * share) * self.width**2
        return attention + 2 * self.width * (self.mlp_width or 4 * self.width)

    @property
    def parameters(self) -> float:
        """Of the blocks and one embedding that the output shares; 12 l h^2 + V h for GPT (Narayanan 2021, eq. 2)."""
        return self.layers * self.layer_parameters + self.vocabulary * self.width

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward, without recomputation.

        6 for every parameter in a product (Kaplan 2020, section 2.1; Hoffmann 2022, appendix F), the output layer's
        among them, and 12 l h s for attention scores and values over the full square, as Narayanan 2021, eq. 3, and
        Chowdhery 2022, appendix B, count it: 72 l h^2 (1 + s / 6h + V / 12lh) for GPT.
        """
        return 6 * self.parameters + 12 * self.layers * self.width * sequence

    def attention_flops_per_token(self, sequence: int) -> float:
        """The forward part of scores and values: what selective recomputation does once more."""
        return 4.0 * self.layers * self.width * sequence


def guess_shape(parameters: float, *, vocabulary: int = VOCABULARY, layers: int | None = None) -> ModelShape:
    """A GPT of about so many parameters; the width is 128 times the depth unless `layers` is given.

    Exact within a few percent above 100 million; heads are 128 wide. Raises ValueError for less than a million.
    """
    if parameters < 1e6:
        raise ValueError("a model has at least a million parameters")

    def count(width: float) -> float:
        return 12 * (layers or width / WIDTH_PER_LAYER) * width**2 + vocabulary * width

    low, high = 1.0, 1e7
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if count(middle) < parameters else (low, middle)
    step = HEAD_WIDTH if low >= HEAD_WIDTH else 32
    width = max(step, round(low / step) * step)
    depth = layers or max(1, round((parameters - vocabulary * width) / (12 * width**2)))
    return ModelShape(layers=depth, width=width, heads=max(1, width // HEAD_WIDTH), vocabulary=vocabulary)
