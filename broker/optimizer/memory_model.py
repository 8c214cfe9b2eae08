"""Memory of one accelerator for training a transformer: weights, gradients, optimizer states, activations.

Bytes throughout; 1 GB is 1e9 as in the papers, 1 GiB is 2^30 as on the card.
"""

from __future__ import annotations

from typing import Literal

from broker.frozen import frozen
from broker.optimizer.model_shape import ModelShape

Recompute = Literal["none", "selective", "full"]
Dtype = Literal["bf16", "fp16", "fp32"]

# Bytes per parameter: weights, gradients, Adam's states. Mixed precision keeps 2 + 2 + 12 (Rajbhandari 2020, section
# 3.1: a master copy, momentum and variance of 4 bytes each); single precision 4 + 4 + 8.
BYTES_PER_PARAMETER: dict[Dtype, tuple[int, int, int]] = {"bf16": (2, 2, 12), "fp16": (2, 2, 12), "fp32": (4, 4, 8)}

# CUDA context, NCCL buffers, kernels' workspace and the allocator's fragments: 2 GiB, and 6 % of the card. Our
# assumption; the largest published runs fill 80 GB cards to about this line.
RESERVED_GIB = 2.0
USABLE_SHARE = 0.94


@frozen
class Sharding:
    """The distribution of a model over accelerators. `zero` 0 is plain data parallelism, 3 is FSDP's full sharding."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 0
    interleave: int = 1  # pipeline chunks per rank (Narayanan 2021, section 2.2.2)
    is_sequence_parallel: bool = True  # norms and dropouts split along the sequence too, over the tensor ranks
    context: int = 1  # ranks that share each sequence
    expert: int = 1  # ranks, among data and context ranks, that share the experts

    @property
    def replicas(self) -> int:
        """Return the number of ranks with the same parameters, experts aside.

        Gradients are summed over these ranks, and states are sharded over them.
        """
        return self.data * self.context

    @property
    def accelerators(self) -> int:
        """Number of accelerators that hold the model together."""
        return self.tensor * self.pipeline * self.replicas


@frozen
class MemoryEstimate:
    """Bytes on the fullest accelerator. `gathered`: weights gathered temporarily by full sharding, and other copies."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the fullest accelerator."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered

    def fits(self, card_gib: float) -> bool:
        """Return whether the total fits into the usable memory of a card of `card_gib`."""
        return self.total <= find_usable_bytes(card_gib)


def find_usable_bytes(card_gib: float) -> float:
    """Return the bytes that a program can use on a card of `card_gib`; never negative."""
    return max(0.0, card_gib * USABLE_SHARE - RESERVED_GIB) * 2**30


def estimate_memory(
    shape: ModelShape,
    sharding: Sharding,
    *,
    sequence: int,
    micro_batch: int,
    recompute: Recompute,
    micro_batches: int = 1,
    dtype: Dtype = "bf16",
) -> MemoryEstimate:
    """Estimate the memory of the first pipeline stage, which holds the most micro-batches at the same time."""
    share = shape.parameters / (sharding.tensor * sharding.pipeline)
    weights, gradients, optimizer = split_states(share, zero=sharding.zero, data=sharding.data, dtype=dtype)
    gathered = 0.0
    if sharding.zero == 3 and sharding.data > 1:
        # Two blocks' weights (one computes, the next is fetched) and one block's gradients before they are scattered.
        weight_bytes, gradient_bytes, _ = BYTES_PER_PARAMETER[dtype]
        gathered = (2 * weight_bytes + gradient_bytes) * shape.layer_parameters / sharding.tensor
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered,
        activations=estimate_activations(
            shape, sharding, sequence=sequence, micro_batch=micro_batch, recompute=recompute,
            micro_batches=micro_batches, dtype=dtype,
        ),
    )  # fmt: skip


def split_states(parameters: float, *, zero: int, data: int, dtype: Dtype = "bf16") -> tuple[float, float, float]:
    """Return bytes of weights, gradients and optimizer states on one of `data` ranks (Rajbhandari 2020, figure 1).

    Stage 1 shards the optimizer states, 2 the gradients too, 3 the weights too.
    """
    weights, gradients, optimizer = (parameters * each for each in BYTES_PER_PARAMETER[dtype])
    return (
        weights / (data if zero >= 3 else 1),
        gradients / (data if zero >= 2 else 1),
        optimizer / (data if zero >= 1 else 1),
    )


def estimate_activations(
    shape: ModelShape,
    sharding: Sharding,
    *,
    sequence: int,
    micro_batch: int,
    recompute: Recompute,
    micro_batches: int = 1,
    dtype: Dtype = "bf16",
) -> float:
    """Return the bytes kept for the backward pass (Korthikanti 2022).

    A block keeps sbh (34 + 5as/h) bytes in 16 bits (eq. 1). Tensor ranks share 24 of the 34 and the attention part (eq.
    2); with sequence parallelism, all of it (eq. 4). Selective recomputation, like flash attention, keeps no attention
    part (eq. 6); full recomputation keeps only each block's input, 2sbh, and one block in progress. Under the 1F1B
    schedule the first of p stages holds min(p, m) micro-batches of l/p blocks (section 4.2.3), with interleaving 1 +
    (p-1)/(p v) times that. Logits and the last norm add 4sb (h + V) / t if one stage holds everything (section 4.3).
    """
    tokens = float(sequence * micro_batch) / sharding.context
    t = sharding.tensor
    scale = 2.0 if dtype == "fp32" else 1.0
    split = t if sharding.is_sequence_parallel else 1
    attention = 5 * shape.heads * sequence / (shape.width * t)
    linear = 10 / split + 24 / t
    block = tokens * shape.width * (linear + (attention if recompute == "none" else 0.0))
    blocks = shape.layers / sharding.pipeline
    in_flight = float(min(sharding.pipeline, micro_batches))
    if sharding.interleave > 1 and sharding.pipeline > 1:
        in_flight *= 1 + (sharding.pipeline - 1) / (sharding.pipeline * sharding.interleave)
    if recompute == "full":
        kept = 2 * tokens * shape.width / split * blocks * in_flight + block
    else:
        kept = block * blocks * in_flight
    logits = 4 * tokens * (shape.width + shape.vocabulary) / t if sharding.pipeline == 1 else 0.0
    return scale * (kept + logits)
