"""The memory of advised layouts equals that of the program they name, and that program starts."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.advisor.advise import Option
from broker.advisor.experts import find_experts, round_experts
from broker.advisor.layout import Layout, Training, can_split, list_shardings, measure_memory
from broker.advisor.task_file import write_command
from broker.advisor.trainer_memory import (
    BLOCK_BYTES,
    EXPERT_BYTES,
    count_activations,
    count_own_parameters,
    estimate_trainer_memory,
)
from broker.optimizer.memory_model import Sharding
from broker.optimizer.model_shape import ModelShape, guess_shape
from broker.optimizer.roofline import Hardware, StepTime
from broker.types import AcceleratorFigures, CheckpointSpec, Estimate, Offer, Placement, Task
from tests.tiers import spread
from tests.trainers.strategies.conftest import Worlds, read_losses

SEVEN = guess_shape(7e9)


def measure_kept(layers: int, recompute: str, dtype: str, **more: int) -> tuple[float, float]:
    """Return the bytes that the trainer's network keeps for its backward pass, and the part that is copies of
    weights."""
    import torch

    from trainers.blocks import prepare_blocks
    from trainers.config import ModelConfig
    from trainers.models import create_language_model

    config = ModelConfig(depth=layers, width=128, heads=2, context=48, vocabulary=64, tie_embeddings=True, **more)
    model = create_language_model("gpt", config)
    prepare_blocks(model, recompute=recompute, is_compiled=False)
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    shapes = {each.shape for each in model.parameters() if each.dim() == 2 and 48 not in each.shape}
    shapes |= {each[::-1] for each in shapes}
    kept, copies = dict[int, int](), dict[int, int]()
    alive = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(tensor)  # or its address would be reused
            (copies if tensor.shape in shapes else kept)[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(1, 48, dtype=torch.long)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
        model(tokens)
    return sum(kept.values()), sum(copies.values())


@pytest.mark.parametrize("mlp_width", [512, 768])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_block_keeps_the_same_activations_as_the_trainers_block(dtype: str, mlp_width: int) -> None:
    measured = (measure_kept(layers, "none", dtype, hidden_width=mlp_width) for layers in (2, 6))
    (few, few_copies), (many, many_copies) = measured
    shape = ModelShape(layers=4, width=128, heads=2, vocabulary=64, mlp_width=mlp_width)
    counted = count_activations(
        shape, Sharding(), sequence=48, micro_batch=1, micro_batches=1, recompute="selective", dtype=dtype
    )
    logits = 12 * 48 * 64
    assert many - few == pytest.approx(counted - logits, rel=0.03)
    assert sum(BLOCK_BYTES[dtype]) * 4 * 48 * 128 == pytest.approx(counted - logits) or mlp_width != 512
    assert (many_copies - few_copies) / 4 == (2 * (4 * 128 + 2 * mlp_width) * 128 if dtype == "bf16" else 0)


def test_full_recomputation_keeps_each_blocks_input() -> None:
    assert (measure_kept(6, "full", "bf16")[0] - measure_kept(2, "full", "bf16")[0]) / 4 / (48 * 128) == 4


def test_parameters_are_those_of_the_trainers_network() -> None:
    from trainers.config import ModelConfig
    from trainers.models import create_language_model

    shape = ModelShape(layers=6, width=512, heads=4, vocabulary=1024)
    for tied, sharding in ((True, Sharding()), (False, Sharding(tensor=2))):
        config = ModelConfig(depth=6, width=512, heads=4, context=256, vocabulary=1024, tie_embeddings=tied)
        real = sum(each.numel() for each in create_language_model("gpt", config).parameters())
        whole = count_own_parameters(shape, sharding, sequence=256)
        if not tied:  # a rank has half of everything but embeddings
            whole += 6 * 12 * 512**2 / 2 + 1024 * 512 / 2
        assert whole == pytest.approx(real, rel=0.003)  # biases and norms


@pytest.mark.parametrize("expert", spread([2, 1], every=2))
def test_parameters_of_a_mixture_are_those_of_the_trainers_network(expert: int) -> None:
    from trainers.config import ModelConfig
    from trainers.models import create_language_model
    from trainers.models.experts import count_idle_parameters

    shape = round_experts(ModelShape(layers=6, width=512, heads=4, vocabulary=1024, idle_parameters=40e6))
    experts = find_experts(shape)
    assert experts is not None and experts.count % 2 == 0
    config = ModelConfig(
        depth=6, width=512, heads=4, context=256, vocabulary=1024, tie_embeddings=True, experts=experts.count,
        experts_per_token=experts.per_token, hidden_width=experts.width,
    )  # fmt: skip
    real = sum(each.numel() for each in create_language_model("gpt", config).parameters())
    assert shape.idle_parameters == count_idle_parameters(config)
    elsewhere = experts.count * 6 * 2 * 512 * experts.width * (1 - 1 / expert)
    sharding = Sharding(data=expert, expert=expert)
    assert count_own_parameters(shape, sharding, sequence=256) + elsewhere == pytest.approx(real, rel=0.003)


@pytest.mark.parametrize("expert", [1, 2])
def test_a_mixture_is_laid_out_over_expert_ranks_that_divide_its_experts(expert: int) -> None:
    shape = round_experts(ModelShape(layers=8, width=1024, heads=8, idle_parameters=7e8 * expert))
    training = Training(shape=shape, tokens=1e9, sequence=1024, batch=64)
    experts, found = find_experts(shape), list(list_shardings(training, 8, 2))
    assert experts is not None and {each.expert for each in found} > {1}
    assert all(experts.count % each.expert == 0 and each.data == 16 for each in found)
    assert {each.zero for each in found} == {0, 3}


def test_experts_spread_over_more_ranks_take_less_memory_each() -> None:
    shape = round_experts(replace(SEVEN, idle_parameters=20e9))

    def measure(expert: int, zero: int) -> float:
        return estimate_trainer_memory(
            shape, Sharding(data=8, expert=expert, zero=zero), sequence=2048, micro_batch=1, micro_batches=1,
            recompute="full", dtype="bf16",
        ).total  # fmt: skip

    assert measure(4, 0) < measure(2, 0) < measure(1, 0)
    assert measure(1, 3) < measure(1, 0)


@pytest.mark.parametrize("per_token", spread([2, 1], every=2))
def test_a_block_of_experts_keeps_the_same_activations_as_the_trainers(per_token: int) -> None:
    dense, mixed = (measure_block(experts, per_token) for experts in (0, 8))
    assert mixed - dense == pytest.approx(EXPERT_BYTES["fp32"] * per_token, abs=0.5)


def measure_block(experts: int, per_token: int) -> float:
    """Return bytes that one more block keeps in float32, per token and unit of width."""
    more = {"experts": experts, "experts_per_token": per_token, "hidden_width": 512 // per_token} if experts else {}
    few, many = (measure_kept(layers, "none", "fp32", **more)[0] for layers in (2, 6))
    return (many - few) / 4 / (48 * 128)


def test_sums_over_micro_batches_are_kept_whole_and_in_float32_under_full_sharding() -> None:
    def measure(micro_batches: int) -> float:
        return estimate_trainer_memory(
            SEVEN, Sharding(data=8, zero=3), sequence=2048, micro_batch=1, micro_batches=micro_batches,
            recompute="full", dtype="bf16",
        ).gradients  # fmt: skip

    assert measure(1) * 8 == measure(2) == 4 * count_own_parameters(SEVEN, Sharding(), sequence=2048)


def test_ddp_holds_copies_and_buckets_in_addition_to_sixteen_bytes_per_parameter() -> None:
    memory = estimate_trainer_memory(
        SEVEN, Sharding(data=8), sequence=2048, micro_batch=1, micro_batches=1, recompute="full", dtype="bf16"
    )
    own = count_own_parameters(SEVEN, Sharding(), sequence=2048)
    assert memory.total - memory.activations == pytest.approx(22 * own)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["none", "selective", "full"]))
def test_more_tensor_ranks_or_stages_never_hold_more(tensor: int, pipeline: int, recompute: Any) -> None:
    def measure(tensor: int, pipeline: int) -> float:
        return estimate_trainer_memory(
            SEVEN, Sharding(tensor=tensor, pipeline=pipeline), sequence=2048, micro_batch=1, micro_batches=16,
            recompute=recompute, dtype="bf16",
        ).total  # fmt: skip

    here = measure(tensor, pipeline)
    assert measure(2 * tensor, pipeline) <= here * 1.05 if tensor == 1 else measure(2 * tensor, pipeline) <= here
    assert measure(tensor, 2 * pipeline) <= here


@given(st.floats(1e8, 1e11), st.floats(1.1, 4), st.sampled_from([0, 3]))
def test_larger_models_hold_more(parameters: float, factor: float, zero: int) -> None:
    small, large = guess_shape(parameters), guess_shape(parameters * factor)
    if large.parameters > small.parameters and large.width >= small.width:
        needs = [
            estimate_trainer_memory(
                each, Sharding(data=8, zero=zero), sequence=2048, micro_batch=1, micro_batches=2, recompute="full",
                dtype="bf16",
            )
            for each in (small, large)
        ]  # fmt: skip
        assert needs[0].weights < needs[1].weights


def test_the_last_stage_holds_the_logits() -> None:
    wide = ModelShape(layers=2, width=256, heads=2, vocabulary=200_000)
    count = {"sequence": 1024, "micro_batch": 4, "micro_batches": 2, "recompute": "full", "dtype": "bf16"}
    held = count_activations(wide, Sharding(pipeline=2), **count)  # type: ignore[arg-type]
    assert held > 12 * 4096 * 200_000


def test_a_pipeline_gets_equal_micro_batches_and_at_least_one_per_stage() -> None:
    training = Training(shape=SEVEN, tokens=1e9, sequence=2048, batch=24)
    assert can_split(training, Sharding(pipeline=4, data=2), 2)
    assert not can_split(training, Sharding(pipeline=8, data=2), 2), "six micro-batches for eight stages"
    assert not can_split(training, Sharding(pipeline=2, data=1), 5), "24 is not a multiple of 5"
    assert can_split(training, Sharding(data=5), 2)


def test_a_vocabulary_that_tensor_ranks_cannot_share_is_not_shared() -> None:
    odd = ModelShape(layers=8, width=1024, heads=8, vocabulary=50_257)
    training = Training(shape=odd, tokens=1e9, sequence=1024, batch=64)
    assert {each.tensor for each in list_shardings(training, 8, 1)} == {1}


def make_option(training: Training, sharding: Sharding) -> Option:
    figures = AcceleratorFigures(name="H100", memory_gib=80, bf16_dense_tflops=989, memory_bandwidth_gbs=3350)
    hardware = Hardware(figures=figures, accelerators=sharding.accelerators, network_gbs=400)
    memory = measure_memory(training, sharding, micro_batch=1, recompute="full")
    step = StepTime(compute_s=1, memory_s=0, tensor_s=0, pipeline_s=0, data_s=0, update_s=0)
    layout = Layout(
        hardware=hardware, node_count=1, sharding=sharding, micro_batch=1, recompute="full", memory=memory, step=step,
        mfu=0.4,
    )  # fmt: skip
    offer = Offer(cloud="aws", region="r", zone=None, instance_type="x", vcpus=8, memory_gib=64, ondemand_usd_hour=1.0)
    estimate = Estimate(placement=Placement(offer=offer, is_spot=False, node_count=1))
    return Option(layout=layout, task=Task(checkpoint=CheckpointSpec()), work_hours=1, estimate=estimate)


@pytest.mark.parametrize(("mlp_width", "is_written"), [(None, False), (320.0, True)])
def test_the_command_states_the_width_of_an_unusual_mlp(mlp_width: float | None, is_written: bool) -> None:
    shape = ModelShape(layers=2, width=64, heads=2, vocabulary=512, mlp_width=mlp_width)
    training = Training(shape=shape, tokens=2 * 8 * 32, sequence=32, batch=8)
    script = " ".join(write_command(training, make_option(training, Sharding(data=2))))
    assert ("--model.hidden_width 320" in script) is is_written


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(Sharding(data=2), id="ddp", marks=pytest.mark.exhaustive),
        pytest.param(Sharding(pipeline=2, data=2), id="pipeline+allreduce", marks=pytest.mark.exhaustive),
        pytest.param(Sharding(tensor=2, data=2), id="allreduce+tensor", marks=pytest.mark.exhaustive),
        pytest.param(Sharding(tensor=2, data=2, zero=3), id="fsdp+tensor", marks=pytest.mark.long),
        pytest.param(Sharding(pipeline=2, data=2, zero=3), id="pipeline+fsdp", marks=pytest.mark.exhaustive),
        pytest.param(Sharding(data=4, zero=3, expert=2), id="fsdp+expert", marks=pytest.mark.exhaustive),
    ],
)
def test_the_command_of_every_kind_of_layout_trains(worlds: Worlds, sharding: Sharding, tmp_path: Path) -> None:
    mlp_width = 320.0 if sharding.tensor > 1 else None
    shape = ModelShape(layers=2, width=64, heads=2, vocabulary=512, mlp_width=mlp_width)
    if sharding.expert > 1:
        shape = round_experts(replace(shape, idle_parameters=64**2 * 8))
    training = Training(shape=shape, tokens=2 * 8 * 32, sequence=32, batch=8)
    script = "\n".join(write_command(training, make_option(training, sharding)))
    shell = 'python() { printf "%s\\n" "$@"; }\n'  # so that the shell prints the program's arguments
    done = subprocess.run(
        ["bash", "-c", shell + script], env={**os.environ, "DATA": ""}, capture_output=True, text=True, check=True
    )
    program, flags = done.stdout.splitlines()[:2], done.stdout.splitlines()[2:]
    assert program == ["-m", "trainers.lm"]
    ended = worlds.call(tmp_path, "trainers.lm:main", flags, ranks=sharding.accelerators)
    assert ended.codes == [0] * sharding.accelerators, ended.errors
    assert max(read_losses(tmp_path)) == 2
