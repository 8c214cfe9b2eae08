"""Positions of the tokens of a pass in their sequence, and the attention between them."""

import torch
from torch import Tensor
from torch.nn import functional


class WholeSequence:
    """A pass has whole sequences, from the first position on. Models begin with this one (`cuts.KnowsSequence`)."""

    def __init__(self, *, is_causal: bool = True) -> None:
        """Attend to the positions before a token, or to all (an encoder)."""
        self._is_causal = is_causal

    def find_positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the tokens, `[length]`."""
        return torch.arange(length, device=device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, dropout_rate: float = 0.0, mask: Tensor | None = None
    ) -> Tensor:
        """Attend, at every position of `[batch, heads, time, width]`, to itself and those before it, or to all.

        Keys and values may have fewer heads, each shared by as many queries' heads in a row. A `mask` replaces the
        rule.
        """
        is_grouped = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout_rate,
            is_causal=self._is_causal and mask is None,
            enable_gqa=is_grouped,
        )
