"""Duration of one training step on given hardware: arithmetic, memory traffic and communication.

A bound from hardware peaks, times the stated shares of the peaks that real programs reach. Seconds, bytes, and GB = 1e9
bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from broker.frozen import frozen
from broker.optimizer.memory_model import BYTES_PER_PARAMETER, Dtype, Recompute, Sharding
from broker.optimizer.model_shape import ModelShape
from broker.types import AcceleratorFigures

# Share of the peak that large matrix products reach. A100's is fitted to Megatron-LM's runs (Narayanan 2021;
# Korthikanti 2022; checked by tests/optimizer/test_roofline.py), H100's agrees with Llama 3 (Dubey 2024), the others
# are our assumptions. Newer cards have more arithmetic per byte of memory, and reach less of it. AMD's are assumed to
# reach the least.
PRODUCT_EFFICIENCY = {
    "A100": 0.72, "A100-80GB": 0.72, "V100": 0.60, "V100-32GB": 0.60, "H100": 0.58, "H200": 0.60, "GH200": 0.60,
    "MI300X": 0.40, "MI355X": 0.40,
}  # fmt: skip
PRODUCT_EFFICIENCY_ELSE = 0.55
# Narrow matrices do not fill a card: the share falls as w / (w + 500) with w = h / sqrt(t), the side of a square matrix
# of the size of a tensor rank's part.
HALF_WIDTH = 500.0
BANDWIDTH_EFFICIENCY = 0.80  # of the memory's peak, for long sequential reads and writes
# Element-wise kernels access what they keep for the backward pass about three times in all: written in the forward
# pass, read by the next kernel, read again in the backward pass.
TRAFFIC_PER_KEPT_BYTE = 3.0
LINK_EFFICIENCY = 0.75  # of NVLink's one-way peak: 230 of 300 GB/s on A100 in nccl-tests
NETWORK_EFFICIENCY = 0.80  # of the network's stated speed
PCIE_GBS = 20.0  # between cards without NVLink: PCIe 4.0 x16 carries 32 at most, shared switches less
EXPERTS_HIDDEN_SHARE = 0.8  # share of the expert traffic that overlaps other work: our assumption
# share of the gradient traffic that never overlaps: the last bucket has nothing to overlap with
EXPOSED_SHARE_MIN = 0.1
ROUNDING = 1e-9  # a bound is lowered by more than the rounding errors of the sums that it is compared with


@frozen
class Hardware:
    """One kind of node: its number of `accelerators`, and its network in GB/s one way."""

    figures: AcceleratorFigures
    accelerators: int
    network_gbs: float

    @property
    def link_gbs(self) -> float:
        """Return GB/s one way between two cards of a node. The vendor's NVLink figure counts both ways."""
        nvlink = self.figures.nvlink_gbs or 0.0
        if nvlink < 150 and self.accelerators > 2:
            nvlink = 0.0  # a bridge joins two cards only
        return nvlink / 2 * LINK_EFFICIENCY if nvlink else PCIE_GBS

    def peak_flops(self, dtype: Dtype) -> float:
        """Return FLOP/s of one card; zero if no figure is known."""
        tflops = self.figures.fp32_tflops if dtype == "fp32" else self.figures.training_tflops
        return (tflops or self.figures.training_tflops or 0.0) * 1e12


@frozen
class StepTime:
    """Seconds of one optimizer step on the critical path, by cause."""

    compute_s: float  # matrix products, including recomputation
    memory_s: float  # element-wise kernels
    tensor_s: float  # all-reduces between tensor ranks
    pipeline_s: float  # the bubble, and transfers between stages
    data_s: float  # gradients, and weights under full sharding, unless overlapped
    update_s: float  # the optimizer
    exchange_s: float = 0.0  # keys and values between context ranks, tokens between expert ranks

    @property
    def total_s(self) -> float:
        """Seconds of a step; communication that overlaps with compute is not part of the terms."""
        parallel = self.tensor_s + self.exchange_s + self.pipeline_s + self.data_s
        return self.compute_s + self.memory_s + parallel + self.update_s


class TurnTime(NamedTuple):
    """Seconds of one micro-batch on one stage, by cause as in `StepTime`; a search creates thousands of them."""

    compute_s: float
    memory_s: float
    tensor_s: float
    exchange_s: float

    @property
    def total_s(self) -> float:
        """Seconds between two micro-batches."""
        return self.compute_s + self.memory_s + self.tensor_s + self.exchange_s

    def scale(self, factor: int) -> TurnTime:
        """Return the time of a micro-batch with `factor` times as many sequences; exact for a power of two."""
        return TurnTime(
            self.compute_s * factor, self.memory_s * factor, self.tensor_s * factor, self.exchange_s * factor
        )


class DataTime(NamedTuple):
    """What data ranks send to each other, and the optimizer: the same for every micro-batch of a sharding."""

    byte_s: float  # seconds of one byte of every parameter once around the ring
    bytes_per_step: int
    bytes_per_turn: int  # of weights under full sharding, which overlap with the turns
    weight_bytes: int
    is_overlapped: bool
    update_s: float

    def find_exposed_s(self, turn_s: float, micro_batches: int) -> float:
        """Return the seconds of a step that do not overlap with computation."""
        sent = self.byte_s * (self.bytes_per_turn * micro_batches + self.bytes_per_step)
        if not self.is_overlapped:
            return sent
        hidden = turn_s * micro_batches if self.bytes_per_turn else turn_s * 2 / 3
        return max(sent - hidden, sent * EXPOSED_SHARE_MIN)


def estimate_step(
    shape: ModelShape,
    sharding: Sharding,
    hardware: Hardware,
    *,
    sequence: int,
    batch: int,
    micro_batch: int,
    recompute: Recompute,
    dtype: Dtype = "bf16",
    is_flash: bool = True,
    gradient_bytes: int | None = None,
    is_overlapped: bool = True,
    experts_hidden_share: float = EXPERTS_HIDDEN_SHARE,
) -> StepTime:
    """Estimate a step.

    `batch` and `micro_batch` in sequences. Without `is_flash`, attention scores pass through memory.

    Gradients have `gradient_bytes` each, those of `dtype` by default; with `is_overlapped` they are sent while the last
    backward pass runs.

    The pipeline takes (m + (p - 1) / v) turns for m micro-batches in v chunks per rank: a bubble of (p - 1) / (v m)
    (Narayanan 2021, section 2.2).
    """
    turn = time_turn(
        shape, sharding, hardware, sequence=sequence, micro_batch=micro_batch, recompute=recompute, dtype=dtype,
        is_flash=is_flash, experts_hidden_share=experts_hidden_share,
    )  # fmt: skip
    data = time_data(
        shape, sharding, hardware, dtype=dtype, gradient_bytes=gradient_bytes, is_overlapped=is_overlapped
    )  # fmt: skip
    return assemble_step(shape, sharding, hardware, turn, data, sequence=sequence, batch=batch, micro_batch=micro_batch)


def time_turn(
    shape: ModelShape,
    sharding: Sharding,
    hardware: Hardware,
    *,
    sequence: int,
    micro_batch: int,
    recompute: Recompute,
    dtype: Dtype = "bf16",
    is_flash: bool = True,
    experts_hidden_share: float = EXPERTS_HIDDEN_SHARE,
) -> TurnTime:
    """Time one micro-batch on one stage: the part of a step that is proportional to the sequences of a micro-batch."""
    tokens = float(micro_batch * sequence) / sharding.context
    return TurnTime(
        compute_s=_compute_s(shape, sharding, hardware, sequence, tokens, recompute, dtype),
        memory_s=_memory_s(shape, sharding, hardware, sequence, tokens, recompute, dtype, is_flash=is_flash),
        tensor_s=_tensor_s(shape, sharding, hardware, tokens, recompute, dtype),
        exchange_s=_exchange_s(
            shape, sharding, hardware, tokens, BYTES_PER_PARAMETER[dtype][0], experts_hidden_share
        ),
    )  # fmt: skip


def assemble_step(
    shape: ModelShape,
    sharding: Sharding,
    hardware: Hardware,
    turn: TurnTime,
    data: DataTime,
    *,
    sequence: int,
    batch: int,
    micro_batch: int,
) -> StepTime:
    """Return the time of a step with turns of `micro_batch` sequences."""
    micro_batches = count_micro_batches(sharding, batch, micro_batch)
    pipeline = 0.0
    if sharding.pipeline > 1:
        tokens = float(micro_batch * sequence) / sharding.context
        sent = 2 * tokens * shape.width * data.weight_bytes / sharding.tensor * sharding.interleave
        pipeline = turn.total_s * (sharding.pipeline - 1) / sharding.interleave
        pipeline += micro_batches * sent / (_network_share(hardware, hardware.accelerators) * 1e9)
    return StepTime(
        compute_s=turn.compute_s * micro_batches,
        memory_s=turn.memory_s * micro_batches,
        tensor_s=turn.tensor_s * micro_batches,
        pipeline_s=pipeline,
        data_s=data.find_exposed_s(turn.total_s, micro_batches),
        update_s=data.update_s,
        exchange_s=turn.exchange_s * micro_batches,
    )


def bound_step(sharding: Sharding, sequence_s: float, data: DataTime, *, batch: int, micro_batch: int) -> float:
    """Return seconds that `assemble_step` never falls below: all but the transfers between stages.

    `sequence_s` is the total of a turn with one sequence.
    """
    turn_s, micro_batches = sequence_s * micro_batch, count_micro_batches(sharding, batch, micro_batch)
    turns = micro_batches + (sharding.pipeline - 1) / sharding.interleave
    return (turn_s * turns + data.find_exposed_s(turn_s, micro_batches) + data.update_s) * (1 - ROUNDING)


def count_micro_batches(sharding: Sharding, batch: int, micro_batch: int) -> int:
    """Return the number of micro-batches per step on each data rank, rounded up."""
    return max(1, -(-batch // (sharding.data * micro_batch)))


def find_mfu(shape: ModelShape, step: StepTime, *, sequence: int, batch: int, peak_flops: float) -> float:
    """Return model FLOPs utilisation: useful FLOPs divided by the peak of all cards together, `peak_flops`."""
    return shape.flops_per_token(sequence) * sequence * batch / (step.total_s * peak_flops)


def _compute_s(
    shape: ModelShape, sharding: Sharding, hardware: Hardware, sequence: int, tokens: float, recompute: Recompute,
    dtype: Dtype,
) -> float:  # fmt: skip
    flops = shape.flops_per_token(sequence)
    if recompute == "full":
        flops *= 4 / 3  # the forward pass a second time
    elif recompute == "selective":
        flops += shape.attention_flops_per_token(sequence)
    width = shape.width / math.sqrt(sharding.tensor)
    share = PRODUCT_EFFICIENCY.get(hardware.figures.name, PRODUCT_EFFICIENCY_ELSE) * width / (width + HALF_WIDTH)
    return flops * tokens / (sharding.tensor * sharding.pipeline) / (hardware.peak_flops(dtype) * share)


def _memory_s(
    shape: ModelShape, sharding: Sharding, hardware: Hardware, sequence: int, tokens: float, recompute: Recompute,
    dtype: Dtype, *, is_flash: bool,
) -> float:  # fmt: skip
    bandwidth = (hardware.figures.memory_bandwidth_gbs or 0.0) * 1e9 * BANDWIDTH_EFFICIENCY
    if not bandwidth:
        return 0.0
    split = sharding.tensor if sharding.is_sequence_parallel else 1
    kept = shape.width * (10 / split + 24 / sharding.tensor)
    attention = 0.0 if is_flash else 5.0 * shape.heads * sequence / sharding.tensor
    once_more = 4 / 3 if recompute == "full" else 1.0
    attention *= 4 / 3 if recompute != "none" else 1.0
    scale = 2.0 if dtype == "fp32" else 1.0
    blocks = shape.layers / sharding.pipeline
    return scale * TRAFFIC_PER_KEPT_BYTE * tokens * blocks * (kept * once_more + attention) / bandwidth


def _tensor_s(
    shape: ModelShape, sharding: Sharding, hardware: Hardware, tokens: float, recompute: Recompute, dtype: Dtype
) -> float:
    """Time all-reduces: two per block forward, two backward (Shoeybi 2019, section 3), two more for full recomputation.

    A ring sends 2 (n - 1) / n of the bytes (Patarasuk and Yuan 2009); sequence parallelism sends as much.
    """
    t = sharding.tensor
    if t == 1:
        return 0.0
    count = (6 if recompute == "full" else 4) * shape.layers / sharding.pipeline
    sent = tokens * shape.width * BYTES_PER_PARAMETER[dtype][0] * 2 * (t - 1) / t
    gbs = hardware.link_gbs if t <= hardware.accelerators else _network_share(hardware, hardware.accelerators)
    return count * sent / (gbs * 1e9)


def _exchange_s(
    shape: ModelShape, sharding: Sharding, hardware: Hardware, tokens: float, value_bytes: int,
    experts_hidden_share: float,
) -> float:  # fmt: skip
    """Time the exchanges between context and expert ranks.

    Every block gathers keys and values between context ranks, and again in the backward pass, where their gradients are
    scattered (Dubey 2024, section 3.3.2). Between expert ranks, every block sends each token to its
    experts and back, and the same in the backward pass (DeepSeek-AI 2024, section 3.2.2); the overlapped share is our
    assumption.
    """
    blocks, seconds = shape.layers / sharding.pipeline, 0.0
    ranks = min(sharding.tensor * sharding.context, hardware.accelerators)
    if (c := sharding.context) > 1:
        share = (shape.kv_heads or shape.heads) / shape.heads / sharding.tensor
        sent = 3 * 2 * tokens * (c - 1) * shape.width * share * value_bytes
        is_inside = sharding.tensor * c <= hardware.accelerators
        seconds += blocks * sent / ((hardware.link_gbs if is_inside else _network_share(hardware, ranks)) * 1e9)
    if (e := sharding.expert) > 1:
        sent = 4 * shape.experts_per_token * tokens / sharding.tensor * shape.width * value_bytes * (e - 1) / e
        is_inside = sharding.tensor * e <= hardware.accelerators
        gbs = hardware.link_gbs if is_inside else _network_share(hardware, hardware.accelerators)
        seconds += blocks * sent * (1 - experts_hidden_share) / (gbs * 1e9)
    return seconds


def time_data(
    shape: ModelShape, sharding: Sharding, hardware: Hardware, *, dtype: Dtype, gradient_bytes: int | None = None,
    is_overlapped: bool = True,
) -> DataTime:  # fmt: skip
    """Time the exchange of gradients (and weights under stage 3) between data ranks, and the optimizer.

    Stage 0 sends 2 x the gradients once per step, stages 1 and 2 gradients and weights, overlapping the last backward
    pass; stage 3 gathers the weights twice per micro-batch and scatters the gradients once per step (Rajbhandari 2020,
    section 7.2), overlapping all of it. A ring crosses a node's network once, regardless of the number of its cards.
    """
    weight_bytes, gradient_bytes = BYTES_PER_PARAMETER[dtype][0], gradient_bytes or BYTES_PER_PARAMETER[dtype][1]
    d, byte_s = sharding.replicas, 0.0
    if d > 1:
        is_inside = sharding.accelerators <= hardware.accelerators
        rings = min(sharding.tensor * sharding.pipeline, hardware.accelerators)
        gbs = hardware.link_gbs if is_inside else min(hardware.link_gbs, _network_share(hardware, rings))
        byte_s = count_own_parameters(shape, sharding) * (d - 1) / d / (gbs * 1e9)
    is_full = sharding.zero == 3
    back = weight_bytes if sharding.zero else gradient_bytes  # the part that each rank updated, or the sums
    return DataTime(
        byte_s=byte_s,
        bytes_per_step=gradient_bytes if is_full else gradient_bytes + back,
        bytes_per_turn=2 * weight_bytes if is_full else 0,
        weight_bytes=weight_bytes,
        is_overlapped=is_overlapped,
        update_s=_update_s(shape, sharding, hardware, dtype),
    )


def _update_s(shape: ModelShape, sharding: Sharding, hardware: Hardware, dtype: Dtype) -> float:
    """Time one read and write of every state."""
    bandwidth = (hardware.figures.memory_bandwidth_gbs or 0.0) * 1e9 * BANDWIDTH_EFFICIENCY
    if not bandwidth:
        return 0.0
    own = count_own_parameters(shape, sharding)
    if sharding.zero:
        own = shape.parameters / sharding.accelerators
    return 2 * own * sum(BYTES_PER_PARAMETER[dtype]) / bandwidth


def count_own_parameters(shape: ModelShape, sharding: Sharding) -> float:
    """Count the parameters of one tensor, pipeline and expert rank, before sharding over replicas.

    Every expert is active for some tokens, so expert ranks share all of them, and replicate only the rest.
    """
    experts = shape.active_expert_parameters + shape.idle_parameters
    own = shape.active_parameters - shape.active_expert_parameters + experts / sharding.expert
    return own / (sharding.tensor * sharding.pipeline)


def _network_share(hardware: Hardware, sharers: int) -> float:
    """Return GB/s one way for each of `sharers` that use a node's network at the same time."""
    return hardware.network_gbs * NETWORK_EFFICIENCY / max(1, sharers)
