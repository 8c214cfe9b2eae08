"""`broker advise`: recommend GPUs and parallelism for a model, with time and cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.advising import AdviceRequest, Precision, Trainer
from broker.app.advising import advise as recommend
from broker.app.advising_serve import ServingRequest
from broker.cli import options
from broker.cli.advise_serve import (
    AvailabilityOption,
    InputOption,
    KvHeadsOption,
    OutputOption,
    RpsOption,
    ServeOption,
    TpotOption,
    TtftOption,
    advise_service,
)  # fmt: skip
from broker.cli.context import make_context
from broker.cli.price_dates import date_placement, show_price_dates
from broker.cli.render import fits, print_json, print_line, print_note, print_table, print_wrapped
from broker.errors import UsageError
from broker.formatting import format_hours, format_usd, to_plain

if TYPE_CHECKING:
    from broker.advisor.advise import Advice, Option, TrainingRequest
    from broker.advisor.layout import Training

FIELD_WORTH = 1.1  # smallest speedup of another program that is worth a note


ParamsOption = Annotated[
    str | None, typer.Option("--params", metavar="N", help="Number of parameters, e.g. 7B or 350M.")
]
TokensOption = Annotated[str, typer.Option("--tokens", metavar="N", help="Number of training tokens, e.g. 20B.")]
SeqOption = Annotated[int, typer.Option("--seq", metavar="N", min=16, help="Sequence length in tokens.")]
BatchOption = Annotated[
    str | None, typer.Option("--batch", metavar="N", help="Batch size in tokens, e.g. 2M (default: by model size).")
]
DeadlineOption = Annotated[
    str | None, typer.Option("--deadline", metavar="TIME", help="Finish within this time, e.g. 5d or 36h.")
]
BudgetOption = Annotated[float | None, typer.Option("--budget", metavar="USD", help="Maximum total cost, in USD.")]
HourValueOption = Annotated[
    float | None,
    typer.Option(
        "--hour-value",
        metavar="USD",
        min=0,
        help="Value of finishing one hour earlier, in USD (default: 2 % of the on-demand price of the cheapest gang).",
    ),
]
DtypeOption = Annotated[Precision, typer.Option("--dtype", help="Compute precision.")]
GpusOption = Annotated[str | None, typer.Option("--gpus", metavar="NAME[,...]", help="Consider only these GPUs.")]
InfraOption = Annotated[
    str | None, typer.Option("--infra", metavar="CLOUD[/REGION[/ZONE]]", help="Consider only this location.")
]
MaxGpusOption = Annotated[int, typer.Option("--max-gpus", metavar="N", min=1, help="Maximum number of GPUs.")]
SpotOption = Annotated[
    bool | None, typer.Option("--spot/--no-spot", help="Consider only spot, or only on-demand (default: both).")
]
ActiveParamsOption = Annotated[
    str | None,
    typer.Option("--active-params", metavar="N", help="Active parameters per token, for mixture-of-experts models."),
]
TrainerOption = Annotated[
    Trainer | None,
    typer.Option("--trainer", help="Training program: `trainers.lm`, or one with every Megatron-LM layout."),
]
LayersOption = Annotated[int | None, typer.Option("--layers", metavar="N", min=1, help="Number of transformer blocks.")]
HiddenOption = Annotated[
    int | None, typer.Option("--hidden", metavar="N", min=1, help="Model width; requires --layers.")
]
HeadsOption = Annotated[
    int | None,
    typer.Option("--heads", metavar="N", min=1, help="Number of attention heads (default: width / 128)."),
]
VocabOption = Annotated[int | None, typer.Option("--vocab", metavar="N", min=1, help="Vocabulary size.")]
TopOption = Annotated[int, typer.Option("--top", metavar="N", min=1, help="Number of rows to show.")]
ExplainOption = Annotated[
    bool, typer.Option("--explain", help="Break down memory and time of the first option, with assumptions.")
]
YamlOption = Annotated[
    Path | None, typer.Option("--yaml", metavar="FILE", help="Write the first option's task to a file.")
]


def advise(
    params: ParamsOption = None,
    tokens: TokensOption = "",
    seq: SeqOption = 4096,
    batch: BatchOption = None,
    deadline: DeadlineOption = None,
    budget: BudgetOption = None,
    hour_value: HourValueOption = None,
    dtype: DtypeOption = "bf16",
    gpus: GpusOption = None,
    infra: InfraOption = None,
    max_gpus: MaxGpusOption = 512,
    spot: SpotOption = None,
    active_params: ActiveParamsOption = None,
    trainer: TrainerOption = None,
    layers: LayersOption = None,
    hidden: HiddenOption = None,
    heads: HeadsOption = None,
    vocab: VocabOption = None,
    top: TopOption = 8,
    explain: ExplainOption = False,
    yaml: YamlOption = None,
    serve: ServeOption = False,
    rps: RpsOption = 1.0,
    input_tokens: InputOption = 512,
    output_tokens: OutputOption = 128,
    ttft: TtftOption = None,
    tpot: TpotOption = None,
    availability: AvailabilityOption = 0.99,
    kv_heads: KvHeadsOption = None,
    as_json: options.AsJson = False,
) -> None:
    """Recommend GPUs and parallelism for a model, with time and cost.

    Nothing is started.
    """
    training = {
        "--tokens": (tokens, ""), "--seq": (seq, 4096), "--batch": (batch, None), "--dtype": (dtype, "bf16"),
        "--deadline": (deadline, None), "--budget": (budget, None), "--hour-value": (hour_value, None),
        "--max-gpus": (max_gpus, 512), "--trainer": (trainer, None), "--explain": (explain, False),
    }  # fmt: skip
    serving = {
        "--rps": (rps, 1.0), "--input-tokens": (input_tokens, 512), "--output-tokens": (output_tokens, 128),
        "--ttft": (ttft, None), "--tpot": (tpot, None), "--availability": (availability, 0.99),
        "--kv-heads": (kv_heads, None),
    }  # fmt: skip
    _check_mode(training, serving, is_serving=serve)
    if serve:
        advise_service(
            ServingRequest(
                params=params, active_params=active_params, layers=layers, hidden=hidden, heads=heads, vocab=vocab,
                kv_heads=kv_heads, rps=rps, input_tokens=input_tokens, output_tokens=output_tokens, ttft=ttft,
                tpot=tpot, availability=availability, gpus=gpus, infra=infra, spot=spot,
            ),
            top=top, yaml=yaml, as_json=as_json,
        )  # fmt: skip
        return
    request = AdviceRequest(
        params=params, active_params=active_params, tokens=tokens, sequence=seq, batch=batch, deadline=deadline,
        budget_usd=budget, dtype=dtype, gpus=gpus, infra=infra, gpus_max=max_gpus, spot=spot, trainer=trainer,
        layers=layers, hidden=hidden, heads=heads, vocab=vocab, hour_value_usd=hour_value,
    )  # fmt: skip
    _advise_training(request, top=top, explain=explain, yaml=yaml, as_json=as_json)


def _advise_training(request: AdviceRequest, *, top: int, explain: bool, yaml: Path | None, as_json: bool) -> None:
    context = make_context()
    found = recommend(context, request)
    if yaml is not None:
        yaml.write_text(found.task, encoding="utf-8")
    if as_json:
        print_json(describe_advice(found.request, found.advice, found.task, top))
        return
    _print_advice(found.request, found.advice, found.task, top, context.clock.now_s(), explain=explain, yaml=yaml)


def _check_mode(
    training: Mapping[str, tuple[object, object]], serving: Mapping[str, tuple[object, object]], *, is_serving: bool
) -> None:
    """Raise UsageError for options of the other mode: pairs of a value and its default, by option."""
    if is_serving:
        _refuse_options(
            training,
            "cannot be used with `--serve`",
            "a service has no end; state its load with `--rps`, `--ttft` and `--tpot`",
        )
    else:
        _refuse_options(serving, "can only be used with `--serve`", "add `--serve` for GPUs that serve the model")


def _refuse_options(given: Mapping[str, tuple[object, object]], rule: str, hint: str) -> None:
    """Raise UsageError with `rule` if any of these options has another value than its default."""
    names = [f"`{name}`" for name, (value, default) in given.items() if value != default]
    if names:
        raise UsageError(f"{', '.join(names)} {rule}", hints=[hint])


def _print_advice(
    request: TrainingRequest, advice: Advice, text: str, top: int, now_s: float, *, explain: bool, yaml: Path | None
) -> None:
    show_advice(request, advice, top, now_s)
    if explain:
        from broker.cli.advise_explain import show_layout

        show_layout(request.training, advice.options[0])
    if yaml is not None:
        print_note(f"wrote {yaml}; plan it with `broker plan {yaml}`, run it with `broker jobs launch {yaml}`")
    else:
        print_line(f"\n{text}")


def show_advice(request: TrainingRequest, advice: Advice, top: int, now_s: float) -> None:
    """Print the training run, the table of options, faster ones, and the dates of their prices."""
    from broker.advisor.amounts import show_amount

    training, shape = request.training, request.training.shape
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
    if request.deadline_hours is None:
        print_line("\nWithout `--deadline`, options over 30 days are not listed")
    print_wrapped(_describe_hour_value(request, advice), indent=0)
    shown = (*advice.options[:top], *advice.faster[:5])
    if any(each.layout.recompute == "full" for each in shown):
        print_line("* recomputes activations in the backward pass")
    dates = [date_placement(each.estimate.placement) for each in shown]
    show_price_dates(dates, now_s, more="; times and costs are estimates that include spot risk")
    _note_limits(request, advice.options[0], shown)


def _describe_hour_value(request: TrainingRequest, advice: Advice) -> str:
    usd = format_usd(advice.hour_value_usd)
    if request.hour_value_usd is not None:
        return f"Finishing an hour earlier is worth {usd} USD, as requested"
    share = "2 % of the on-demand price of the cheapest gang"
    return f"Finishing an hour earlier is worth {usd} USD ({share}); change it with `--hour-value`"


def _note_limits(request: TrainingRequest, first: Option, shown: tuple[Option, ...]) -> None:
    """Note the limits of the table: the trainer's layouts, the batch, and spot capacity in one zone."""
    from broker.advisor.advise import SPOT_GANG_GPUS, find_better_batch, find_field_speedup
    from broker.advisor.amounts import show_amount

    if request.training.trainer == "megatron":
        print_note(
            "note: these layouts require a program such as Megatron-LM: the bundled trainer has no sequence "
            "parallelism on tensor ranks, and no interleaved stages or sharded optimizer states combined with them"
        )
    else:
        speedup = find_field_speedup(request.training, first.layout)
        if speedup >= FIELD_WORTH:
            print_note(
                f"note: the bundled trainer limits this: a program such as Megatron-LM is about {speedup:.1f} "
                f"times as fast on the first option's {first.gpu_count:,} GPUs; estimate it with `--trainer megatron`"
            )
    if better := find_better_batch(request.training, first.layout):
        tokens = show_amount(better[0] * request.training.sequence)
        print_note(f"note: with `--batch {tokens}` the first option's GPUs are {better[1] - 1:.0%} faster per token")
    largest = max((each.gpu_count for each in shown if each.estimate.placement.is_spot), default=0)
    if largest > SPOT_GANG_GPUS:
        print_note(
            f"note: {largest:,} spot GPUs in one zone are rarely available, and one preemption stops all of "
            "them: consider `--no-spot`, a reservation, or a smaller `--max-gpus`"
        )


def _print_options(found: tuple[Option, ...]) -> None:
    """Print a table of options; if the terminal is too narrow for it, their locations follow in lines of their own."""
    rows, places = [], []
    for number, each in enumerate(found, start=1):
        placement, layout = each.estimate.placement, each.layout
        count = f"{layout.node_count} x " if layout.node_count > 1 else ""
        rows.append([
            str(number), f"{count}{layout.hardware.figures.name}:{layout.hardware.accelerators}",
            layout.strategy + ("*" if layout.recompute == "full" else ""),
            f"~{layout.memory.total / 2**30:.0f}", f"~{layout.mfu:.0%}",
            "spot" if placement.is_spot else "od", f"~{format_hours(each.hours)}", f"~{each.usd:,.0f}",
        ])  # fmt: skip
        places.append(f"{placement.offer.cloud} {placement.offer.zone or placement.offer.region}")
    columns = ["#", "GPUS", "STRATEGY", "GiB", "MFU", "MODEL", "TIME", "USD"]
    at, numbers = columns.index("MODEL"), ("#", "GiB", "MFU", "TIME", "USD")
    wide = [*columns[:at], "LOCATION", *columns[at:]]
    wide_rows = [[*row[:at], place, *row[at:]] for row, place in zip(rows, places, strict=True)]
    if fits(wide, wide_rows):
        print_table(wide, wide_rows, right=numbers)
        return
    print_table(columns, rows, right=numbers, firm=("STRATEGY", "MODEL", *numbers))
    print_wrapped(
        "LOCATION: " + ", ".join(f"{row[0]} {place}" for row, place in zip(rows, places, strict=True)), indent=2
    )


def describe_advice(request: TrainingRequest, advice: Advice, text: str, top: int) -> dict[str, object]:
    """Return the advice, JSON-ready: memory in bytes, times in hours, and in seconds per step."""
    training: Training = request.training
    return {
        "training": {**to_plain(training), "parameters": training.shape.parameters, "steps": training.steps},
        "prices_as_of": advice.prices_as_of,
        "hour_value_usd": advice.hour_value_usd,
        "options": [describe_option(option) for option in advice.options[:top]],
        "faster": [describe_option(each) for each in advice.faster],
        "yaml": text,
    }


def describe_option(option: Option) -> dict[str, object]:
    """Return an option of the recommendation as JSON-ready data."""
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
