"""Loss functions: the error of a model, as the mean over all samples of a forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Logits that take more than this in float32 are gone through in parts of this size.
CHUNK_BYTES = 64 * 2**20
FLOAT_BYTES = 4

Loss = Callable[[Tensor, Tensor], Tensor]


def next_token_loss(z_weight: float) -> Loss:
    """Cross entropy of logits `[batch, time, vocabulary]`, in nats; and `z_weight` x log(Z)^2 (arXiv:2204.02311, 5)."""

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
    """The same loss of logits `[rows, vocabulary]`, a chunk of rows at a time, with the gradient computed along the
    way.

    Left to autograd, bfloat16 logits are held twice more in float32, and their gradient a third time. Here float32
    never outgrows a chunk, and the gradient has the logits' own type.
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
                # Of log(Z) the gradient is the softmax; of the right token's logit, one.
                slope = (part - log_sum).exp_()
                if z_weight:
                    slope *= 1 + 2 * z_weight * log_sum
                slope.scatter_(1, right, slope.gather(1, right) - 1.0)  # deterministic on GPUs, unlike scatter_add_
                gradient[start : start + step] = slope.div_(rows)
        context.gradient = gradient
        return total / rows

    @staticmethod
    def backward(context: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        """Scale the gradient that `forward` computed, in place: it is used once."""
        gradient, context.gradient = context.gradient, None
        assert gradient is not None, "the loss goes backward once"
        return gradient.mul_(outer), None, None


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits `[batch, classes]`, in nats."""
    loss: Tensor = functional.cross_entropy(logits.float(), targets)
    return loss
