"""The positions of tokens in their sequence, and attention between them."""

import torch
from torch import Tensor
from torch.nn import functional


class WholeSequence:
    """Passes contain whole sequences. A strategy may replace this class in a model (`cuts.KnowsSequence`)."""

    def __init__(self, *, is_causal: bool = True) -> None:
        """Attend causally, or to all positions (in an encoder)."""
        self._is_causal = is_causal

    def find_positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the tokens, `[length]`."""
        return torch.arange(length, device=device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, dropout_rate: float = 0.0, mask: Tensor | None = None
    ) -> Tensor:
        """Return the attention output for tensors `[batch, heads, time, width]`, causal or not.

        Keys and values may have fewer heads, each shared by consecutive query heads. A `mask` replaces the causal one.
        """
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and lacks_grouped_kernel(query, mask):
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
            groups = 1
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout_rate,
            is_causal=self._is_causal and mask is None,
            enable_gqa=groups > 1,
        )


def lacks_grouped_kernel(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether a GPU's only kernel for shared heads would be the one that holds all scores in memory.

    Flash attention accepts shared heads, but neither masks nor float32; the memory-efficient kernel is the reverse.
    """
    return query.device.type == "cuda" and (mask is not None or query.dtype == torch.float32)
