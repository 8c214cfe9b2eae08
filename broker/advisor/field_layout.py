"""List layouts of programs such as Megatron-LM or torchtitan that the bundled trainer lacks, and count their memory.

They have sequence, context and expert parallelism, interleaved stages, and optimizer states sharded over data ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from broker.optimizer.memory_model import MemoryEstimate, Recompute, Sharding, estimate_activations
from broker.optimizer.model_shape import ModelShape
from broker.optimizer.roofline import count_own_parameters

PIPELINES = (1, 2, 4, 8, 16, 32, 64)
EXPERTS = (8, 16, 32, 64)
CONTEXT_TOKENS_MIN = 8192  # tokens of a sequence per context rank: shorter sequences fit on one card
INTERLEAVE_MAX = 8
WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 4, 12  # Megatron-LM: bfloat16 weights, float32 gradients and states


def list_field_shardings(
    shape: ModelShape, *, sequence: int, batch: int, accelerators: int, node_count: int
) -> Iterator[Sharding]:
    """List shardings: tensor ranks within a node, stages across nodes, context ranks for long sequences only.

    Layers need not divide by stages (Llama 3 405B has 126 layers in 16), nor batches by ranks.
    """
    total = accelerators * node_count
    tensors = [t for t in (1, 2, 4, 8) if not (accelerators % t or shape.heads % t)]
    contexts = [c for c in (1, 2, 4, 8, 16) if c == 1 or sequence / c >= CONTEXT_TOKENS_MIN]
    for tensor in tensors:
        for pipeline in PIPELINES if tensor == tensors[-1] or shape.idle_parameters else (1,):
            for context in contexts:
                data, rest = divmod(total, tensor * pipeline * context)
                if rest or not 0 < data <= batch or pipeline > shape.layers:
                    continue
                for expert in _list_experts(shape, data * context):
                    for zero, interleave in _list_schedules(shape, pipeline, data * context):
                        yield Sharding(
                            tensor=tensor, pipeline=pipeline, data=data, context=context, expert=expert, zero=zero,
                            interleave=interleave,
                        )  # fmt: skip


def _list_experts(shape: ModelShape, replicas: int) -> list[int]:
    if not shape.idle_parameters:
        return [1]
    return [e for e in EXPERTS if replicas % e == 0] or [1]


def _list_schedules(shape: ModelShape, pipeline: int, replicas: int) -> list[tuple[int, int]]:
    """List (ZeRO stage, chunks per rank): full sharding without stages, sharded gradients and states with them."""
    if pipeline == 1:
        return [(2, 1), (3, 1)] if replicas > 1 else [(0, 1)]
    most = min(INTERLEAVE_MAX, shape.layers // pipeline)
    return [(2, 1), (2, most)] if most > 1 else [(2, 1)]


def measure_field_memory(
    shape: ModelShape, sharding: Sharding, *, sequence: int, micro_batch: int, micro_batches: int, recompute: Recompute
) -> MemoryEstimate:
    """Return bytes on the fullest rank, without attention scores, because flash attention does not store them."""
    own, replicas = count_own_parameters(shape, sharding), sharding.replicas
    # Expert parameters exist once per `expert` ranks: their states are sharded over correspondingly fewer replicas.
    sharded = shape.parameters / (sharding.tensor * sharding.pipeline * replicas)
    is_full = sharding.zero == 3 and replicas > 1
    # Two blocks' weights (one computes, the next is fetched) and one block's gradients before they are scattered.
    gathered = (2 * WEIGHT_BYTES + GRADIENT_BYTES) * own / shape.layers * sharding.pipeline if is_full else 0.0
    activations = estimate_activations(
        shape, sharding, sequence=sequence, micro_batch=micro_batch, recompute=recompute, micro_batches=micro_batches
    )
    return MemoryEstimate(
        weights=WEIGHT_BYTES * (sharded if is_full else own),
        gradients=GRADIENT_BYTES * (sharded if sharding.zero >= 2 else own),
        optimizer=STATE_BYTES * (sharded if sharding.zero else own),
        gathered=gathered,
        activations=activations,
    )
