"""Print the recommendations of `broker advise --serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from broker.app.advising_serve import ServingAdvice, ServingOption, ServingRequest, advise_serving
from broker.cli.context import make_context
from broker.cli.price_dates import show_price_dates
from broker.cli.render import print_json, print_line, print_note, print_table
from broker.formatting import format_usd, to_plain

ServeOption = Annotated[bool, typer.Option("--serve", help="Recommend GPUs for serving the model, not for training.")]
RpsOption = Annotated[float, typer.Option("--rps", metavar="N", min=0.001, help="Requests per second, with --serve.")]
InputOption = Annotated[
    int, typer.Option("--input-tokens", metavar="N", min=1, help="Prompt length in tokens, with --serve.")
]
OutputOption = Annotated[
    int, typer.Option("--output-tokens", metavar="N", min=1, help="Output length in tokens, with --serve.")
]
TtftOption = Annotated[
    str | None, typer.Option("--ttft", metavar="TIME", help="Maximum time to the first token (p95), e.g. 0.5s.")
]
TpotOption = Annotated[
    str | None, typer.Option("--tpot", metavar="TIME", help="Maximum time per token after the first, e.g. 50ms.")
]
AvailabilityOption = Annotated[
    float,
    typer.Option(
        "--availability",
        metavar="P",
        min=0,
        max=0.99999,
        help="Share of time with enough ready replicas, with --serve.",
    ),
]
KvHeadsOption = Annotated[
    int | None, typer.Option("--kv-heads", metavar="N", min=1, help="Number of key-value heads, with --serve.")
]


def advise_service(request: ServingRequest, *, top: int, yaml: Path | None, as_json: bool) -> None:
    """Recommend and print; write the task to `yaml`."""
    context = make_context()
    advice = advise_serving(context, request)
    if yaml is not None:
        yaml.write_text(advice.task, encoding="utf-8")
    if as_json:
        print_json(describe_serving(advice, top))
        return
    show_serving(advice, top, context.clock.now_s())
    if yaml is not None:
        print_note(f"wrote {yaml}; set MODEL in it, then start it with `broker serve up {yaml}`")
    else:
        print_line(f"\n{advice.task}")


def show_serving(advice: ServingAdvice, top: int, now_s: float) -> None:
    """Print the load, the table of options, the assumptions, and the dates of the prices."""
    from broker.advisor.amounts import show_amount
    from broker.advisor.serving import HEADROOM

    goal = advice.goal
    print_line(
        f"{show_amount(goal.shape.parameters)} parameters in bfloat16, {goal.rps:g} requests/s of "
        f"{goal.input_tokens:,} + {goal.output_tokens:,} tokens"
    )
    print_line()
    print_table(
        ["#", "GPUS", "BATCH", "REQ/S", "TTFT", "TPOT", "REPLICAS", "USD/h", "USD/Mtok"],
        [_list_cells(number, each) for number, each in enumerate(advice.options[:top], start=1)],
        right=("#", "BATCH", "REQ/S", "TTFT", "TPOT", "USD/h", "USD/Mtok"),
        firm=("GPUS", "REPLICAS", "TTFT", "TPOT", "USD/h", "USD/Mtok"),
    )
    print_line("\nREQ/S, TTFT (p95) and TPOT are of one replica with all its GPUs")
    print_line(f"Rates are {HEADROOM:.0%} of saturation; replicas include spare ones for spot preemptions")
    dates = [date for each in advice.options[:top] for date in each.price_dates]
    show_price_dates(dates, now_s, more="; all figures are estimates")


def _list_cells(number: int, each: ServingOption) -> list[str]:
    layout, spot = each.layout, each.spot_count
    ondemand = len(each.placement.slots) - spot
    kinds = [f"{spot} spot"] * bool(spot) + [f"{ondemand} od"] * bool(ondemand)
    return [
        str(number), f"{layout.hardware.figures.name}:{layout.tensor_parallel}", str(layout.batch),
        f"~{layout.rps:.1f}", f"~{layout.ttft_s * 1000:.0f}ms",
        f"~{layout.tpot_s * 1000:.0f}ms", ", ".join(kinds), format_usd(each.placement.usd_hour),
        f"~{each.usd_per_million:.3g}",
    ]  # fmt: skip


def describe_serving(advice: ServingAdvice, top: int) -> dict[str, object]:
    """Return the advice, JSON-ready: times in seconds, memory in bytes."""
    return {
        "goal": {**to_plain(advice.goal), "parameters": advice.goal.shape.parameters},
        "prices_as_of": advice.prices_as_of,
        "options": [
            {
                "accelerator": each.layout.hardware.figures.name,
                "tensor_parallel": each.layout.tensor_parallel,
                "batch": each.layout.batch,
                "kv_bytes_max": each.layout.kv_bytes_max,
                "rps_per_replica": each.layout.rps,
                "ttft_s": each.layout.ttft_s,
                "tpot_s": each.layout.tpot_s,
                "replicas": each.replicas,
                "placement": to_plain(each.placement),
                "usd_per_million_tokens": each.usd_per_million,
            }
            for each in advice.options[:top]
        ],
        "yaml": advice.task,
    }
