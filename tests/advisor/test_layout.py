"""The search for a layout: its bounds and shared terms never change which layout is found."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.advisor.layout import (
    MICRO_BATCHES,
    PART_WORTH,
    RECOMPUTE,
    Trainer,
    Training,
    can_split,
    find_layout,
    list_shardings,
    measure_memory,
)
from broker.optimizer.memory_model import Recompute, Sharding, find_usable_bytes
from broker.optimizer.model_shape import guess_shape
from broker.optimizer.roofline import Hardware, bound_step, estimate_step, time_data, time_turn
from broker.types import AcceleratorFigures

H100 = AcceleratorFigures(name="H100", memory_gib=80, bf16_dense_tflops=989, memory_bandwidth_gbs=3350, nvlink_gbs=900)
L4 = AcceleratorFigures(name="L4", memory_gib=24, bf16_dense_tflops=121, memory_bandwidth_gbs=300)
H100_NODE = Hardware(figures=H100, accelerators=8, network_gbs=400)
L4_NODE = Hardware(figures=L4, accelerators=4, network_gbs=3)


def find_least_score(training: Training, hardware: Hardware, node_count: int) -> float | None:
    """Time every variant of every sharding of the bundled trainer; return the least weighted seconds."""
    scores, usable = [], find_usable_bytes(hardware.figures.memory_gib)
    for sharding in list_shardings(training, hardware.accelerators, node_count):
        fitting: list[tuple[int, Recompute]] = [
            (micro_batch, recompute)
            for recompute in RECOMPUTE
            for micro_batch in MICRO_BATCHES
            if can_split(training, sharding, micro_batch)
            and measure_memory(training, sharding, micro_batch=micro_batch, recompute=recompute).total <= usable
        ]
        if sharding.pipeline == 1:  # by definition: recomputation only where needed, and the two largest micro-batches
            fitting = [each for each in fitting if each[1] == fitting[0][1]][:2]
        parts = (sharding.tensor > 1) + 2 * (sharding.pipeline > 1) + (sharding.zero == 3)
        scores += [
            estimate_step(
                training.shape, sharding, hardware, sequence=training.sequence, batch=training.batch,
                micro_batch=micro_batch, recompute=recompute, gradient_bytes=4, experts_hidden_share=0.0,
                is_overlapped=sharding.zero == 3 or sharding.tensor * sharding.pipeline * sharding.expert == 1,
            ).total_s * (1 + PART_WORTH * parts)
            for micro_batch, recompute in fitting
        ]  # fmt: skip
    return min(scores, default=None)


@settings(max_examples=25)
@given(
    st.sampled_from([3.5e8, 1.3e9, 8e9, 3e10, 7e10]),
    st.sampled_from([96, 500, 512, 513, 1024]),
    st.sampled_from([H100_NODE, L4_NODE]),
    st.sampled_from([1, 2, 3, 4, 8, 16, 48]),
)  # fmt: skip
def test_search_finds_the_least_of_all_timed_variants(
    parameters: float, batch: int, hardware: Hardware, node_count: int
) -> None:
    training = Training(shape=guess_shape(parameters), tokens=1e10, sequence=4096, batch=batch)
    layout, least = find_layout(training, hardware, node_count), find_least_score(training, hardware, node_count)
    if layout is None or least is None:
        assert layout is None and least is None
        return
    sharding = layout.sharding
    parts = (sharding.tensor > 1) + 2 * (sharding.pipeline > 1) + (sharding.zero == 3)
    assert layout.step.total_s * (1 + PART_WORTH * parts) == pytest.approx(least, rel=1e-12)


@settings(max_examples=50)
@given(
    st.sampled_from(["bundled", "megatron"]), st.sampled_from([1, 2, 6, 32]), st.sampled_from([500, 513, 1024]),
    st.sampled_from(MICRO_BATCHES), st.sampled_from(["none", "selective", "full"]), st.integers(0, 1000),
)  # fmt: skip
def test_no_step_takes_less_than_its_bound(
    trainer: Trainer, node_count: int, batch: int, micro_batch: int, recompute: Recompute, number: int
) -> None:
    hardware = Hardware(figures=H100, accelerators=8, network_gbs=50)
    training = Training(shape=guess_shape(8e9), tokens=1e10, sequence=8192, batch=batch, trainer=trainer)
    shardings = list(list_shardings(training, 8, node_count))
    sharding: Sharding = shardings[number % len(shardings)]
    step = estimate_step(
        training.shape, sharding, hardware, sequence=8192, batch=batch, micro_batch=micro_batch, recompute=recompute
    )
    sequence = time_turn(training.shape, sharding, hardware, sequence=8192, micro_batch=1, recompute=recompute)
    data = time_data(training.shape, sharding, hardware, dtype="bf16")
    bound = bound_step(sharding, sequence.total_s, data, batch=batch, micro_batch=micro_batch)
    assert step.total_s * 0.7 < bound < step.total_s  # of what is left out, transfers between stages are the most
