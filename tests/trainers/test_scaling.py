"""Float16: the loss is scaled up before the backward pass, and nothing of that is seen after it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainers.scaling import FACTOR_FIRST, FACTOR_MAX, STEPS_TO_GROW, LossScale

from .strategies.conftest import TOTAL, Worlds

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_scaled_gradients_equal_unscaled_ones() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    scaling = LossScale("float16")
    (weight.square().sum() * scaling.factor).backward()
    scaling.unscale([weight])
    assert weight.grad is not None and weight.grad.item() == 6.0


def test_factor_halves_at_each_overflow_and_doubles_after_a_long_calm() -> None:
    scaling = LossScale("float16")
    assert scaling.note(is_finite=False) and scaling.factor == FACTOR_FIRST / 2
    for _ in range(STEPS_TO_GROW):
        assert not scaling.note(is_finite=True)
    assert scaling.factor == FACTOR_FIRST
    later = LossScale("float16")
    later.load_state_dict(scaling.state_dict())
    assert later.factor == FACTOR_FIRST and later.state_dict() == scaling.state_dict()


def test_an_overflow_begins_the_calm_again_and_a_restored_scale_continues_it() -> None:
    scaling = LossScale("float16")
    for _ in range(STEPS_TO_GROW - 1):
        scaling.note(is_finite=True)
    restored = LossScale("float16")
    restored.load_state_dict(scaling.state_dict())
    restored.note(is_finite=True)
    assert restored.factor == 2 * FACTOR_FIRST, "the steps before the checkpoint count"
    scaling.note(is_finite=False)
    for number in range(STEPS_TO_GROW):
        assert scaling.factor == FACTOR_FIRST / 2, number
        scaling.note(is_finite=True)
    assert scaling.factor == FACTOR_FIRST


def test_factor_stays_below_what_float16_can_hold_of_a_gradient() -> None:
    scaling = LossScale("float16")
    for _ in range(10 * STEPS_TO_GROW):
        scaling.note(is_finite=True)
    assert scaling.factor == FACTOR_MAX == 2.0**24


def test_loss_that_no_scale_makes_finite_is_an_error() -> None:
    scaling = LossScale("float16")
    faults = [scaling.note(is_finite=False) for _ in range(18)]
    assert faults == [True] * 16 + [False] * 2 and scaling.factor == 1.0
    assert not LossScale("bfloat16").note(is_finite=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("pipeline", 2)])
def test_a_run_in_float16_learns_as_in_float32_and_resumes_bit_identically(
    worlds: Worlds, tmp_path: Path, strategy: str, ranks: int
) -> None:
    exact = worlds.train(tmp_path / "exact", strategy, ranks=ranks)
    whole = worlds.train(tmp_path / "whole", strategy, "--dtype", "float16", ranks=ranks)
    worlds.train(tmp_path / "broken", strategy, "--dtype", "float16", ranks=ranks, kill_after=5)
    broken = worlds.train(tmp_path / "broken", strategy, "--dtype", "float16", ranks=ranks, attempt=2)
    assert whole[TOTAL][0] == pytest.approx(exact[TOTAL][0], abs=0.02) and whole[TOTAL] != exact[TOTAL]
    assert all(value == whole[step][0] for step, values in broken.items() for value in values)
