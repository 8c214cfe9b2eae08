"""Documents in one window do not see each other, and the fused loss is the loss."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiers import spread
from trainers import prepare
from trainers.config import Config, DataConfig, ModelConfig
from trainers.errors import TrainerError
from trainers.fused_loss import CHUNK_BYTES, FLOAT_BYTES, Head
from trainers.lm import choose_forward
from trainers.losses import next_token_loss
from trainers.models import create_language_model
from trainers.packing import find_packing
from trainers.tokens import open_tokens

SEPARATOR = 9


def make_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(3)
    return create_language_model(kind, ModelConfig(kind=kind, depth=2, width=16, heads=2, context=16, vocabulary=12))


def test_documents_are_apart_and_positions_restart() -> None:
    packing = find_packing(torch.tensor([[5, 9, 7, 8], [9, 9, 1, 2]]), SEPARATOR)
    assert packing.positions.tolist() == [[0, 1, 0, 1], [0, 0, 0, 1]]
    assert packing.mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_document_gets_the_logits_that_it_gets_alone(kind: str) -> None:
    model = make_model(kind)
    documents = [[1, 2, 3, SEPARATOR], [4, SEPARATOR], [5, 6, 7, 8, 1, 2]]
    window = torch.tensor([[token for document in documents for token in document]])
    with torch.no_grad():
        packed = model(window, packing=find_packing(window, SEPARATOR))[0]
        alone = torch.cat([model(torch.tensor([document]))[0] for document in documents])
        assert torch.allclose(packed, alone, atol=1e-6)
        assert not torch.allclose(packed, model(window)[0], atol=1e-3)


@pytest.mark.parametrize("z_weight", spread([1e-2, 0.0], every=2))
@pytest.mark.parametrize("rows", [3, 2 * CHUNK_BYTES // (FLOAT_BYTES * 65536) + 5], ids=["one chunk", "three chunks"])
def test_fused_loss_is_the_loss_and_has_its_gradients(z_weight: float, rows: int) -> None:
    torch.manual_seed(1)
    head = Head(8, 65536, bias=False)
    hidden, targets = torch.randn(1, rows, 8), torch.randint(65536, (1, rows))

    def compute(measure: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        head.zero_grad()
        entry = hidden.clone().requires_grad_()
        loss = measure(entry)
        (3.0 * loss).backward()
        assert entry.grad is not None and head.weight.grad is not None
        return loss.detach(), entry.grad, head.weight.grad.clone()

    fused = compute(lambda entry: head(entry, targets, z_weight))
    plain = compute(lambda entry: next_token_loss(z_weight)(head(entry), targets))
    assert abs(fused[0] - plain[0]) <= 1e-6 * abs(plain[0])
    for ours, expected in zip(fused[1:], plain[1:], strict=True):
        # 65536 products are summed in another order; both are within 1.5e-5 of the sum in float64.
        assert torch.allclose(ours, expected, rtol=0, atol=5e-5 * float(expected.abs().max()))


def test_fused_loss_under_autocast_is_that_of_autocast() -> None:
    torch.manual_seed(2)
    head = Head(16, 300, bias=False)
    hidden, targets = torch.randn(40, 16), torch.randint(300, (40,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused = head(hidden, targets, 0.0)
        plain = next_token_loss(0.0)(head(hidden)[None], targets[None])
    assert fused.dtype == torch.float32 and torch.allclose(fused, plain, atol=1e-5)


def test_frozen_layer_gets_no_gradient() -> None:
    head = Head(8, 20, bias=False).requires_grad_(False)
    hidden = torch.randn(4, 8, requires_grad=True)
    head(hidden, torch.tensor([1, 2, 3, 4])).backward()
    assert head.weight.grad is None and hidden.grad is not None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(fused_loss=True, strategy="fsdp+tensor"), "needs the whole last layer"),
        (Config(fused_loss=True, strategy="pipeline"), "needs the whole last layer"),
        (Config(data=DataConfig(document_mask=True), strategy="pipeline"), "needs whole windows"),
    ],
)
def test_strategy_that_cuts_what_is_needed_whole_is_refused(config: Config, words: str) -> None:
    with pytest.raises(TrainerError, match=words):
        choose_forward(config, 0)
    with pytest.raises(TrainerError, match="does not name the id that separates"):
        choose_forward(Config(data=DataConfig(document_mask=True)), None)


def test_separator_is_known_of_prepared_data_and_of_older_files(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words " * 200)
    assert prepare.main([str(tmp_path / "text.txt"), "--output", str(tmp_path / "tokens")]) == 0
    about = tmp_path / "tokens" / "tokens.json"
    assert open_tokens(DataConfig(path=str(tmp_path / "tokens"))).separator == 0
    written = json.loads(about.read_text())
    del written["separator"]
    for tokenizer, expected in (("bytes", 0), ("gpt2", 50256), ("somewhere/else", None)):
        about.write_text(json.dumps({**written, "tokenizer": tokenizer}))
        assert open_tokens(DataConfig(path=str(tmp_path / "tokens"))).separator == expected
