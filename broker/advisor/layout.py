"""Lay out one training run on a given gang: the fastest of the simple layouts that fit its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from broker.advisor.experts import find_experts
from broker.advisor.field_layout import list_field_shardings, measure_field_memory
from broker.advisor.trainer_memory import estimate_program_memory
from broker.frozen import frozen
from broker.optimizer.memory_model import Dtype, MemoryEstimate, Recompute, Sharding, find_usable_bytes
from broker.optimizer.model_shape import ModelShape
from broker.optimizer.roofline import (
    EXPERTS_HIDDEN_SHARE,
    DataTime,
    Hardware,
    StepTime,
    TurnTime,
    assemble_step,
    bound_step,
    count_micro_batches,
    find_mfu,
    time_data,
    time_turn,
)

# A strategy with more parts must be this much faster per part: it is harder to set up and to debug.
PART_WORTH = 0.03
EXPERT_RANKS = (1, 2, 4, 8, 16, 32, 64)
PIPELINES = (2, 4, 8, 16, 32, 64)
MICRO_BATCHES = (16, 8, 4, 2, 1)  # powers of two: the time of each is an exact multiple of the last one's
RECOMPUTE: tuple[Recompute, ...] = ("selective", "full")


# The bundled `trainers.lm`, or a program with all of Megatron-LM's layouts.
Trainer = Literal["bundled", "megatron"]


@frozen
class Training:
    """The training run. `sequence` in tokens, `batch` in sequences."""

    shape: ModelShape
    tokens: float
    sequence: int
    batch: int
    dtype: Dtype = "bf16"
    trainer: Trainer = "bundled"

    @property
    def steps(self) -> float:
        """Number of optimizer steps; not rounded."""
        return self.tokens / (self.batch * self.sequence)


@frozen
class Variant:
    """One way to split the work of a sharding. `need` is the total of `memory`."""

    micro_batch: int
    recompute: Recompute
    memory: MemoryEstimate
    need: float


@frozen
class ShardingChoice:
    """A sharding with its variants, in the order in which they are preferred if they take the same time.

    The time of a step is multiplied by `weight` to compare shardings; `need_min` is the least need of a variant.
    """

    sharding: Sharding
    weight: float
    variants: tuple[Variant, ...]
    need_min: float


@frozen
class Layout:
    """One way to run a training on `node_count` nodes of `hardware`.

    "selective" means that attention scores are not kept: flash attention, or Korthikanti's selective recomputation.
    """

    hardware: Hardware
    node_count: int
    sharding: Sharding
    micro_batch: int
    recompute: Recompute
    memory: MemoryEstimate
    step: StepTime
    mfu: float

    @property
    def strategy(self) -> str:
        """Return the name in a table: `DDP`, `FSDP`, `TP8 PP4 FSDP2`."""
        shape = self.sharding
        axes = (("TP", shape.tensor), ("CP", shape.context), ("PP", shape.pipeline), ("EP", shape.expert))
        parts = [f"{axis}{size}" for axis, size in axes if size > 1]
        name = "FSDP" if shape.zero == 3 else "DDP"
        if not parts:
            return name if shape.data > 1 else "1 GPU"
        return " ".join([*parts, *([f"{name}{shape.data}"] if shape.data > 1 else [])])


def find_layout(training: Training, hardware: Hardware, node_count: int) -> Layout | None:
    """Return the fastest layout that fits, preferring simpler ones; None if none fits. Pure."""
    usable = find_usable_bytes(hardware.figures.memory_gib)
    best: Layout | None = None
    least = math.inf
    for choice in list_choices(training, hardware.accelerators, node_count):
        if choice.need_min > usable:
            continue
        found = _find_fastest(training, hardware, choice, limit_s=least / choice.weight)
        if found is None:
            continue
        variant, memory, step = found
        if step.total_s * choice.weight < least:
            least = step.total_s * choice.weight
            peak = hardware.peak_flops(training.dtype) * hardware.accelerators * node_count
            best = Layout(
                hardware=hardware, node_count=node_count, sharding=choice.sharding, micro_batch=variant.micro_batch,
                recompute=variant.recompute, memory=memory, step=step,
                mfu=find_mfu(training.shape, step, sequence=training.sequence, batch=training.batch, peak_flops=peak),
            )  # fmt: skip
    return best


@lru_cache(maxsize=512)
def list_choices(training: Training, accelerators: int, node_count: int) -> tuple[ShardingChoice, ...]:
    """List the shardings of a gang with their variants. Cached, because gangs of different cards share them."""
    return tuple(_make_choice(training, sharding) for sharding in list_shardings(training, accelerators, node_count))


def _make_choice(training: Training, sharding: Sharding) -> ShardingChoice:
    variants = []
    for recompute in RECOMPUTE:
        for micro_batch in MICRO_BATCHES:
            if can_split(training, sharding, micro_batch):
                memory = measure_memory(training, sharding, micro_batch=micro_batch, recompute=recompute)
                variants.append(Variant(micro_batch=micro_batch, recompute=recompute, memory=memory, need=memory.total))
    parts = (sharding.tensor > 1) + 2 * (sharding.pipeline > 1) + (sharding.zero == 3)
    return ShardingChoice(
        sharding=sharding, weight=1 + PART_WORTH * parts, variants=tuple(variants),
        need_min=min((each.need for each in variants), default=math.inf),
    )  # fmt: skip


def find_smallest_memory(training: Training, hardware: Hardware, node_count: int) -> MemoryEstimate | None:
    """Return the memory of the most economical layout, whether it fits or not.

    None if there is no layout, for example because the gang has more ranks than the batch has sequences.
    """
    needs = [
        measure_memory(training, sharding, micro_batch=1, recompute="full")
        for sharding in list_shardings(training, hardware.accelerators, node_count)
    ]
    return min(needs, key=lambda each: each.total, default=None)


def list_shardings(training: Training, accelerators: int, node_count: int) -> Iterator[Sharding]:
    """List shardings: tensor ranks within a node, and stages once tensor ranks fill it (Narayanan 2021, section 3.2).

    The bundled trainer's tensor ranks share heads and vocabulary evenly.
    """
    if training.trainer == "megatron":
        yield from list_field_shardings(
            training.shape, sequence=training.sequence, batch=training.batch, accelerators=accelerators,
            node_count=node_count,
        )  # fmt: skip
        return
    shape, total = training.shape, accelerators * node_count
    if shape.idle_parameters:
        yield from list_expert_shardings(training, total)
        return
    tensors = [t for t in (1, 2, 4, 8) if not (accelerators % t or shape.heads % t or shape.vocabulary % t)]
    for tensor in tensors:
        pipelines = (1, *PIPELINES) if tensor == tensors[-1] else (1,)
        for pipeline in pipelines:
            data, rest = divmod(total, tensor * pipeline)
            if rest or not 0 < data <= training.batch or pipeline > shape.layers or shape.layers % pipeline:
                continue
            for zero in (0, 3) if data > 1 else (0,):
                yield Sharding(
                    tensor=tensor, pipeline=pipeline, data=data, zero=zero, is_sequence_parallel=False
                )  # fmt: skip


def list_expert_shardings(training: Training, total: int) -> Iterator[Sharding]:
    """List the bundled trainer's shardings of a mixture of experts over `total` ranks.

    Expert ranks have an equal number of experts each; the other ranks have copies or shards of them.
    """
    experts = find_experts(training.shape)
    assert experts is not None, "a mixture has experts"
    for expert in EXPERT_RANKS:
        replicas, rest = divmod(total, expert)
        if rest or experts.count % expert or not 0 < total <= training.batch:
            continue
        for zero in (0, 3) if replicas > 1 else (0,):
            yield Sharding(data=total, zero=zero, is_sequence_parallel=False, expert=expert)


def measure_memory(training: Training, sharding: Sharding, *, micro_batch: int, recompute: Recompute) -> MemoryEstimate:
    """Return the memory of the program in `task_file.write_command`."""
    if training.trainer == "megatron":
        return measure_field_memory(
            training.shape, sharding, sequence=training.sequence, micro_batch=micro_batch, recompute=recompute,
            micro_batches=count_micro_batches(sharding, training.batch, micro_batch),
        )  # fmt: skip
    return estimate_program_memory(
        training.shape, sharding, sequence=training.sequence, micro_batch=micro_batch, recompute=recompute,
        micro_batches=count_micro_batches(sharding, training.batch, micro_batch), dtype=training.dtype,
    )  # fmt: skip


def list_activations(training: Training, layout: Layout) -> dict[Recompute, float]:
    """List bytes of a layout's activations under each kind of recomputation."""
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    return {
        kind: measure_memory(training, layout.sharding, micro_batch=layout.micro_batch, recompute=kind).activations
        for kind in kinds
    }


def can_split(training: Training, sharding: Sharding, micro_batch: int) -> bool:
    """Return whether the batch can be split like this: a pipeline needs equal micro-batches, at least one per stage."""
    passes, rest = divmod(training.batch, sharding.data * micro_batch)
    if training.trainer == "megatron":
        return micro_batch == 1 or passes >= sharding.pipeline
    if sharding.pipeline > 1:
        return not rest and passes >= sharding.pipeline
    return micro_batch == 1 or passes >= 1


def _find_fastest(
    training: Training, hardware: Hardware, choice: ShardingChoice, *, limit_s: float
) -> tuple[Variant, MemoryEstimate, StepTime] | None:
    """Return the fastest variant that fits, with its memory; None if none takes less than `limit_s`."""
    best: tuple[Variant, MemoryEstimate, StepTime] | None = None
    sharding, data = choice.sharding, _time_data(training, hardware, choice.sharding)
    turns = dict[Recompute, TurnTime]()  # of one sequence
    for each in _list_candidates(training, choice, find_usable_bytes(hardware.figures.memory_gib)):
        is_partial = each.recompute == "full" and training.trainer == "megatron"  # recomputes only what does not fit
        fastest: Recompute = "selective" if is_partial else each.recompute
        if fastest not in turns:
            turns[fastest] = _time_sequence(training, hardware, sharding, fastest)
        turn = turns[fastest]
        if bound_step(sharding, turn.total_s, data, batch=training.batch, micro_batch=each.micro_batch) >= limit_s:
            continue
        memory, step = each.memory, _time_step(training, hardware, sharding, each, turn, data)
        if is_partial:
            full = _time_sequence(training, hardware, sharding, "full")
            slow = _time_step(training, hardware, sharding, each, full, data)
            memory, step = _keep_what_fits(training, hardware, sharding, each, fast=step, slow=slow)
        if step.total_s < limit_s:
            best, limit_s = (each, memory, step), step.total_s
    return best


def _list_candidates(training: Training, choice: ShardingChoice, usable: float) -> list[Variant]:
    """Return the variants that fit and may be the fastest.

    Without stages, recomputation and smaller micro-batches only take time, except that the smaller of two micro-batches
    may divide the batch more evenly. Stages have a smaller bubble with smaller micro-batches.
    """
    fitting = [each for each in choice.variants if each.need <= usable]
    if not fitting or choice.sharding.pipeline > 1:
        return fitting
    largest = fitting[0]
    is_even = training.batch % (choice.sharding.data * largest.micro_batch) == 0
    is_first_fastest = is_even and not (largest.recompute == "full" and training.trainer == "megatron")
    return [each for each in fitting if each.recompute == largest.recompute][: 1 if is_first_fastest else 2]


def _time_sequence(training: Training, hardware: Hardware, sharding: Sharding, recompute: Recompute) -> TurnTime:
    """Time a micro-batch of one sequence; those of larger ones are multiples."""
    is_megatron = training.trainer == "megatron"
    return time_turn(
        training.shape, sharding, hardware, sequence=training.sequence, micro_batch=1,
        recompute="none" if is_megatron and recompute == "selective" else recompute, dtype=training.dtype,
        experts_hidden_share=EXPERTS_HIDDEN_SHARE if is_megatron else 0.0,
    )  # fmt: skip


def _time_data(training: Training, hardware: Hardware, sharding: Sharding) -> DataTime:
    is_megatron = training.trainer == "megatron"
    return time_data(
        training.shape, sharding, hardware, dtype=training.dtype,
        # Gradients are accumulated in float32, by Megatron-LM too.
        gradient_bytes=2 if training.dtype == "fp16" and not is_megatron else 4,
        # The bundled trainer's `allreduce` does not overlap.
        is_overlapped=is_megatron or sharding.zero == 3 or sharding.tensor * sharding.pipeline * sharding.expert == 1,
    )  # fmt: skip


def _time_step(
    training: Training,
    hardware: Hardware,
    sharding: Sharding,
    variant: Variant,
    sequence_turn: TurnTime,
    data: DataTime,
) -> StepTime:
    return assemble_step(
        training.shape, sharding, hardware, sequence_turn.scale(variant.micro_batch), data,
        sequence=training.sequence, batch=training.batch, micro_batch=variant.micro_batch,
    )  # fmt: skip


def _keep_what_fits(
    training: Training, hardware: Hardware, sharding: Sharding, variant: Variant, *, fast: StepTime, slow: StepTime
) -> tuple[MemoryEstimate, StepTime]:
    """Recompute only as many blocks as needed (Megatron-LM's `--recompute-method block`).

    Memory and time are interpolated linearly between recomputing all blocks, `slow`, and none, `fast`.
    """
    full = variant.memory
    kept = measure_memory(training, sharding, micro_batch=variant.micro_batch, recompute="selective")
    spare = find_usable_bytes(hardware.figures.memory_gib) - full.total
    share = min(1.0, spare / (kept.total - full.total)) if kept.total > full.total else 1.0
    step = StepTime(**{
        name: getattr(slow, name) + share * (getattr(fast, name) - getattr(slow, name))
        for name in (
            "compute_s", "memory_s", "tensor_s", "pipeline_s", "data_s", "update_s", "exchange_s",
        )
    })  # fmt: skip
    activations = full.activations + share * (kept.activations - full.activations)
    return replace(full, activations=activations), step
