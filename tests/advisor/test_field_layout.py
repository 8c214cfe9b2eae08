"""Layouts in common practice: compared with published runs, and properties of any such search."""

from __future__ import annotations

import itertools

import pytest

from broker.advisor.advise import find_hours
from broker.advisor.field_layout import measure_field_memory
from broker.advisor.layout import Training, find_layout
from broker.optimizer.memory_model import Sharding, find_usable_bytes
from broker.optimizer.model_shape import ModelShape, guess_shape
from broker.optimizer.roofline import Hardware, estimate_step, find_mfu
from broker.types import AcceleratorFigures

H100 = AcceleratorFigures(name="H100", memory_gib=80, bf16_dense_tflops=989, memory_bandwidth_gbs=3350, nvlink_gbs=900)
A100 = AcceleratorFigures(name="A100", memory_gib=40, bf16_dense_tflops=312, memory_bandwidth_gbs=1555, nvlink_gbs=600)
NODE = Hardware(figures=H100, accelerators=8, network_gbs=400)
LLAMA_8B = ModelShape(layers=32, width=4096, heads=32, kv_heads=8, vocabulary=128256, mlp_width=1.5 * 14336)
LLAMA_70B = ModelShape(layers=80, width=8192, heads=64, kv_heads=8, vocabulary=128256, mlp_width=1.5 * 28672)
LLAMA_405B = ModelShape(layers=126, width=16384, heads=128, kv_heads=8, vocabulary=128256, mlp_width=1.5 * 53248)
MPT_7B = ModelShape(layers=32, width=4096, heads=32, vocabulary=50432)
# 256 routed experts of width 2,048, of which a token uses 8, and one shared; 671B in total, 37B active.
DEEPSEEK_V3 = ModelShape(
    layers=61, width=7168, heads=128, kv_heads=32, vocabulary=129280, mlp_width=1.5 * 9 * 2048, idle_parameters=636e9
)


# Dubey 2024 (Llama 3), table 4: GPUs, sequence, sequences a batch, context ranks, data ranks, TFLOP/s a GPU.
LLAMA_3 = [
    pytest.param(8192, 8192, 2048, 1, 64, 430, id="8k-gpus"),
    pytest.param(16384, 8192, 2048, 1, 128, 400, id="16k-gpus"),
    pytest.param(16384, 131072, 128, 16, 8, 380, id="16k-gpus-128k-tokens"),
]


@pytest.mark.parametrize(("gpus", "sequence", "batch", "context", "data", "tflops"), LLAMA_3)
def test_llama_3_405b_reaches_its_published_utilisation_within_12_percent(
    gpus: int, sequence: int, batch: int, context: int, data: int, tflops: float
) -> None:
    sharding = Sharding(tensor=8, pipeline=16, data=data, context=context, zero=2, interleave=7)
    assert sharding.accelerators == gpus
    step = estimate_step(
        LLAMA_405B, sharding, NODE, sequence=sequence, batch=batch, micro_batch=1, recompute="none", gradient_bytes=4
    )
    mfu = find_mfu(LLAMA_405B, step, sequence=sequence, batch=batch, peak_flops=gpus * 989e12)
    assert tflops / 989 / 1.12 < mfu < tflops / 989 * 1.12


# GPU hours of whole runs: Llama 3.1's model card (70B, 405B); DeepSeek-AI 2024, table 1, pre-training on H800 in
# FP8; MosaicML 2023: 9.5 days of 440 A100 of 40 GB.
RUNS = [
    pytest.param(LLAMA_405B, NODE, 2048, 15.6e12, 8192, 2048, 30_840_000, 1.25, id="llama3.1-405b"),
    pytest.param(LLAMA_70B, NODE, 512, 15e12, 8192, 1024, 7_000_000, 1.4, id="llama3.1-70b"),
    # The card does not state the number of GPUs; assumed: 16,384 of a cluster of 24,576, as for the 405B model.
    pytest.param(LLAMA_8B, NODE, 2048, 15e12, 8192, 512, 1_460_000, 1.25, id="llama3.1-8b"),
    pytest.param(DEEPSEEK_V3, NODE, 256, 14.8e12, 4096, 15360, 2_664_000, 1.35, id="deepseek-v3"),
    pytest.param(
        MPT_7B, Hardware(figures=A100, accelerators=8, network_gbs=200), 55, 1e12, 2048, 1760, 100_320, 1.5, id="mpt-7b"
    ),
]


@pytest.mark.parametrize(("shape", "hardware", "nodes", "tokens", "sequence", "batch", "gpu_hours", "factor"), RUNS)
def test_published_gpu_hours_are_met_within_the_stated_factor(
    shape: ModelShape, hardware: Hardware, nodes: int, tokens: float, sequence: int, batch: int, gpu_hours: float,
    factor: float,
) -> None:  # fmt: skip
    training = Training(shape=shape, tokens=tokens, sequence=sequence, batch=batch, trainer="megatron")
    layout = find_layout(training, hardware, nodes)
    assert layout is not None
    assert gpu_hours / factor < find_hours(training, layout) * 8 * nodes < gpu_hours * factor


def test_number_of_gpus_explains_the_hours_of_a_small_model() -> None:
    """Llama 3.1 8B in batches of 4M tokens: the published 1.46 million hours are 2.7 times those of 512 GPUs."""
    training = Training(shape=LLAMA_8B, tokens=15e12, sequence=8192, batch=512, trainer="megatron")
    hours = {}
    for nodes in (64, 512, 1024, 2048):
        layout = find_layout(training, NODE, nodes)
        assert layout is not None
        hours[nodes] = find_hours(training, layout) * 8 * nodes
    assert list(hours.values()) == sorted(hours.values())
    assert hours[64] < 1_460_000 / 2.5
    assert hours[2048] > 2 * hours[64]


def test_llama_3_405b_on_16384_gpus_is_laid_out_as_it_was_trained() -> None:
    training = Training(shape=LLAMA_405B, tokens=15.6e12, sequence=8192, batch=2048, trainer="megatron")
    layout = find_layout(training, NODE, 2048)
    assert layout is not None and layout.strategy == "TP8 PP16 DDP128"


@pytest.mark.parametrize("parameters", [7e9, 70e9, 405e9])
@pytest.mark.parametrize("nodes", [16, 128, 1024])
def test_twice_the_batch_is_never_slower_per_token(parameters: float, nodes: int) -> None:
    seconds = []
    for batch in (512, 1024, 2048, 4096, 8192):
        training = Training(
            shape=guess_shape(parameters), tokens=1e12, sequence=4096, batch=batch, trainer="megatron"
        )  # fmt: skip
        layout = find_layout(training, NODE, nodes)
        if layout is not None:
            assert layout.memory.total <= find_usable_bytes(80) * 1.0001
            seconds.append(layout.step.total_s / batch)
    assert seconds
    # Of two with nearly the same speed, the simpler layout is chosen.
    assert all(later <= before * 1.04 for before, later in itertools.pairwise(seconds))


def test_context_ranks_train_sequences_that_no_other_layout_holds() -> None:
    def find(trainer: str) -> object:
        training = Training(
            shape=LLAMA_70B, tokens=1e12, sequence=131072, batch=128, trainer=trainer  # type: ignore[arg-type]
        )  # fmt: skip
        layout = find_layout(training, NODE, 64)
        return layout and layout.sharding.context

    assert find("bundled") is None
    context = find("megatron")
    assert isinstance(context, int) and context > 1


def test_experts_are_shared_by_expert_ranks() -> None:
    def count_weights(expert: int) -> float:
        return measure_field_memory(
            DEEPSEEK_V3, Sharding(pipeline=16, data=128, expert=expert, zero=2), sequence=4096, micro_batch=1,
            micro_batches=16, recompute="full",
        ).weights  # fmt: skip

    active = DEEPSEEK_V3.active_parameters
    rest = active - 61 * 9 * 3 * 7168 * 2048  # a token uses 9 experts of width 2,048, with three matrices each
    experts = DEEPSEEK_V3.parameters - rest
    assert count_weights(1) == pytest.approx(2 * DEEPSEEK_V3.parameters / 16)
    assert count_weights(64) == pytest.approx(2 * (rest + experts / 64) / 16), "active experts are shared, too"
    assert DEEPSEEK_V3.parameters == pytest.approx(671e9, rel=0.01)
    assert DEEPSEEK_V3.flops_per_token(0) == 6 * active
