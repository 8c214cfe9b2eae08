"""The last layer fused with the loss: logits exist for one chunk of positions at a time.

The logits of 8192 tokens and 128,256 ids take 4.2 GB in float32, and a separate loss holds up to three copies.
Here each chunk's logits, loss and gradients are computed together (as Liger Kernel does, arXiv:2410.10989), and memory
grows with the width of the model rather than with its vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Size of one chunk of logits in float32.
CHUNK_BYTES = 64 * 2**20
FLOAT_BYTES = 4


class Head(nn.Linear):
    """The last layer of a decoder: it returns logits, or, given targets, the loss."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None, z_weight: float = 0.0) -> Tensor:
        """Map `[..., width]` to logits `[..., vocabulary]`; with `targets` `[...]`, to the mean loss, a scalar in nats.

        The loss is that of `losses.next_token_loss`, with `z_weight` x log(Z)^2 added. It is called like any
        module, so that the hooks by which a strategy gathers parameters run.
        """
        if targets is None:
            return super().forward(hidden)
        apply: Callable[..., Tensor] = FusedLinearLoss.apply
        return apply(hidden.flatten(0, -2), self.weight, targets.flatten(), z_weight)


class FusedLinearLoss(torch.autograd.Function):
    """Cross entropy of `hidden @ weight.T`; `forward` computes both gradients."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_weight: float) -> Tensor:
        """Return the mean over the rows, in nats; `hidden` is `[rows, width]`, `weight` `[vocabulary, width]`."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        needs_hidden, needs_weight = context.needs_input_grad[:2]
        with torch.autocast(device, enabled=False):
            layer = weight.to(dtype)
            hidden_slope = torch.empty_like(hidden, dtype=torch.float32) if needs_hidden else None
            weight_slope = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            step = max(1, CHUNK_BYTES // (FLOAT_BYTES * len(weight)))
            for start in range(0, len(hidden), step):
                part = hidden[start : start + step].to(dtype)
                loss, slope = measure(part @ layer.T, targets[start : start + step, None], z_weight)
                total += loss
                slope = slope.to(dtype)
                if hidden_slope is not None:
                    hidden_slope[start : start + step] = slope @ layer
                if weight_slope is not None:
                    if dtype == torch.float32:
                        weight_slope.addmm_(slope.T, part)
                    else:
                        weight_slope += slope.T @ part
        context.slopes = hidden_slope, weight_slope
        context.dtypes, context.rows = (hidden.dtype, weight.dtype), len(hidden)
        return total / len(hidden)

    @staticmethod
    def backward(context: Any, outer: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Scale both gradients in place: each is used once. Dividing only here keeps small float16 values."""
        slopes, context.slopes = context.slopes, None
        assert slopes is not None, "backward runs once"
        factor = outer / context.rows
        hidden, weight = (
            None if slope is None else slope.mul_(factor).to(dtype)
            for slope, dtype in zip(slopes, context.dtypes, strict=True)
        )
        return hidden, weight, None, None


def measure(logits: Tensor, right: Tensor, z_weight: float) -> tuple[Tensor, Tensor]:
    """Return the summed loss of `[rows, vocabulary]` and its gradient, in float32; `right` is `[rows, 1]`."""
    logits = logits.float()
    log_sum = logits.logsumexp(dim=-1, keepdim=True)
    loss = (log_sum - logits.gather(1, right)).sum()
    # The gradient of log(Z) is the softmax; that of the correct token's logit is one.
    slope = (logits - log_sum).exp_()
    if z_weight:
        loss = loss + z_weight * log_sum.square().sum()
        slope *= 1 + 2 * z_weight * log_sum
    slope.scatter_(1, right, slope.gather(1, right) - 1.0)  # deterministic on GPUs, unlike scatter_add_
    return loss, slope
