"""Write the task file of an option, for `broker plan` and `broker jobs launch`."""

from __future__ import annotations

import math

from broker.advisor.advise import Option, TrainingRequest
from broker.advisor.amounts import show_amount
from broker.advisor.experts import find_experts
from broker.advisor.layout import Layout, Training

LEARNING_RATE_MIN = 6e-5  # below the formula's range: used by the largest published models
CHECKPOINT_S = 1800.0  # if no preemptions are expected


def write_task(request: TrainingRequest, option: Option, *, infra: str | None = None) -> str:
    """Return YAML text. A gang of several nodes stays on the cloud for which it was priced, because networks differ."""
    training, layout = request.training, option.layout
    placement, spec = option.estimate.placement, option.task.checkpoint
    place = infra or (placement.offer.cloud if layout.node_count > 1 else None)
    lines = [
        f"# {show_amount(training.shape.parameters)} parameters, {show_amount(training.tokens)} tokens: "
        f"{layout.strategy}"
        f" on {option.gpu_count} x {layout.hardware.figures.name}",
        f"# About {option.hours / 24:.1f} days and {option.usd:,.0f} USD; the times are estimates of `broker advise`.",
        f"name: train-{_name_size(training.shape.parameters)}",
        "",
        "resources:",
        f"  accelerators: {layout.hardware.figures.name}:{layout.hardware.accelerators}",
        *([f"  infra: {place}"] if place else []),
        *([] if request.spot is None else [f"  use_spot: {'true' if request.spot else 'false'}"]),
        "",
        f"num_nodes: {layout.node_count}",
        "",
        "goal:",
        # minutes of a large gang are expensive
        f"  work: {option.work_hours:.{2 if option.work_hours >= 10 else 4}f}h",
        *([f"  deadline: {request.deadline_hours:g}h"] if request.deadline_hours is not None else []),
        *([f"  budget: {request.budget_usd:g}"] if request.budget_usd is not None else []),
        *([f"  hour_value: {request.hour_value_usd:g}"] if request.hour_value_usd is not None else []),
        "",
        "checkpoint:",
        f"  stall: {spec.stall_s:g}s",
        f"  restart: {spec.restart_s:g}s",
        f"  size: {spec.size_gib:g}GB" if spec.size_gib else "",
        "",
        "envs:",
        '  DATA: ""   # a folder of text, parquet or token files that every node sees; empty trains on a sample',
        "",
        *([] if training.dtype == "fp16" else ["setup: python3 -m trainers.setup", ""]),  # torch, if fp16 is not used
        "run: |",
        *(f"  {line}" for line in write_command(training, option)),
    ]
    return "\n".join(line for line, before in zip(lines, ["x", *lines], strict=False) if line or before) + "\n"


def write_command(training: Training, option: Option) -> list[str]:
    """Return the bundled trainer's command, or torchrun of the user's program for a layout or type that it lacks."""
    layout, shape = option.layout, training.shape
    if training.trainer == "megatron" or training.dtype == "fp16":
        lacks = "this layout" if training.trainer == "megatron" else "float16"
        return [
            f"# The bundled trainer does not have {lacks}: put your own program here, such as Megatron-LM.",
            "torchrun --nnodes $SKYPILOT_NUM_NODES --nproc-per-node $SKYPILOT_NUM_GPUS_PER_NODE \\",
            '  --node-rank $SKYPILOT_NODE_RANK --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n1)" \\',
            f"  train.py  # {layout.strategy}, micro-batch {layout.micro_batch}, {training.batch} sequences a step",
        ]
    strategy, mesh = name_strategy(layout)
    experts = find_experts(shape)
    steps = math.ceil(training.steps)
    rate = max(LEARNING_RATE_MIN, find_learning_rate(shape.parameters))
    every = max(1, round((option.estimate.checkpoint_every_s or CHECKPOINT_S) / layout.step.total_s))
    is_bf16 = training.dtype == "bf16"
    # Tensor ranks and stages place the embedding and the output layer differently.
    tied = "true" if layout.sharding.tensor == layout.sharding.pipeline == 1 else "false"
    groups = [
        [f"--strategy {strategy}", *([f"--mesh {mesh}"] if mesh else []), *(["--dtype bfloat16"] if is_bf16 else []),
         *(["--fsdp.param_dtype bfloat16"] if is_bf16 and layout.sharding.zero == 3 else []),
         *(["--recompute full"] if layout.recompute == "full" else [])],
        [f"--model.depth {shape.layers}", f"--model.width {shape.width}", f"--model.heads {shape.heads}",
         f"--model.context {training.sequence}"],
        *([[f"--model.experts {experts.count}", f"--model.experts_per_token {experts.per_token}",
            f"--model.hidden_width {experts.width}"]] if experts else []),
        *([[f"--model.hidden_width {shape.mlp_width:.0f}"]] if shape.mlp_width is not None and not experts else []),
        [f"--model.vocabulary {shape.vocabulary}", f"--model.tie_embeddings {tied}", '--data.path "$DATA"'],
        [f"--train.steps {steps}", f"--train.batch {training.batch}", f"--train.micro_batch {layout.micro_batch}"],
        [f"--train.learning_rate {rate:.2g}", f"--train.learning_rate_min {rate / 10:.2g}",
         f"--train.warmup_steps {max(1, steps // 100)}"],
        [f"--checkpoint.every_steps {every}"],
    ]  # fmt: skip
    written = ["python -m trainers.lm", *("  " + " ".join(group) for group in groups)]
    return [f"{line} \\" for line in written[:-1]] + written[-1:]


def name_strategy(layout: Layout) -> tuple[str, str]:
    """Return the trainer's `--strategy` and `--mesh`: stages across nodes first, tensor ranks within a node last."""
    shape = layout.sharding
    # DDP requires the whole model on each rank.
    is_whole = shape.tensor == shape.pipeline == shape.expert == 1
    data = "fsdp" if shape.zero == 3 else "ddp" if is_whole else "allreduce"
    copies = shape.data // shape.expert
    axes = [("pipeline", shape.pipeline), (data, copies), ("expert", shape.expert), ("tensor", shape.tensor)]
    used = [(name, size) for name, size in axes if size > 1] or [("ddp", 1)]
    mesh = "x".join(str(size) for _, size in used) if len(used) > 1 else ""
    return "+".join(name for name, _ in used), mesh


def find_learning_rate(parameters: float) -> float:
    """Return the peak of Adam's learning rate (Kaplan 2020, equation D.1).

    It is negative above about ten billion parameters.
    """
    return 0.003239 - 0.0001395 * math.log(parameters)


def _name_size(parameters: float) -> str:
    """Return the size as part of a name: letters, digits and dots."""
    return show_amount(parameters).replace(",", "").lower()
