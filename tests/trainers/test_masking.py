"""Encoders: which tokens are hidden, what the loss is, and that runs resume and spread as those of decoders do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.tiers import spread
from trainers.config import parse_config
from trainers.data import Corpus
from trainers.lm import build
from trainers.masking import UNTOUCHED, MaskedBatches, count_hidden, masked_loss

from .strategies.conftest import Worlds, read_lines

ENCODER = ("--model.bidirectional", "--data.mask_share", "0.3")
CONTEXT, VOCABULARY, MASK = 50, 200, 200


def open_batches(seed: int = 0, share: float = 0.2) -> MaskedBatches:
    ids = torch.arange(100 * CONTEXT + 1).remainder(VOCABULARY)
    corpus = Corpus([ids], "ids", CONTEXT, 0, range(100))
    return MaskedBatches(corpus, share=share, mask_id=MASK, vocabulary=VOCABULARY, seed=seed)


def test_hidden_tokens_are_those_of_the_sample_however_it_is_read() -> None:
    together, again = open_batches().read(30, 6), open_batches().read(33, 2)
    assert torch.equal(together[0][3:5], again[0]) and torch.equal(together[1][3:5], again[1])
    assert not torch.equal(open_batches(seed=1).read(30, 6)[1], together[1])
    # The next epoch shows the same windows with other tokens hidden.
    assert not torch.equal(open_batches().read(130, 100)[1], open_batches().read(30, 100)[1])


def test_every_window_hides_as_many_tokens_and_shows_the_mask_a_random_token_or_the_token_itself() -> None:
    batches = open_batches()
    inputs, targets = batches.read(0, 400)
    hidden = targets != UNTOUCHED
    assert (hidden.sum(1) == count_hidden(CONTEXT, 0.2)).all()
    windows = torch.where(hidden, targets, inputs)
    assert torch.equal(windows, batches._samples.read(0, 400)[0]), "what is not hidden is shown as it is"
    shown = inputs[hidden]
    assert (shown == MASK).float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (shown == targets[hidden]).float().mean().item() == pytest.approx(0.1, abs=0.03)


def test_data_that_is_hidden_otherwise_is_other_data() -> None:
    """A run that resumes with another seed or share must be told."""
    found = {open_batches().fingerprint, open_batches(seed=1).fingerprint, open_batches(share=0.3).fingerprint}
    assert len(found) == 3 and open_batches().fingerprint in found


def test_at_least_one_token_of_a_window_is_hidden() -> None:
    """Without any, the mean loss would be 0 / 0."""
    assert (count_hidden(8, 0.01), count_hidden(8, 0.5)) == (1, 4)


@pytest.mark.parametrize("z_weight", [0.0, 0.1])
def test_loss_is_that_of_the_hidden_tokens(z_weight: float) -> None:
    _, targets = open_batches().read(0, 4)
    logits = torch.randn(4, CONTEXT, VOCABULARY, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = masked_loss(z_weight, count_hidden(CONTEXT, 0.2))(logits, targets)
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=UNTOUCHED)
    hidden = logits.flatten(0, 1)[targets.flatten() != UNTOUCHED]
    expected = expected + z_weight * hidden.logsumexp(-1).square().mean()
    torch.testing.assert_close(loss, expected)
    slopes = (torch.autograd.grad(each, logits)[0] for each in (loss, expected))
    torch.testing.assert_close(next(slopes), next(slopes))


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_tokens_of_an_encoder_see_both_sides(kind: str) -> None:
    config = parse_config([*ENCODER, "--model.kind", kind, "--model.context", "16", "--model.width", "32"])
    recipe = build(config, torch.device("cpu"))
    assert recipe.fill is not None and recipe.demonstrate is None
    recipe.fill(torch.device("cpu"))
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 15] = 99
    with torch.no_grad():
        first = (recipe.model(tokens) - recipe.model(changed))[0, 0]
    assert first.abs().max() > 0


@pytest.mark.parametrize(("strategy", "ranks"), spread([("fsdp", 2), ("tensor", 2), ("pipeline", 2)], every=3))
def test_losses_of_a_spread_encoder_are_those_of_one_process(
    worlds: Worlds, tmp_path: Path, strategy: str, ranks: int
) -> None:
    alone = worlds.train(tmp_path / "alone", "ddp", *ENCODER, ranks=1)
    spread = worlds.train(tmp_path / "spread", strategy, *ENCODER, ranks=ranks)
    assert sorted(spread) == sorted(alone)
    assert [each[0] for each in spread.values()] == pytest.approx([each[0] for each in alone.values()], abs=2e-5)


@pytest.mark.long
def test_killed_encoder_resumes_bit_identically(worlds: Worlds, tmp_path: Path) -> None:
    whole = worlds.train(tmp_path / "whole", "ddp", *ENCODER, ranks=2)
    worlds.train(tmp_path / "broken", "ddp", *ENCODER, ranks=2, kill_after=6)
    broken = worlds.train(tmp_path / "broken", "ddp", *ENCODER, ranks=2, attempt=2)
    assert any(line["event"] == "resumed" for line in read_lines(tmp_path / "broken"))
    assert sorted(broken) == sorted(whole)
    assert all(loss == whole[step][0] for step, losses in broken.items() for loss in losses)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--model.bidirectional"], "add `--data.mask_share 0.3`"),
        (["--data.mask_share", "0.3"], "add `--model.bidirectional`"),
        ([*ENCODER[:2], "1.5"], "must be in [0, 1)"),
        ([*ENCODER, "--fused_loss"], "cannot be combined with `--fused_loss`"),
        ([*ENCODER, "--data.document_mask"], "cannot be combined with `--data.document_mask`"),
    ],
)
def test_flags_that_do_not_fit_an_encoder_are_refused(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_config(flags)
    assert reason in capsys.readouterr().err


def test_encoder_cannot_be_cut_by_sequence(worlds: Worlds, tmp_path: Path) -> None:
    ended = worlds.call(tmp_path, "trainers.lm:main", ["--strategy", "context", *ENCODER], ranks=2)
    assert ended.codes == [1, 1] and "needs whole windows on each rank, which `context` does not have" in ended.errors
