"""The shape of a model from the amounts of `broker advise`."""

from __future__ import annotations

from typing import Any

import pytest

from broker.app.advising import AdviceRequest, read_request, read_shape
from broker.errors import UsageError


def test_parameters_with_layers_and_hidden_set_the_width_of_the_mlp() -> None:
    """Qwen 2.5 7B: a gated MLP of 18,944, which counts as two matrices of 28,416, and separate embeddings."""
    shape = read_shape("7.6B", 28, 3584, 28, 152_064)
    assert shape.parameters == pytest.approx(7.6e9, rel=0.001) and (shape.mlp_width or 0) % 64 == 0
    assert (shape.layers, shape.width, shape.heads) == (28, 3584, 28)
    assert read_shape(None, 28, 3584, 28, None).mlp_width is None
    experts = read_shape("30B", 48, 2048, 32, 152_064, active="3.3B")
    assert experts.active_parameters == pytest.approx(3.3e9, rel=0.005)
    assert experts.parameters == pytest.approx(30e9, rel=0.001)


@pytest.mark.parametrize("params", ["70B", "1B"])
def test_parameters_that_no_mlp_gives_the_shape_are_refused(params: str) -> None:
    with pytest.raises(UsageError, match=f"a model of 28 x 3584 does not have {params} parameters") as caught:
        read_shape(params, 28, 3584, None, None)
    assert "about 4.5B" in caught.value.hints[0]


@pytest.mark.parametrize("amounts", [{"tokens": "1B", "batch": "4K"}, {"tokens": "4095"}])
def test_less_than_a_sequence_is_refused(amounts: dict[str, str]) -> None:
    flag = "--batch 4K" if "batch" in amounts else "--tokens 4095"
    context: Any = None  # not needed before the amounts are read
    with pytest.raises(UsageError, match=f"`{flag}` is less than a sequence of 4,096 tokens"):
        read_request(context, AdviceRequest(params="1B", **amounts))
