"""Count the bundled trainer's memory on one accelerator: more than in the papers, because its weights are float32.

tests/advisor/test_trainer_memory.py compares the figures below with the tensors that its blocks keep.
"""

from __future__ import annotations

from broker.optimizer.memory_model import BYTES_PER_PARAMETER, MemoryEstimate, Recompute, Sharding, estimate_memory
from broker.optimizer.model_shape import ModelShape

STATE_BYTES = BYTES_PER_PARAMETER["fp32"]  # also under autocast: weights, gradients and moments stay float32
COPY_BYTES = 2  # autocast's bfloat16 copies of all weights live from forward to backward
BUCKET_BYTES = 4  # DistributedDataParallel sends gradients from its own buckets
FLAT_BYTES = 4  # `allreduce` copies gradients into buckets once activations are freed
# Bytes per token and unit of width that a block keeps: (on every tensor rank, shared by tensor ranks). In bfloat16 the
# two norms keep float32 inputs (8) and two linear layers the norms' outputs (4); shared are queries, keys and values
# (6), attention's output (2), and the MLP's middle before and after GELU (16). Attention is fused.
BLOCK_BYTES = {"bf16": (12, 24), "fp32": (16, 48)}
MLP_BYTES = {"bf16": 16, "fp32": 32}  # the MLP's part of them, if it is 4 times as wide as the block
# The same for each expert that a token uses: its copy of the token, and its output. Experts are assumed equally busy.
EXPERT_BYTES = {"bf16": 7.0, "fp32": 12.25}
# Logits: as computed by the head, in float32, their log-softmax and its gradient. The head's output is gathered on
# every tensor rank.
LOGIT_BYTES = {"bf16": 12, "fp32": 12}


def estimate_trainer_memory(
    shape: ModelShape,
    sharding: Sharding,
    *,
    sequence: int,
    micro_batch: int,
    micro_batches: int,
    recompute: Recompute,
    dtype: str,
) -> MemoryEstimate:
    """Return bytes on the fullest rank under `ddp`, `fsdp`, or either with `tensor` and `pipeline`.

    `dtype` is `bf16` or `fp32`.
    """
    shards = sharding.data // sharding.expert  # expert ranks hold different experts, and all of the rest
    is_sharded, is_alone = sharding.zero == 3 and shards > 1, sharding.tensor * sharding.pipeline * sharding.expert == 1
    own = count_own_parameters(shape, sharding, sequence=sequence)
    parts = shards if is_sharded else 1
    keeps_gradients = is_sharded and micro_batches > 1  # accumulated in full, in float32, until the last micro-batch
    weights, gradients, optimizer = (byte * own for byte in STATE_BYTES)
    after = 0.0
    if is_sharded:
        copies = _count_gathered(shape, sharding, own, sequence=sequence, dtype=dtype)
    else:
        copies = COPY_BYTES * own if dtype == "bf16" else 0.0
        if sharding.data > 1 and is_alone:
            copies += BUCKET_BYTES * own
        elif sharding.data > 1:
            after = FLAT_BYTES * own
    activations = count_activations(
        shape, sharding, sequence=sequence, micro_batch=micro_batch, micro_batches=micro_batches, recompute=recompute,
        dtype=dtype,
    )  # fmt: skip
    return MemoryEstimate(
        weights=weights / parts,
        gradients=gradients / (1 if keeps_gradients else parts),
        optimizer=optimizer / parts,
        gathered=copies,
        activations=max(activations, after - copies),
    )


def count_own_parameters(shape: ModelShape, sharding: Sharding, *, sequence: int) -> float:
    """Count the parameters of one tensor and pipeline rank, before sharding over data ranks.

    Positions are learned, one for each token of a sequence. With tensor or pipeline ranks the output layer is separate:
    the embedding is complete on each tensor rank of the first stage, the output layer is split over the last.
    """
    table = float(shape.vocabulary * shape.width)
    blocks = shape.layers * count_block_parameters(shape, sharding) / sharding.pipeline
    is_untied = sharding.tensor > 1 and sharding.pipeline == 1
    return blocks + table + sequence * shape.width + (table / sharding.tensor if is_untied else 0.0)


def count_block_parameters(shape: ModelShape, sharding: Sharding) -> float:
    """Count the parameters of one block on one tensor and expert rank."""
    if not shape.idle_parameters:
        return shape.layer_parameters / sharding.tensor
    active = shape.active_expert_parameters / shape.layers
    experts = (active + shape.idle_parameters / shape.layers) / sharding.expert
    return shape.layer_parameters - active + experts


def count_activations(
    shape: ModelShape,
    sharding: Sharding,
    *,
    sequence: int,
    micro_batch: int,
    micro_batches: int,
    recompute: Recompute,
    dtype: str,
) -> float:
    """Return bytes kept for the backward pass, on the fuller of the first and the last stage.

    The first holds as many micro-batches as there are stages, the last holds one and its logits (1F1B).
    """
    tokens = float(sequence * micro_batch)
    whole, shared = BLOCK_BYTES[dtype]
    wider = MLP_BYTES[dtype] * (shape.mlp_width / (4 * shape.width) - 1) if shape.mlp_width is not None else 0.0
    block = tokens * shape.width * (whole + (shared + wider) / sharding.tensor)
    if shape.idle_parameters:
        block += tokens * shape.width * EXPERT_BYTES[dtype] * shape.experts_per_token
    if recompute == "none":  # unfused attention has two copies of the scores as in Korthikanti 2022, equation 1
        block += 5.0 * tokens * shape.heads * sequence / sharding.tensor
    blocks = shape.layers / sharding.pipeline
    if recompute == "full":
        # Each block's input: float32, or bfloat16 under full sharding, which casts a block's inputs.
        kept = tokens * shape.width * (2 if sharding.zero == 3 and dtype == "bf16" else 4) * blocks
        busy = block
    else:
        kept, busy = block * blocks, 0.0
    first = kept * min(sharding.pipeline, micro_batches) + busy
    last = kept + busy + LOGIT_BYTES[dtype] * tokens * shape.vocabulary
    return max(first, last)


def _count_gathered(shape: ModelShape, sharding: Sharding, own: float, *, sequence: int, dtype: str) -> float:
    """Count bytes that full sharding gathers temporarily, beyond a rank's own part."""
    width = 2 if dtype == "bf16" else 4
    if sharding.pipeline > 1:
        return width * own  # between a step's micro-batches, the stages of a pipeline keep their weights gathered
    block = count_block_parameters(shape, sharding)
    # Two blocks' weights, one block's gradients as computed and as accumulated; the embeddings stay for the whole pass.
    root = own - shape.layers * block
    return (2 * width + width + 4) * block + (width + 4) * root


def estimate_program_memory(
    shape: ModelShape,
    sharding: Sharding,
    *,
    sequence: int,
    micro_batch: int,
    micro_batches: int,
    recompute: Recompute,
    dtype: str,
) -> MemoryEstimate:
    """Return the bundled trainer's memory; in float16, which it lacks, the papers' figures for another program."""
    if dtype != "fp16":
        return estimate_trainer_memory(
            shape, sharding, sequence=sequence, micro_batch=micro_batch, micro_batches=micro_batches,
            recompute=recompute, dtype=dtype,
        )  # fmt: skip
    return estimate_memory(
        shape, sharding, sequence=sequence, micro_batch=micro_batch, recompute=recompute, micro_batches=micro_batches,
        dtype="fp16",
    )  # fmt: skip
