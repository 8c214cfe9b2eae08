"""`broker advise`: recommend GPUs and parallelism for a model, with time and cost."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from broker.app.container import Context
from broker.cli import options
from broker.cli.context import make_context
from broker.cli.render import print_json, print_line, print_note, print_table
from broker.errors import UsageError
from broker.formatting import format_hours, to_plain

if TYPE_CHECKING:
    from broker.advisor.advise import Advice, Option, Wish
    from broker.advisor.layout import Training
    from broker.optimizer.model_shape import ModelShape
    from broker.types import Offer

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMBT]?)", re.IGNORECASE)
BATCH_SLACK = 0.05
FIELD_WORTH = 1.1  # least speedup of another program worth a note
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def advise(
    params: Annotated[
        str | None, typer.Option("--params", metavar="N", help="Number of parameters, e.g. 7B or 350M.")
    ] = None,
    tokens: Annotated[str, typer.Option("--tokens", metavar="N", help="Number of training tokens, e.g. 20B.")] = "",
    seq: Annotated[int, typer.Option("--seq", metavar="N", min=16, help="Sequence length in tokens.")] = 4096,
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="N", help="Batch size in tokens, e.g. 2M (default: by model size).")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="TIME", help="Finish within this time, e.g. 5d or 36h.")
    ] = None,
    budget: Annotated[float | None, typer.Option("--budget", metavar="USD", help="Maximum total cost, in USD.")] = None,
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option("--dtype", help="Compute precision.")] = "bf16",
    gpus: Annotated[str | None, typer.Option("--gpus", metavar="NAME[,...]", help="Consider only these GPUs.")] = None,
    infra: Annotated[
        str | None, typer.Option("--infra", metavar="CLOUD[/REGION[/ZONE]]", help="Consider only this location.")
    ] = None,
    max_gpus: Annotated[int, typer.Option("--max-gpus", metavar="N", min=1, help="Maximum number of GPUs.")] = 512,
    spot: Annotated[
        bool | None, typer.Option("--spot/--no-spot", help="Consider only spot, or only on-demand (default: both).")
    ] = None,
    active_params: Annotated[
        str | None,
        typer.Option("--active-params", metavar="N", help="Active parameters per token, for a mixture of experts."),
    ] = None,
    trainer: Annotated[
        Literal["bundled", "megatron"] | None,
        typer.Option("--trainer", help="Training program: `trainers.lm`, or one with all of Megatron-LM's layouts."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="N", min=1, help="Number of transformer blocks.")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option("--hidden", metavar="N", min=1, help="Model width; requires --layers.")
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option("--heads", metavar="N", min=1, help="Number of attention heads (default: width / 128)."),
    ] = None,
    vocab: Annotated[int | None, typer.Option("--vocab", metavar="N", min=1, help="Vocabulary size.")] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Number of rows to show.")] = 8,
    explain: Annotated[
        bool, typer.Option("--explain", help="Break down memory and time of the first option, with assumptions.")
    ] = False,
    yaml: Annotated[Path | None, typer.Option("--yaml", metavar="FILE", help="Write the task to a file.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Recommend GPUs and parallelism for a model, with time and cost.

    Nothing is started.
    """
    from broker.advisor.advise import Wish, make_advice
    from broker.advisor.layout import Training
    from broker.advisor.task_file import write_task

    if not tokens:
        raise UsageError(
            "`--tokens` is required",
            hints=["for example 20 per parameter: `broker advise --params 7B --tokens 140B`"],
        )
    shape = read_shape(params, layers, hidden, heads, vocab, active=active_params)
    if shape.idle_parameters and trainer == "bundled":
        raise UsageError(
            "the bundled trainer does not support a mixture of experts", hints=["drop `--trainer bundled`"]
        )
    step_tokens = read_amount(batch, "--batch") if batch else choose_batch(shape.parameters)
    training = Training(
        shape=shape, tokens=read_amount(tokens, "--tokens"), sequence=seq, dtype=dtype,
        batch=round_batch(step_tokens / seq), trainer=trainer or ("megatron" if shape.idle_parameters else "bundled"),
    )  # fmt: skip
    context = make_context()
    wish = Wish(
        training=training,
        gpus=tuple(context.book.resolve_accelerator(each.strip()) for each in (gpus or "").split(",") if each.strip()),
        deadline_hours=read_hours(deadline) if deadline else None,
        budget_usd=budget, gpus_max=max_gpus, spot=spot,
    )  # fmt: skip
    advice = make_advice(
        wish, find_offers(context, wish, infra), context.book.read_figures(), prices_as_of=context.book.as_of
    )
    text = write_task(wish, advice.options[0], infra=infra)
    if yaml is not None:
        yaml.write_text(text, encoding="utf-8")
    if as_json:
        print_json(describe_advice(wish, advice, text, top))
        return
    _tell(wish, advice, text, top, explain=explain, yaml=yaml)


def _tell(wish: Wish, advice: Advice, text: str, top: int, *, explain: bool, yaml: Path | None) -> None:
    show_advice(wish, advice, top)
    if explain:
        from broker.cli.advise_explain import show_layout

        show_layout(wish.training, advice.options[0])
    if yaml is not None:
        print_note(f"wrote {yaml}; plan it with `broker plan {yaml}`, run it with `broker jobs launch {yaml}`")
    else:
        print_line(f"\n{text}")


def read_amount(text: str, flag: str) -> float:
    """Read an amount: `7B`, `350M`, `1.5T`, `4e9`. Raises UsageError."""
    found = _AMOUNT.fullmatch(text.strip().replace("_", "").replace(",", ""))
    value = float(found[1]) * _SCALE[found[2].lower()] if found else 0.0
    if not 0 < value < 1e18:
        raise UsageError(
            f"invalid amount `{text}` for `{flag}`",
            hints=[f"for example `{flag} 7B`; K, M, B and T are thousands to trillions"],
        )
    return value


def read_hours(text: str) -> float:
    """Read a duration as in a task file; a bare number is hours. Raises UsageError."""
    from broker.task.measures import Duration

    measure = Duration(bare_unit="h")
    if not re.fullmatch(measure.pattern, text):
        raise UsageError(
            f"`--deadline` must be {measure.expected}, not `{text}`", hints=["for example `--deadline 5d`"]
        )
    return measure.convert(text) / 3600


def read_shape(
    params: str | None,
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    vocab: int | None,
    *,
    active: str | None = None,
) -> ModelShape:
    """Read the shape from `--layers` and `--hidden`, else derive it from `--params`.

    With `active`, the shape has the active parameters and experts hold the others. Raises UsageError.
    """
    if active is not None:
        if params is None:
            raise UsageError(
                "`--active-params` requires `--params`", hints=["for example `--params 671B --active-params 37B`"]
            )
        total, own = read_amount(params, "--params"), read_amount(active, "--active-params")
        if own >= total:
            raise UsageError(
                f"`--active-params` must be less than `--params`: {active} is not less than {params}",
                hints=[
                    "for example `--params 671B --active-params 37B`; a model without experts has no active parameters"
                ],
            )
        shape = read_shape(active, layers, hidden, heads, vocab)
        return replace(shape, idle_parameters=total - own)
    from broker.optimizer.model_shape import HEAD_WIDTH, VOCABULARY, ModelShape, guess_shape

    if hidden is not None:
        if layers is None:
            raise UsageError("`--hidden` requires `--layers`", hints=["for example `--layers 32 --hidden 4096`"])
        count = heads or max(1, hidden // HEAD_WIDTH)
        if hidden % count:
            raise UsageError(f"`--hidden` must be a multiple of {count} heads, not {hidden}", hints=["pass `--heads`"])
        return ModelShape(layers=layers, width=hidden, heads=count, vocabulary=vocab or VOCABULARY)
    if params is None:
        raise UsageError(
            "the size of the model is required", hints=["pass `--params 7B`, or `--layers 32 --hidden 4096`"]
        )
    if heads is not None:
        raise UsageError(
            "`--heads` requires `--layers` and `--hidden`",
            hints=["for example `--layers 32 --hidden 4096 --heads 32`"],
        )
    try:
        return guess_shape(read_amount(params, "--params"), vocabulary=vocab or VOCABULARY, layers=layers)
    except ValueError as error:
        raise UsageError(str(error), hints=["pass the shape instead: `--layers 4 --hidden 256`"]) from None


def choose_batch(parameters: float) -> float:
    """Choose the batch size in tokens, about as GPT-3 (Brown 2020, table 2.1), Llama 2 from 20 billion parameters, and
    Llama 3 405B from 150 billion (Dubey 2024, table 4)."""
    for limit, power in ((1e9, 19), (2.5e9, 20), (20e9, 21), (150e9, 22)):
        if parameters <= limit:
            return 2.0**power
    return 2.0**24


def round_batch(sequences: float) -> int:
    """Round to a multiple of the largest power of two within `BATCH_SLACK`.

    `--batch 4M` at 4,096 is 1,024 sequences: 977 hardly divide by ranks or micro-batches, so it would be slower.
    """
    for power in range(24, 0, -1):
        unit = 1 << power
        rounded = round(sequences / unit) * unit
        if rounded and abs(rounded - sequences) <= BATCH_SLACK * sequences:
            return rounded
    return max(1, round(sequences))


def find_offers(context: Context, wish: Wish, infra: str | None) -> list[Offer]:
    """Find the catalog's offers of suitable GPUs."""
    from broker.advisor.advise import can_train
    from broker.task.override import override_resources
    from broker.types import Resources, Task

    names = [figure for figure in context.book.read_figures() if can_train(wish, figure)]
    task = Task(resources=tuple(Resources(accelerator=name, accelerator_count=1) for name in names))
    return list(context.book.find_offers(override_resources(task, infra=infra) if infra else task))


def show_advice(wish: Wish, advice: Advice, top: int) -> None:
    """Print the training run, the table of options, and faster ones."""
    from broker.advisor.amounts import show_amount

    training, shape = wish.training, wish.training.shape
    active = f", {show_amount(shape.active_parameters)} of them active" if shape.idle_parameters else ""
    print_line(
        f"{show_amount(shape.parameters)} parameters{active} ({shape.layers} x {shape.width}, {shape.heads} heads), "
        f"{show_amount(training.tokens)} tokens"
    )
    print_line(
        f"{training.steps:,.0f} steps of {show_amount(training.batch * training.sequence)} tokens "
        f"({training.batch} x {training.sequence}), {training.dtype}"
    )
    print_line()
    _print_options(advice.options[:top])
    if len(advice.options) > top:
        print_line(f"... and {len(advice.options) - top} more; show them with `--top`")
    if advice.faster:
        print_line("\nFaster, at a higher cost:")
        _print_options(advice.faster[:5])
    if wish.deadline_hours is None:
        print_line("\nWithout `--deadline`, options over 30 days are not listed")
    if any(each.layout.recompute == "full" for each in (*advice.options[:top], *advice.faster[:5])):
        print_line("* recomputes activations in the backward pass")
    print_line(f"Prices of {advice.prices_as_of}; times and costs are estimates that include spot risk")
    _tell_limits(wish, advice.options[0], (*advice.options[:top], *advice.faster[:5]))


def _tell_limits(wish: Wish, first: Option, shown: tuple[Option, ...]) -> None:
    """Note the limits of the table: the trainer's layouts, the batch, and spot capacity in one zone."""
    from broker.advisor.advise import SPOT_GANG_GPUS, find_better_batch, find_field_speedup
    from broker.advisor.amounts import show_amount

    if wish.training.trainer == "megatron":
        print_note(
            "note: these layouts require a program such as Megatron-LM: the bundled trainer has no sequence, context "
            "or expert parallelism, no interleaved stages, and no sharded optimizer states combined with them"
        )
    else:
        speedup = find_field_speedup(wish.training, first.layout)
        if speedup >= FIELD_WORTH:
            print_note(
                f"note: the bundled trainer limits this: a program such as Megatron-LM is about {speedup:.1f} "
                f"times as fast on the first option's {first.gpu_count:,} GPUs; estimate it with `--trainer megatron`"
            )
    if better := find_better_batch(wish.training, first.layout):
        tokens = show_amount(better[0] * wish.training.sequence)
        print_note(f"note: with `--batch {tokens}` the first option's GPUs are {better[1] - 1:.0%} faster per token")
    largest = max((each.gpu_count for each in shown if each.estimate.placement.is_spot), default=0)
    if largest > SPOT_GANG_GPUS:
        print_note(
            f"note: {largest:,} spot GPUs in one zone are rarely available, and one preemption stops all of "
            "them: consider `--no-spot`, a reservation, or a smaller `--max-gpus`"
        )


def _print_options(found: tuple[Option, ...]) -> None:
    rows = []
    for number, each in enumerate(found, start=1):
        placement, layout = each.estimate.placement, each.layout
        count = f"{layout.node_count} x " if layout.node_count > 1 else ""
        rows.append([
            str(number), f"{count}{layout.hardware.figures.name}:{layout.hardware.accelerators}",
            layout.strategy + ("*" if layout.recompute == "full" else ""),
            f"~{layout.memory.total / 2**30:.0f}", f"~{layout.mfu:.0%}",
            f"{placement.offer.cloud} {placement.offer.zone or placement.offer.region}",
            "spot" if placement.is_spot else "od", f"~{format_hours(each.hours)}", f"~{each.usd:,.0f}",
        ])  # fmt: skip
    columns = ["#", "GPUS", "STRATEGY", "GiB", "MFU", "PLACE", "", "TIME", "USD"]
    numbers = ("#", "GiB", "MFU", "TIME", "USD")
    print_table(columns, rows, right=numbers, firm=("GPUS", "STRATEGY", "", *numbers))


def describe_advice(wish: Wish, advice: Advice, text: str, top: int) -> dict[str, object]:
    """Return the advice, JSON-ready: memory in bytes, times in hours, and in seconds per step."""
    training: Training = wish.training
    return {
        "training": {**to_plain(training), "parameters": training.shape.parameters, "steps": training.steps},
        "prices_as_of": advice.prices_as_of,
        "options": [describe_option(option) for option in advice.options[:top]],
        "faster": [describe_option(each) for each in advice.faster],
        "yaml": text,
    }


def describe_option(option: Option) -> dict[str, object]:
    layout = option.layout
    return {
        "gpus": option.gpu_count,
        "accelerator": layout.hardware.figures.name,
        "accelerator_count": layout.hardware.accelerators,
        "num_nodes": layout.node_count,
        "strategy": layout.strategy,
        "sharding": to_plain(layout.sharding),
        "micro_batch": layout.micro_batch,
        "recompute": layout.recompute,
        "memory": {**to_plain(layout.memory), "total": layout.memory.total},
        "step": {**to_plain(layout.step), "total_s": layout.step.total_s},
        "mfu": layout.mfu,
        "work_hours": option.work_hours,
        "expected_hours": option.hours,
        "expected_usd": option.usd,
        "estimate": to_plain(option.estimate),
    }
