"""How wrong a model is, as the mean over all samples of a forward pass."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]


def next_token_loss(z_weight: float) -> Loss:
    """Cross entropy of logits `[batch, time, vocabulary]`, in nats; and `z_weight` x log(Z)^2 (arXiv:2204.02311, 5)."""

    def measure(logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.float().flatten(0, 1)
        loss: Tensor = functional.cross_entropy(flat, targets.flatten())
        if z_weight:
            loss = loss + z_weight * flat.logsumexp(dim=-1).square().mean()
        return loss

    return measure


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits `[batch, classes]`, in nats."""
    loss: Tensor = functional.cross_entropy(logits.float(), targets)
    return loss
