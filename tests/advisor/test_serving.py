"""The serving model against published figures, and its recommendations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.advisor.serving import (
    ServingGoal,
    count_kv_bytes,
    find_prefill_s,
    find_saturated_tokens_s,
    find_serving_layout,
    find_step_s,
    share_heads,
)
from broker.app.advising_serve import ServingRequest, can_split
from broker.optimizer.model_shape import ModelShape, guess_shape
from broker.optimizer.roofline import Hardware
from broker.types import AcceleratorFigures

H100 = AcceleratorFigures(
    name="H100", memory_gib=80, bf16_dense_tflops=989, memory_bandwidth_gbs=3350, nvlink_gbs=900
)  # fmt: skip
A100_80 = AcceleratorFigures(
    name="A100-80GB", memory_gib=80, bf16_dense_tflops=312, memory_bandwidth_gbs=2039, nvlink_gbs=600
)  # fmt: skip
A100 = replace(A100_80, name="A100", memory_gib=40, memory_bandwidth_gbs=1555)
# Gated MLPs have three matrices: 1.5 times their width (`ModelShape`). Input and output embeddings are separate here.
LLAMA_7B = ModelShape(layers=32, width=4096, heads=32, vocabulary=64_000, mlp_width=11008 * 1.5)
LLAMA_8B = ModelShape(layers=32, width=4096, heads=32, kv_heads=8, vocabulary=256_512, mlp_width=14336 * 1.5)
LLAMA_70B = ModelShape(layers=80, width=8192, heads=64, kv_heads=8, vocabulary=64_000, mlp_width=28672 * 1.5)
GOAL = ServingGoal(
    shape=share_heads(guess_shape(8e9)), rps=20, input_tokens=512, output_tokens=128, ttft_s=0.5, tpot_s=0.05
)  # fmt: skip


def node(figures: AcceleratorFigures, count: int = 1) -> Hardware:
    return Hardware(figures=figures, accelerators=count, network_gbs=12.5)


@pytest.mark.parametrize(
    ("hardware", "published_s"), [(node(H100), 0.00648), (node(A100), 1 / 75)], ids=["H100", "A100"]
)
def test_time_per_token_of_one_sequence_is_within_5_percent_of_vllm(hardware: Hardware, published_s: float) -> None:
    assert find_step_s(LLAMA_8B, hardware, 1, 512) == pytest.approx(published_s, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "count", "published_s"), [(LLAMA_7B, 1, 0.133), (LLAMA_70B, 4, 0.377)], ids=["7B", "70B"]
)
def test_prefill_is_within_15_percent_of_tensorrt_llm(shape: ModelShape, count: int, published_s: float) -> None:
    assert find_prefill_s(shape, node(A100_80, count), 2048) == pytest.approx(published_s, rel=0.15)


@pytest.mark.parametrize(
    ("batch", "input_tokens", "output_tokens", "published"),
    [(384, 128, 128, 5586), (60, 128, 2048, 1928), (52, 2048, 128, 591)],
)
def test_throughput_is_within_25_percent_of_tensorrt_llm(
    batch: int, input_tokens: int, output_tokens: int, published: float
) -> None:
    found = find_saturated_tokens_s(
        LLAMA_7B, node(A100_80), batch=batch, input_tokens=input_tokens, output_tokens=output_tokens
    )
    assert found == pytest.approx(published, rel=0.25)


def test_kv_cache_of_a_token_is_that_of_the_models() -> None:
    assert count_kv_bytes(LLAMA_7B) == 512 * 1024
    assert count_kv_bytes(LLAMA_8B) == 128 * 1024
    shared = share_heads(guess_shape(8e9))
    assert shared.parameters == pytest.approx(guess_shape(8e9).parameters, rel=1e-6)


def test_ranks_without_a_head_of_keys_and_values_have_copies() -> None:
    """Qwen 2.5 7B has 4 of 28 heads; vLLM gives each of 8 tensor ranks one."""
    shape = ModelShape(layers=28, width=3584, heads=28, kv_heads=4)
    assert [count_kv_bytes(shape, ranks) / 1024 for ranks in (1, 2, 4, 8)] == [56, 56, 56, 112]
    found = find_serving_layout(
        replace(GOAL, shape=shape, input_tokens=200_000, ttft_s=None, tpot_s=None), node(A100, 8)
    )
    assert found is not None
    assert found.batch * 200_128 * 112 * 1024 <= found.kv_bytes_max


def test_latency_limits_the_batch_and_memory_limits_the_model() -> None:
    free = find_serving_layout(replace(GOAL, ttft_s=None, tpot_s=None), node(H100))
    tight = find_serving_layout(replace(GOAL, tpot_s=0.012), node(H100))
    assert free and tight and tight.batch < free.batch and tight.rps < free.rps and tight.tpot_s <= 0.012
    assert find_serving_layout(replace(GOAL, tpot_s=0.001), node(H100)) is None
    assert find_serving_layout(replace(GOAL, shape=LLAMA_70B), node(H100)) is None
    assert find_serving_layout(replace(GOAL, shape=LLAMA_70B), node(H100, 4)) is not None


def test_batch_fits_into_memory_with_its_whole_context() -> None:
    found = find_serving_layout(replace(GOAL, input_tokens=30_000, ttft_s=None, tpot_s=None), node(A100))
    assert found is not None
    assert found.batch * 30_128 * count_kv_bytes(GOAL.shape) <= found.kv_bytes_max
    assert found.count_replicas(found.rps * 2.5) == 3


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [
        (None, None, {1, 2, 4, 8}), (32, 8, {1, 2, 4, 8}), (28, 4, {1, 2, 4}), (32, 1, {1, 2, 4, 8}),
        (4, 4, {1, 2, 4}), (36, 6, {1, 2}),
    ],
)  # fmt: skip
def test_engines_split_the_given_heads_evenly(heads: int | None, kv_heads: int | None, expected: set[int]) -> None:
    shape = ModelShape(layers=2, width=4608, heads=heads or 32, kv_heads=kv_heads)
    request = ServingRequest(heads=heads, kv_heads=kv_heads)
    goal = replace(GOAL, shape=shape)
    assert {count for count in (1, 2, 3, 4, 8, 16) if can_split(request, goal, node(H100, count))} == expected
