"""Low-rank adapters: where they are added, what trains, and their sum with the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainers.config import LoraConfig, ModelConfig
from trainers.errors import TrainerError
from trainers.lora import DOWN, UP, LoraLinear, add_adapters, check_strategy, merge_adapters
from trainers.models import create_language_model

RANK, ALPHA = 2, 6.0


def make_model(targets: str) -> nn.Module:
    torch.manual_seed(3)
    config = ModelConfig(kind="llama", depth=2, width=16, heads=2, vocabulary=32, context=8)
    model: nn.Module = create_language_model("llama", config)
    add_adapters(model, LoraConfig(rank=RANK, alpha=ALPHA, targets=targets))
    return model


def list_adapters(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_modules() if isinstance(each, LoraLinear)}


def test_only_adapters_train_and_they_are_where_the_targets_say() -> None:
    attention, everything = make_model("attention"), make_model("all")
    assert list_adapters(attention) and all(".attention." in f".{name}." for name in list_adapters(attention))
    more = list_adapters(everything) - list_adapters(attention)
    assert list_adapters(attention) < list_adapters(everything) and all(".perceptron." in f".{name}" for name in more)
    trained = {name for name, each in everything.named_parameters() if each.requires_grad}
    assert trained == {f"{layer}.{each}" for layer in list_adapters(everything) for each in (DOWN, UP)}


def test_rank_zero_leaves_the_model_alone() -> None:
    layer = nn.Sequential(nn.Linear(2, 2))
    add_adapters(layer, LoraConfig(rank=0))
    assert type(layer[0]) is nn.Linear and layer[0].weight.requires_grad


def test_merged_weights_compute_what_layer_and_adapter_do() -> None:
    torch.manual_seed(1)
    plain = nn.Linear(5, 3)
    layer = LoraLinear(plain, rank=RANK, scale=ALPHA / RANK)
    inputs = torch.randn(4, 5)
    torch.testing.assert_close(layer(inputs), plain(inputs))
    with torch.no_grad():
        layer.lora_a.normal_()
        layer.lora_b.normal_()
    tensors = {f"x.{name}": tensor for name, tensor in layer.state_dict().items()} | {"y.weight": torch.ones(1)}
    merged = merge_adapters(tensors, scale=ALPHA / RANK)
    assert set(merged) == {"x.weight", "x.bias", "y.weight"}
    found = nn.functional.linear(inputs, merged["x.weight"], merged["x.bias"])
    torch.testing.assert_close(found, layer(inputs))
    assert not torch.allclose(found, plain(inputs))


def test_merged_weights_keep_their_dtype() -> None:
    tensors = {
        "x.weight": torch.zeros(3, 5, dtype=torch.bfloat16),
        "x.lora_a": torch.ones(1, 5),
        "x.lora_b": torch.ones(3, 1),
    }
    merged = merge_adapters(tensors, scale=2.0)["x.weight"]
    assert merged.dtype is torch.bfloat16 and (merged == 2.0).all()


@pytest.mark.parametrize("strategy", ["tensor", "fsdp+tensor", "tensor+ddp"])
def test_adapters_are_refused_where_layers_are_sharded(strategy: str) -> None:
    with pytest.raises(TrainerError, match=r"`--lora\.rank` cannot be combined with `tensor`"):
        check_strategy(LoraConfig(rank=1), strategy)
    check_strategy(LoraConfig(rank=0), strategy)
    check_strategy(LoraConfig(rank=1), "fsdp")
