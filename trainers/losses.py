"""Loss functions: the error of a model, as the mean over all samples of a forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Logits that take more than this in float32 are processed in chunks of this size.
CHUNK_BYTES = 64 * 2**20
FLOAT_BYTES = 4
# Factor of stored gradients. The probability of one of 50,000 ids, divided by thousands of rows, is below the smallest
# float16; the gradient of a logit is at most about 1. A power of two changes no digit of other dtypes.
STORED_SCALE = 2.0**10

Loss = Callable[[Tensor, Tensor], Tensor]


def next_token_loss(z_weight: float) -> Loss:
    """Return the cross entropy of logits `[batch, time, vocabulary]` in nats, plus `z_weight` x log(Z)^2.

    The second term is PaLM's z-loss (arXiv:2204.02311, section 5).
    """

    def measure(logits: Tensor, targets: Tensor) -> Tensor:
        if logits.numel() * FLOAT_BYTES > CHUNK_BYTES and type(logits) is Tensor:
            apply: Callable[..., Tensor] = ChunkedLoss.apply
            chunked = apply(logits.flatten(0, 1), targets.flatten(), z_weight)
            return chunked
        flat = logits.float().flatten(0, 1)
        loss: Tensor = functional.cross_entropy(flat, targets.flatten())
        if z_weight:
            loss = loss + z_weight * flat.logsumexp(dim=-1).square().mean()
        return loss

    return measure


class ChunkedLoss(torch.autograd.Function):
    """The same loss of logits `[rows, vocabulary]`, one chunk of rows at a time; `forward` computes the gradient.

    Under autograd, bfloat16 logits take two more copies in float32, and their gradient a third. Here float32 copies
    have the size of one chunk, and the gradient has the dtype of the logits.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor, z_weight: float) -> Tensor:
        """Return the mean over the rows, in nats."""
        rows, vocabulary = logits.shape
        step = max(1, CHUNK_BYTES // (FLOAT_BYTES * vocabulary))
        gradient = torch.empty_like(logits) if context.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for start in range(0, rows, step):
            part, right = logits[start : start + step].float(), targets[start : start + step, None]
            log_sum = part.logsumexp(dim=-1, keepdim=True)
            total += (log_sum - part.gather(1, right)).sum()
            if z_weight:
                total += z_weight * log_sum.square().sum()
            if gradient is not None:
                # The gradient of log(Z) is the softmax; that of the correct token's logit is one.
                slope = (part - log_sum).exp_()
                if z_weight:
                    slope *= 1 + 2 * z_weight * log_sum
                slope.scatter_(1, right, slope.gather(1, right) - 1.0)  # deterministic on GPUs, unlike scatter_add_
                gradient[start : start + step] = slope.mul_(STORED_SCALE)
        context.gradient, context.step = gradient, step
        return total / rows

    @staticmethod
    def backward(context: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        """Scale the gradient that `forward` computed, in place: it is used once.

        Only here are rows divided by their number, together with the loss scale, which keeps float16 from underflow.
        """
        gradient, context.gradient = context.gradient, None
        assert gradient is not None, "backward runs once"
        factor = outer.float() / (STORED_SCALE * len(gradient))
        for part in gradient.split(context.step):
            part.copy_(part.float().mul_(factor))
        return gradient, None, None


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of logits `[batch, classes]`, in nats."""
    loss: Tensor = functional.cross_entropy(logits.float(), targets)
    return loss
