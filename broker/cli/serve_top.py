"""`broker serve top`: load, latency and cost of services, replica by replica, as the balancers measured them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app import services
from broker.app.gateways import READY
from broker.app.service_figures import find_usd_per_million, find_window, sum_usd_hour
from broker.app.services import ReplicaLine, ServiceLine
from broker.cli import options, terminal
from broker.cli.context import check_embedded, make_context
from broker.cli.render import format_table, print_json, print_line
from broker.clock import pause
from broker.formatting import format_count, format_ms, format_usd, to_plain
from broker.serve.files import LoadWindow

if TYPE_CHECKING:
    from broker.app.container import Context

WATCH_S = 1.0


def top(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="SERVICE...", help="Service names (default: all).")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once, without redrawing.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show load, latency and cost of services, refreshed every second.

    Rates and percentiles cover the last minute.
    """
    check_embedded("serve top")
    context = make_context()
    context.restart_daemon_if_needed()
    wanted = names or ()
    if as_json:
        print_json([describe_service(each) for each in services.describe_services(context, wanted)])
        return
    try:
        _watch(context, wanted, once=once)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _watch(context: Context, names: Sequence[str], *, once: bool) -> None:
    if not once:
        with terminal.show_view() as view:
            while view is not None:
                view.show(list_lines(services.describe_services(context, names)))
                pause(WATCH_S)
    for line in list_lines(services.describe_services(context, names)):
        print_line(line)


def list_lines(lines: Sequence[ServiceLine]) -> list[str]:
    """Return the view as text, at most 80 columns wide."""
    if not lines:
        return ["No services; start one with `broker serve up TASK.yaml`"]
    shown = list[str]()
    for line in lines:
        shown += [*([""] if shown else []), *_list_service(line)]
    return shown


def _list_service(line: ServiceLine) -> list[str]:
    ready = sum(each.status == READY for each in line.replicas)
    head = f"{line.service.name}  {line.status}  {ready}/{line.service.wanted} ready  {line.endpoint}"
    if line.load is None:
        return [head, "the balancer is not running"]
    load, window = line.load, line.load.window
    usd_hour = sum_usd_hour(line)
    cost = find_usd_per_million(usd_hour, window)
    return [
        head,
        f"{window.qps:.1f} requests/s, {load.in_flight} in flight, {load.waiting} waiting, "
        f"{format_count(window.errors, 'error')}, {window.completion_tokens_s:,.0f} tokens/s",
        f"first token {format_ms(window.ttft_p50_s)} (p95 {format_ms(window.ttft_p95_s)}), "
        f"per token {format_ms(window.tpot_p50_s)} (p95 {format_ms(window.tpot_p95_s)})",
        f"{format_usd(usd_hour)} USD/h, "
        + ("no tokens in the last minute" if cost is None else f"{format_usd(cost)} USD per million tokens"),
        *format_table(
            ["#", "VER", "STATUS", "LOCATION", "FLIGHT", "REQ/S", "TOK/S", "TTFT", "TPOT", "USD/h"],
            [_list_cells(line, each) for each in line.replicas],
            right=("#", "VER", "FLIGHT", "REQ/S", "TOK/S", "TTFT", "TPOT", "USD/h"),
        ),
    ]


def _list_cells(line: ServiceLine, each: ReplicaLine) -> list[str]:
    window = find_window(line, each)
    return [
        str(each.replica.number), str(each.replica.version), each.status, each.place,
        "-" if each.in_flight is None else str(each.in_flight), f"{window.qps:.1f}",
        f"{window.completion_tokens_s:,.0f}", format_ms(window.ttft_p50_s), format_ms(window.tpot_p50_s),
        format_usd(each.usd_hour),
    ]  # fmt: skip


def describe_service(line: ServiceLine) -> dict[str, object]:
    """Return a service with its figures, JSON-ready: times in seconds, rates per second."""
    usd_hour = sum_usd_hour(line)
    window = line.load.window if line.load else LoadWindow()
    return {
        **to_plain(line),
        "endpoint": line.endpoint,
        "usd_hour": usd_hour,
        "usd_per_million_tokens": find_usd_per_million(usd_hour, window),
    }
