"""Linear layers in float8, emulated on a CPU."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from trainers.errors import TrainerError
from trainers.float8 import convert_linears

from .strategies.conftest import Worlds

NEEDS_TORCHAO = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
CPU = torch.device("cpu")


class Blocks(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))])
        self.head = nn.Linear(width, 16)


def test_error_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TrainerError, match="pip install torchao"):
        convert_linears(Blocks(), CPU, ("shard",))


@NEEDS_TORCHAO
def test_layers_of_blocks_are_converted_and_names_remain() -> None:
    model = Blocks()
    before = dict(model.named_parameters())
    convert_linears(model, CPU, ("shard",))
    assert {name: id(value) for name, value in model.named_parameters()} == {n: id(v) for n, v in before.items()}
    assert type(model.head) is nn.Linear
    inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    plain = Blocks()
    plain.load_state_dict(model.state_dict())
    mine, expected = model.blocks[0](inputs), plain.blocks[0](inputs)
    assert not torch.equal(mine, expected), "float8 rounds"
    torch.testing.assert_close(mine, expected, rtol=0.1, atol=0.1)


@NEEDS_TORCHAO
@pytest.mark.parametrize(
    ("width", "axes", "words"), [(20, ("shard",), "multiples of 16"), (32, ("tensor",), "whole weights")]
)
def test_unsuitable_models_and_strategies_are_refused(width: int, axes: tuple[str, ...], words: str) -> None:
    with pytest.raises(TrainerError, match=words):
        convert_linears(Blocks(width), CPU, axes)


@NEEDS_TORCHAO
@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero2"])
def test_run_resumes_bit_identically_and_without_float8(worlds: Worlds, tmp_path: Path, strategy: str) -> None:
    flags = ("--dtype", "float8")
    whole = worlds.train(tmp_path / "whole", strategy, *flags, ranks=2)
    plain = worlds.train(tmp_path / "plain", strategy, ranks=2)
    assert whole != plain and whole[1][0] == pytest.approx(plain[1][0], rel=0.02)
    worlds.train(tmp_path / "killed", strategy, *flags, ranks=2, kill_after=5)
    resumed = worlds.train(tmp_path / "killed", strategy, *flags, ranks=2, attempt=2)
    assert all(loss == whole[step][0] for step, losses in resumed.items() for loss in losses)
    worlds.train(tmp_path / "mixed", strategy, *flags, ranks=2, kill_after=5)
    mixed = worlds.train(tmp_path / "mixed", strategy, ranks=2, attempt=2)
    assert mixed[8][-1] == pytest.approx(plain[8][0], rel=0.02) and mixed[8][-1] != whole[8][0]
