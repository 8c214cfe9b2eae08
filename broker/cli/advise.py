"""`broker advise`: from the size of a model and its data to machines, strategy, days and dollars."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from broker.cli import options
from broker.cli.context import Context
from broker.cli.render import plain, print_json, print_line, print_note, print_table, show_hours
from broker.errors import UsageError

if TYPE_CHECKING:
    from broker.optimizer.advise import Advice, Option, Wish
    from broker.optimizer.layout import Training
    from broker.optimizer.model_shape import ModelShape
    from broker.types import Offer

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMBT]?)", re.IGNORECASE)
BATCH_SLACK = 0.05
FIELD_WORTH = 1.1  # a program that is faster by less is not mentioned
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def advise(
    params: Annotated[str | None, typer.Option("--params", help="Parameters, such as 7B or 350M.")] = None,
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens to train on, such as 20B.")] = "",
    seq: Annotated[int, typer.Option("--seq", min=16, help="Tokens of a sequence.")] = 4096,
    batch: Annotated[
        str | None, typer.Option("--batch", help="Tokens of a step, such as 2M; by size if not given.")
    ] = None,
    deadline: Annotated[str | None, typer.Option("--deadline", help="Time there is, such as 5d or 36h.")] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="USD there are.")] = None,
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option("--dtype", help="Arithmetic.")] = "bf16",
    gpus: Annotated[str | None, typer.Option("--gpus", help="Only these: NAME[,NAME].")] = None,
    infra: Annotated[str | None, typer.Option("--infra", help="Only here: CLOUD[/REGION[/ZONE]].")] = None,
    max_gpus: Annotated[int, typer.Option("--max-gpus", min=1, help="The most GPUs in all.")] = 512,
    spot: Annotated[
        bool | None, typer.Option("--spot/--no-spot", help="Only spot, or none; both if not given.")
    ] = None,
    active_params: Annotated[
        str | None, typer.Option("--active-params", help="Of a mixture of experts: those that a token passes.")
    ] = None,
    trainer: Annotated[
        Literal["bundled", "megatron"] | None,
        typer.Option("--trainer", help="What runs it: `trainers.lm`, or a program with all of Megatron-LM's layouts."),
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Transformer blocks.")] = None,
    hidden: Annotated[int | None, typer.Option("--hidden", min=1, help="Width; takes --layers with it.")] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", min=1, help="Attention heads; width / 128 if not given.")
    ] = None,
    vocab: Annotated[int | None, typer.Option("--vocab", min=1, help="Size of the vocabulary.")] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many rows to show.")] = 8,
    explain: Annotated[
        bool, typer.Option("--explain", help="Memory and time of the first, and what is assumed.")
    ] = False,
    yaml: Annotated[Path | None, typer.Option("--yaml", help="Write the task file here.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Say how to train a model of a given size: GPUs, strategy, days and dollars; starts nothing."""
    from broker.optimizer.advise import Wish, make_advice
    from broker.optimizer.advise_task import write_task
    from broker.optimizer.layout import Training

    if not tokens:
        raise UsageError("`--tokens` is missing", hints=["`broker advise --params 7B --tokens 140B`: 20 a parameter"])
    shape = read_shape(params, layers, hidden, heads, vocab, active=active_params)
    if shape.idle_parameters and trainer == "bundled":
        raise UsageError("the bundled trainer has no mixture of experts", hints=["leave out `--trainer bundled`"])
    step_tokens = read_amount(batch, "--batch") if batch else choose_batch(shape.parameters)
    training = Training(
        shape=shape, tokens=read_amount(tokens, "--tokens"), sequence=seq, dtype=dtype,
        batch=round_batch(step_tokens / seq), trainer=trainer or ("megatron" if shape.idle_parameters else "bundled"),
    )  # fmt: skip
    context = Context()
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
        print_note(f"Wrote {yaml}; `broker plan {yaml}` prices it again, `broker jobs launch {yaml}` runs it")
    else:
        print_line(f"\n{text}")


def read_amount(text: str, flag: str) -> float:
    """`7B`, `350M`, `1.5T`, `4e9`. Raises UsageError."""
    found = _AMOUNT.fullmatch(text.strip().replace("_", "").replace(",", ""))
    value = float(found[1]) * _SCALE[found[2].lower()] if found else 0.0
    if not 0 < value < 1e18:
        raise UsageError(
            f"`{flag} {text}` is no amount", hints=[f"`{flag} 7B`; K, M, B and T are thousands to trillions"]
        )
    return value


def read_hours(text: str) -> float:
    """A duration as task files write it; a bare number is hours. Raises UsageError."""
    from broker.task.measures import Duration

    measure = Duration(bare_unit="h")
    if not re.fullmatch(measure.pattern, text):
        raise UsageError(f"`--deadline {text}` is not {measure.expected}", hints=["`--deadline 5d`"])
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
    """As given by `--layers` and `--hidden`, else by the rule from `--params`; with `active`, those are the parameters
    that the shape has, and all others lie in experts. Raises UsageError."""
    if active is not None:
        if params is None:
            raise UsageError("`--active-params` needs `--params`", hints=["`--params 671B --active-params 37B`"])
        total, own = read_amount(params, "--params"), read_amount(active, "--active-params")
        if own >= total:
            raise UsageError(
                f"`--active-params {active}` is not less than `--params {params}`",
                hints=["`--params 671B --active-params 37B`; a model without experts has no `--active-params`"],
            )
        shape = read_shape(active, layers, hidden, heads, vocab)
        return replace(shape, idle_parameters=total - own)
    from broker.optimizer.model_shape import HEAD_WIDTH, VOCABULARY, ModelShape, guess_shape

    if hidden is not None:
        if layers is None:
            raise UsageError("`--hidden` needs `--layers`", hints=["`--layers 32 --hidden 4096`"])
        count = heads or max(1, hidden // HEAD_WIDTH)
        if hidden % count:
            raise UsageError(f"`--hidden {hidden}` is not a multiple of {count} heads", hints=["pass `--heads`"])
        return ModelShape(layers=layers, width=hidden, heads=count, vocabulary=vocab or VOCABULARY)
    if params is None:
        raise UsageError("`--params` is missing", hints=["`--params 7B`, or `--layers 32 --hidden 4096`"])
    if heads is not None:
        raise UsageError("`--heads` needs `--layers` and `--hidden`", hints=["`--layers 32 --hidden 4096 --heads 32`"])
    try:
        return guess_shape(read_amount(params, "--params"), vocabulary=vocab or VOCABULARY, layers=layers)
    except ValueError as error:
        raise UsageError(str(error), hints=["give its shape: `--layers 4 --hidden 256`"]) from None


def choose_batch(parameters: float) -> float:
    """Tokens of a step, about as GPT-3 (Brown 2020, table 2.1) and, from 20 billion parameters on, Llama 2,
    from 150 on Llama 3 405B (Dubey 2024, table 4)."""
    for limit, power in ((1e9, 19), (2.5e9, 20), (20e9, 21), (150e9, 22)):
        if parameters <= limit:
            return 2.0**power
    return 2.0**24


def round_batch(sequences: float) -> int:
    """The multiple of the largest power of two that is within `BATCH_SLACK`: `--batch 4M` at 4,096 is 1,024 sequences,
    for 977 can hardly be divided by ranks or micro-batches, and so would be slower than a smaller batch."""
    for power in range(24, 0, -1):
        unit = 1 << power
        rounded = round(sequences / unit) * unit
        if rounded and abs(rounded - sequences) <= BATCH_SLACK * sequences:
            return rounded
    return max(1, round(sequences))


def find_offers(context: Context, wish: Wish, infra: str | None) -> list[Offer]:
    """What the price book has of the cards that would do."""
    from broker.optimizer.advise import can_train
    from broker.task.override import override_resources
    from broker.types import Resources, Task

    names = [each for each in context.book.read_figures() if can_train(wish, each)]
    task = Task(resources=tuple(Resources(accelerator=name, accelerator_count=1) for name in names))
    return list(context.book.find_offers(override_resources(task, infra=infra) if infra else task))


def show_advice(wish: Wish, advice: Advice, top: int) -> None:
    """What is trained, the table, and what is faster."""
    from broker.optimizer.amounts import show_amount

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
        print_line(f"... and {len(advice.options) - top} more, `--top` shows them")
    if advice.faster:
        print_line("\nSooner, for more:")
        _print_options(advice.faster[:5])
    if wish.deadline_hours is None:
        print_line("\nNo `--deadline`: nothing over 30 days is listed")
    if any(each.layout.recompute == "full" for each in (*advice.options[:top], *advice.faster[:5])):
        print_line("* activations are computed again in the backward pass")
    print_line(f"Prices of {advice.prices_as_of}; times and dollars are estimates, spot risk included")
    _tell_limits(wish, advice.options[0], (*advice.options[:top], *advice.faster[:5]))


def _tell_limits(wish: Wish, first: Option, shown: tuple[Option, ...]) -> None:
    """What the table takes for granted: a trainer that does it, and a zone with so many spot machines."""
    from broker.optimizer.advise import SPOT_GANG_GPUS, find_better_batch, find_field_speedup
    from broker.optimizer.amounts import show_amount

    if wish.training.trainer == "megatron":
        print_note(
            "note: these layouts need a program such as Megatron-LM: the bundled trainer has no sequence, context or "
            "expert parallelism, interleaved stages or sharded optimizer states beside them"
        )
    else:
        speedup = find_field_speedup(wish.training, first.layout)
        if speedup >= FIELD_WORTH:
            print_note(
                f"note: the bundled trainer limits this: a program such as Megatron-LM is about {speedup:.1f} "
                f"times as fast on the first option's {first.gpu_count:,} GPUs; `--trainer megatron` costs that"
            )
    if better := find_better_batch(wish.training, first.layout):
        tokens = show_amount(better[0] * wish.training.sequence)
        print_note(f"note: with `--batch {tokens}` the first option's GPUs are {better[1] - 1:.0%} faster a token")
    largest = max((each.gpu_count for each in shown if each.estimate.placement.is_spot), default=0)
    if largest > SPOT_GANG_GPUS:
        print_note(
            f"note: a spot gang of {largest:,} GPUs in one zone is rarely granted, and one preemption stops all of "
            "it: `--no-spot`, a reservation, or a smaller `--max-gpus` is what such runs use"
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
            "spot" if placement.is_spot else "od", f"~{show_hours(each.hours)}", f"~{each.usd:,.0f}",
        ])  # fmt: skip
    columns = ["#", "GPUS", "STRATEGY", "GiB", "MFU", "PLACE", "", "TIME", "USD"]
    numbers = ("#", "GiB", "MFU", "TIME", "USD")
    print_table(columns, rows, right=numbers, firm=("GPUS", "STRATEGY", "", *numbers))


def describe_advice(wish: Wish, advice: Advice, text: str, top: int) -> dict[str, object]:
    """As data. Memory in bytes, times in hours and seconds a step."""
    training: Training = wish.training
    return {
        "training": {**plain(training), "parameters": training.shape.parameters, "steps": training.steps},
        "prices_as_of": advice.prices_as_of,
        "options": [describe_option(each) for each in advice.options[:top]],
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
        "sharding": plain(layout.sharding),
        "micro_batch": layout.micro_batch,
        "recompute": layout.recompute,
        "memory": {**plain(layout.memory), "total": layout.memory.total},
        "step": {**plain(layout.step), "total_s": layout.step.total_s},
        "mfu": layout.mfu,
        "work_hours": option.work_hours,
        "expected_hours": option.hours,
        "expected_usd": option.usd,
        "estimate": plain(option.estimate),
    }
