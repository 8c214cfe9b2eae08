"""`broker advise --explain`: break down the memory and time of the first option."""

from __future__ import annotations

from broker.advisor.advise import OVERHEAD, Option
from broker.advisor.layout import Training, list_activations
from broker.cli.render import print_line
from broker.formatting import format_duration, format_hours
from broker.optimizer.memory_model import find_usable_bytes
from broker.optimizer.roofline import PRODUCT_EFFICIENCY, PRODUCT_EFFICIENCY_ELSE


def show_layout(training: Training, option: Option) -> None:
    """Print memory per GPU, time per step, time for the whole run, and the assumptions."""
    layout, shape = option.layout, option.layout.sharding
    print_line(f"\nFirst option: {layout.strategy} on {option.gpu_count} x {layout.hardware.figures.name}")
    more = f" x context {shape.context}" if shape.context > 1 else ""
    experts = f", experts over {shape.expert} ranks" if shape.expert > 1 else ""
    chunks = f", {shape.interleave} chunks per stage" if shape.interleave > 1 else ""
    print_line(
        f"  tensor {shape.tensor}{more} x pipeline {shape.pipeline} x data {shape.data}, ZeRO stage {shape.zero}"
        f"{chunks}{experts}"
    )
    _show_memory(training, option)
    _show_time(training, option)
    efficiency = PRODUCT_EFFICIENCY.get(layout.hardware.figures.name, PRODUCT_EFFICIENCY_ELSE)
    print_line("\nAssumptions")
    print_line(f"  large matrix products reach {efficiency:.0%} of {layout.hardware.figures.name}'s peak")
    print_line(f"  {layout.hardware.link_gbs:.0f} GB/s between GPUs of a node, in each direction")
    print_line(f"  {layout.hardware.network_gbs * 8:,.0f} Gbit/s between nodes")
    print_line("  attention does not store its scores (flash attention)")


def _show_memory(training: Training, option: Option) -> None:
    memory, card = option.layout.memory, option.layout.hardware.figures.memory_gib
    print_line("\nMemory of the most loaded GPU, GiB")
    parts = [
        ("weights", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer states", memory.optimizer),
        ("gathered, copied", memory.gathered),
        ("activations", memory.activations),
        ("total", memory.total),
        (f"usable of {card:g}", find_usable_bytes(card)),
    ]
    for name, amount in parts:
        if amount:
            print_line(f"  {name:<24}{amount / 2**30:>8.1f}")
    kinds = list_activations(training, option.layout)
    print_line(
        f"  activations, micro-batch {option.layout.micro_batch}: "
        + ", ".join(f"{amount / 2**30:.1f} {name}" for name, amount in kinds.items())
    )


def _show_time(training: Training, option: Option) -> None:
    step = option.layout.step
    print_line("\nTime per step")
    parts = [
        ("matrix products", step.compute_s),
        ("element-wise kernels", step.memory_s),
        ("tensor parallel", step.tensor_s),
        ("context, expert ranks", step.exchange_s),
        ("pipeline bubble", step.pipeline_s),
        ("data parallel, exposed", step.data_s),
        ("optimizer", step.update_s),
        ("total", step.total_s),
    ]
    for name, seconds in parts:
        if seconds:
            print_line(f"  {name:<24}{seconds:>8.3f} s {seconds / step.total_s:>5.0%}")
    estimate = option.estimate
    tokens = training.batch * training.sequence / step.total_s
    print_line(f"  {tokens:,.0f} tokens/s, MFU {option.layout.mfu:.0%}")
    print_line("\nTime for the whole run")
    print_line(f"  {training.steps:,.0f} steps                {format_hours(option.work_hours / OVERHEAD)}")
    print_line(f"  x {OVERHEAD:g}, evaluation and stalls  {format_hours(option.work_hours)}")
    print_line(f"  {estimate.expected_preemptions or 0:.1f} preemptions expected    {format_hours(option.hours)}")
    if estimate.checkpoint_every_s:
        print_line(f"  a checkpoint every {format_duration(estimate.checkpoint_every_s)}")
    if estimate.deadline_chance is not None:
        print_line(f"  deadline chance {estimate.deadline_chance:.3f}")
