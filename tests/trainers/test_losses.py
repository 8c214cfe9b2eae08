"""The loss of a language model, in chunks or at once, against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainers import fused_loss, losses
from trainers.losses import ChunkedLoss, class_loss, next_token_loss

ROWS, VOCABULARY = 7, 5


def define(logits: Tensor, targets: Tensor, z_weight: float) -> Tensor:
    """PaLM's loss (arXiv:2204.02311): -log p of the target, plus the weight x log(Z)^2, as a mean over the rows."""
    log_z = logits.exp().sum(dim=-1).log()
    return (log_z - logits[torch.arange(len(targets)), targets] + z_weight * log_z**2).mean()


def draw(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(*shape, VOCABULARY, requires_grad=True), torch.randint(VOCABULARY, shape)


@pytest.mark.parametrize("z_weight", [0.0, 0.1])
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 7, 100])
def test_chunked_loss_is_its_definition_with_its_gradient(
    z_weight: float, rows_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", rows_per_chunk * VOCABULARY * losses.FLOAT_BYTES)
    logits, targets = draw(ROWS)
    expected = define(logits, targets, z_weight)
    (slope,) = torch.autograd.grad(3.0 * expected, logits)
    found = ChunkedLoss.apply(logits, targets, z_weight)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(3.0 * found, logits)[0], slope)


@pytest.mark.parametrize("z_weight", [0.0, 0.1])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_loss_of_a_batch_is_the_mean_over_all_its_tokens(
    z_weight: float, is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", 40 if is_chunked else 1 << 20)
    logits, targets = draw(2, 4)
    expected = define(logits.flatten(0, 1), targets.flatten(), z_weight)
    torch.testing.assert_close(next_token_loss(z_weight)(logits, targets), expected)


def test_half_precision_is_computed_in_single_precision() -> None:
    logits, targets = draw(ROWS)
    half = logits.detach().to(torch.bfloat16)
    found = next_token_loss(0.0)(half[None], targets[None])
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, functional.cross_entropy(half.float(), targets))
    assert class_loss(half, targets).dtype is torch.float32


@pytest.mark.parametrize("z_weight", [0.0, 0.1])
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 7, 100])
def test_loss_fused_with_the_last_layer_is_that_of_the_layers_apart(
    z_weight: float, rows_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_loss, "CHUNK_BYTES", rows_per_chunk * VOCABULARY * fused_loss.FLOAT_BYTES)
    torch.manual_seed(4)
    head = fused_loss.Head(3, VOCABULARY, bias=False)
    hidden, targets = torch.randn(ROWS, 3, requires_grad=True), torch.randint(VOCABULARY, (ROWS,))
    expected = define(head(hidden), targets, z_weight)
    slopes = torch.autograd.grad(3.0 * expected, (hidden, head.weight))
    found = head(hidden, targets, z_weight)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(torch.autograd.grad(3.0 * found, (hidden, head.weight)), slopes, strict=True):
        torch.testing.assert_close(ours, theirs)
