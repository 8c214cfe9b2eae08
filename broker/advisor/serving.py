"""Estimate how a replica serves a language model: batch, memory, latency and requests per second. Pure.

Prefill is bound by arithmetic and decode by memory bandwidth: each step reads all weights once, and the keys and values
of every sequence (Pope et al., "Efficiently Scaling Transformer Inference", 2022, sections 2 and 3; the KV cache of a
token as in Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023).

    8B in bfloat16 on an H100: 16 GB / (0.8 x 3,350 GB/s) + 0.5 ms = 6.5 ms a token alone; vLLM was measured at 6.5 ms

The efficiencies were chosen with the published figures of docs/ADVISE.md in view.
"""

from __future__ import annotations

import math
from dataclasses import replace

from broker.frozen import frozen
from broker.optimizer.model_shape import ModelShape
from broker.optimizer.roofline import Hardware

BYTES = 2  # of a weight, key or value: bfloat16
PREFILL_EFFICIENCY = 0.7  # of the peak: TensorRT-LLM reaches 0.69 on an A100 (Llama 7B, 2,048 tokens)
BANDWIDTH_EFFICIENCY = 0.8  # of the memory bandwidth in decoding: vLLM on A100 and H100
STEP_OVERHEAD_S = 0.0005  # scheduler, sampling and kernel launches of a step
REDUCE_LATENCY_S = 15e-6  # of one all-reduce between cards of a node; two per block
MEMORY_SHARE = 0.9  # vLLM's default `--gpu-memory-utilization`
RESERVED_BYTES = 2 * 2**30  # of a card: activations, CUDA graphs, libraries
HEADROOM = 0.7  # share of the saturated rate that is planned for
TAIL = 3.0  # p95 of an exponential wait over its mean: ln 20
BATCH_MAX = 512
KV_HEADS = 8  # Llama 3, Qwen 2.5 and Mistral have 8 heads of keys and values


@frozen
class ServingGoal:
    """The load to serve. `ttft_s` is at the 95th percentile, `tpot_s` the mean of a full batch; None means any."""

    shape: ModelShape
    rps: float
    input_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None


@frozen
class ServingLayout:
    """Configuration of one replica: `batch` sequences at once on all GPUs of a node. `rps` includes the headroom."""

    hardware: Hardware
    batch: int
    kv_bytes_max: float
    weight_bytes: float
    rps: float
    ttft_s: float
    tpot_s: float

    @property
    def tensor_parallel(self) -> int:
        """Number of tensor ranks: all GPUs of a node."""
        return self.hardware.accelerators

    def count_replicas(self, rps: float) -> int:
        """Return the replicas for this many requests per second."""
        return max(1, math.ceil(rps / self.rps - 1e-9))


def share_heads(shape: ModelShape, kv_heads: int = KV_HEADS) -> ModelShape:
    """Return the shape with grouped keys and values; the MLP grows, so that the number of parameters stays."""
    if kv_heads >= shape.heads:
        return shape
    saved = (1 - kv_heads / shape.heads) * shape.width
    return replace(shape, kv_heads=kv_heads, mlp_width=(shape.mlp_width or 4 * shape.width) + saved)


def count_kv_bytes(shape: ModelShape, ranks: int = 1) -> float:
    """Return the bytes of keys and values of one token on all `ranks`, each of which has a head or a copy of one."""
    share = max(shape.kv_heads or shape.heads, ranks) / shape.heads
    return 2 * shape.layers * shape.width * share * BYTES


def find_kv_bytes_max(shape: ModelShape, hardware: Hardware) -> float:
    """Return the bytes that all cards of a node leave for keys and values; negative if the weights do not fit."""
    memory = hardware.figures.memory_gib * 2**30 * MEMORY_SHARE - RESERVED_BYTES
    return memory * hardware.accelerators - shape.parameters * BYTES


def find_prefill_s(shape: ModelShape, hardware: Hardware, tokens: int, batch: int = 1) -> float:
    """Return the seconds of the prefill of `batch` prompts: 2 FLOPs per parameter and token, and causal attention."""
    flops = batch * tokens * (2 * shape.active_parameters + 2.0 * shape.layers * shape.width * tokens)
    compute_s = flops / (hardware.peak_flops("bf16") * hardware.accelerators * PREFILL_EFFICIENCY)
    weights_s = _read_s(shape.parameters * BYTES, hardware)
    return max(compute_s, weights_s) + _reduce_s(shape, hardware, tokens * batch) + STEP_OVERHEAD_S


def find_step_s(shape: ModelShape, hardware: Hardware, batch: int, context: float) -> float:
    """Return the seconds of one decoding step of `batch` sequences that have `context` tokens on average.

    A step reads the weights that its tokens use; a batch of a mixture of experts is assumed to use all experts.
    """
    used = shape.parameters if batch > 1 else shape.active_parameters
    read_s = _read_s(used * BYTES + batch * context * count_kv_bytes(shape, hardware.accelerators), hardware)
    peak = hardware.peak_flops("bf16") * hardware.accelerators * PREFILL_EFFICIENCY
    compute_s = batch * 2 * shape.active_parameters / peak
    return max(read_s, compute_s) + _reduce_s(shape, hardware, batch) + STEP_OVERHEAD_S


def find_saturated_tokens_s(
    shape: ModelShape, hardware: Hardware, *, batch: int, input_tokens: int, output_tokens: int
) -> float:
    """Return generated tokens per second if `batch` requests start together, as in offline benchmarks."""
    step_s = find_step_s(shape, hardware, batch, input_tokens + output_tokens / 2)
    total_s = find_prefill_s(shape, hardware, input_tokens, batch) + output_tokens * step_s
    return batch * output_tokens / total_s


def find_serving_layout(goal: ServingGoal, hardware: Hardware) -> ServingLayout | None:
    """Return the layout with the highest rate that meets the goal; None if memory or latency rules out every batch.

    A request waits for the prefills before it (M/D/1 queue), and prefills delay the decoding of the others.
    """
    shape, context = goal.shape, goal.input_tokens + goal.output_tokens
    room = find_kv_bytes_max(shape, hardware)
    kv_bytes = context * count_kv_bytes(shape, hardware.accelerators)
    batch_max = min(BATCH_MAX, int(room // kv_bytes)) if room > 0 else 0
    best: ServingLayout | None = None
    batches = sorted({batch_max, *(2**power for power in range(10)), *(3 * 2**power for power in range(9))})
    for batch in (each for each in batches if 1 <= each <= batch_max):
        found = _estimate(goal, hardware, batch, room)
        is_good = (goal.ttft_s is None or found.ttft_s <= goal.ttft_s) and (
            goal.tpot_s is None or found.tpot_s <= goal.tpot_s
        )
        if is_good and (best is None or found.rps > best.rps):
            best = found
    return best


def _estimate(goal: ServingGoal, hardware: Hardware, batch: int, room: float) -> ServingLayout:
    shape = goal.shape
    prefill_s = find_prefill_s(shape, hardware, goal.input_tokens)
    step_s = find_step_s(shape, hardware, batch, goal.input_tokens + goal.output_tokens / 2)
    rps = HEADROOM * batch / (batch * prefill_s + goal.output_tokens * step_s)
    busy = rps * prefill_s  # share of time in prefills
    wait_s = busy * prefill_s / (2 * (1 - busy))
    return ServingLayout(
        hardware=hardware,
        batch=batch,
        kv_bytes_max=room,
        weight_bytes=shape.parameters * BYTES,
        rps=rps,
        ttft_s=prefill_s + TAIL * wait_s + step_s,
        tpot_s=step_s / (1 - busy),
    )


def _read_s(size: float, hardware: Hardware) -> float:
    bandwidth = (hardware.figures.memory_bandwidth_gbs or 0.0) * 1e9 * hardware.accelerators
    return size / (bandwidth * BANDWIDTH_EFFICIENCY) if bandwidth else math.inf


def _reduce_s(shape: ModelShape, hardware: Hardware, tokens: float) -> float:
    """Return the seconds of two ring all-reduces per block (Shoeybi et al., "Megatron-LM", 2019, section 3)."""
    count = hardware.accelerators
    if count == 1:
        return 0.0
    size = tokens * shape.width * BYTES * 2 * (count - 1) / count
    return 2 * shape.layers * (REDUCE_LATENCY_S + size / (hardware.link_gbs * 1e9))
