"""The shape of a transformer and its direct consequences: number of parameters and FLOPs per token."""

from __future__ import annotations

import math
from functools import cached_property

from broker.frozen import frozen

# GPT-3 175B (96 x 12288), GPT-3 13B (40 x 5140) and Llama-2 7B (32 x 4096) all have a width of about 128 times the
# depth, and heads of 128; other published models lie between 80 and 250.
WIDTH_PER_LAYER = 128
HEAD_WIDTH = 128
PARAMETERS_MIN = 50e6
VOCABULARY = 50_304  # GPT-2's 50,257, rounded up to a multiple of 128 as in Megatron-LM


@frozen
class ModelShape:
    """A decoder-only transformer: `layers` blocks of size `width`.

    `mlp_width` counts a block's MLP as two matrices; a gated MLP has three, so pass 1.5 times its size.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = VOCABULARY
    kv_heads: int | None = None  # None: as many as heads
    mlp_width: float | None = None  # None: 4 times the width
    idle_parameters: float = 0.0  # in a mixture of experts: parameters of the experts that a token does not use
    experts_per_token: int = 8  # in a mixture of experts: DeepSeek-V3's number; its tokens travel to at most 4 nodes

    @cached_property  # a search reads it a hundred thousand times
    def layer_parameters(self) -> float:
        """Count the parameters of one block: attention and MLP.

        12 h^2 for GPT; norms and biases (13 h) are omitted.
        """
        share = (self.kv_heads or self.heads) / self.heads
        attention = (2 + 2 * share) * self.width**2
        return attention + 2 * self.width * (self.mlp_width or 4 * self.width)

    @cached_property
    def active_parameters(self) -> float:
        """Count the parameters that a token uses: those of the blocks, and one embedding shared with the output.

        12 l h^2 + V h for GPT (Narayanan 2021, eq. 2).
        """
        return self.layers * self.layer_parameters + self.vocabulary * self.width

    @cached_property
    def parameters(self) -> float:
        """Count all parameters, including idle experts."""
        return self.active_parameters + self.idle_parameters

    @cached_property
    def active_expert_parameters(self) -> float:
        """Count the parameters of the experts that a token uses, in all blocks: the whole MLP; 0 without experts."""
        return self.layers * 2 * self.width * (self.mlp_width or 4 * self.width) if self.idle_parameters else 0.0

    def flops_per_token(self, sequence: int) -> float:
        """Return FLOPs of forward and backward pass, without recomputation.

        6 for every parameter in a product (Kaplan 2020, section 2.1; Hoffmann 2022, appendix F), including the output
        layer, and 12 l h s for attention scores and values over the full square, as counted by Narayanan 2021, eq. 3,
        and Chowdhery 2022, appendix B: 72 l h^2 (1 + s / 6h + V / 12lh) for GPT.
        """
        return 6 * self.active_parameters + 12 * self.layers * self.width * sequence

    def attention_flops_per_token(self, sequence: int) -> float:
        """Return forward FLOPs of scores and values: the part that selective recomputation repeats."""
        return 4.0 * self.layers * self.width * sequence


def guess_shape(parameters: float, *, vocabulary: int = VOCABULARY, layers: int | None = None) -> ModelShape:
    """Guess a GPT of about this many parameters that can be split.

    It has a multiple of 4 or 8 layers, and of 8 heads, if models of that size have that many.

    Among these shapes, choose the one nearest in parameters and, with a quarter of the weight, nearest to a width of
    128 times the depth. Accurate to a few percent. Raises ValueError below 50 million, where the vocabulary dominates.
    """
    if parameters < PARAMETERS_MIN:
        raise ValueError(f"the shape cannot be derived for fewer than {PARAMETERS_MIN / 1e6:g} million parameters")
    best: tuple[float, ModelShape] | None = None
    for heads in (*range(1, 8), *range(8, 32, 4), *range(32, 513, 8)):
        width = heads * HEAD_WIDTH
        own = max(0.0, parameters - vocabulary * width) / (12 * width**2)
        step = 8 if own >= 60 else 4 if own >= 12 else 1
        depth = layers or max(1, round(own / step) * step)
        shape = ModelShape(layers=depth, width=width, heads=heads, vocabulary=vocabulary)
        miss = 4 * abs(math.log(shape.parameters / parameters)) + abs(math.log(width / depth / WIDTH_PER_LAYER))
        if best is None or miss < best[0]:
            best = miss, shape
    assert best is not None
    return best[1]
