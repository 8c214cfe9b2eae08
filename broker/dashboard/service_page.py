"""Show the pages of services: their replicas and versions, the load that the balancer reported, and their events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from broker.app.gateways import READY
from broker.app.service_figures import find_usd_per_million, sum_usd_hour
from broker.app.services import ServiceLine
from broker.dashboard.html import Content, Markup, element, join, table
from broker.formatting import format_duration, format_ms, format_second, format_usd
from broker.serve.wording import describe_service_event, warn_of_expiry
from broker.state.services import ServiceEvent

ABOUT = (
    "Rates, latencies and failures are those of the last minute; failed requests are responses with a 5xx status. "
    "The current rate is that of the replicas. What was paid includes gateways, and replicas that have ended, until "
    "their jobs are deleted (`keep_days`)."
)


def show_services(lines: Sequence[ServiceLine], now_s: float) -> Markup:
    """Show all services."""
    if not lines:
        return element("p", "No services; start one with `broker serve up TASK.yaml`.")
    cells: list[Sequence[Content]] = []
    for line in lines:
        service, ready = line.service, sum(each.status == READY for each in line.replicas)
        cells.append(
            [
                element("a", service.name, href=f"/services/{service.name}"), _show_state(line.status),
                service.version, f"{ready}/{service.wanted}", line.endpoint, _count(line, "in_flight"),
                _count(line, "arrivals"), format_duration(now_s - service.created_s), format_usd(line.paid_usd),
            ]
        )  # fmt: skip
    heads = ["Service", "Status", "Version", "Ready", "Endpoint", "In flight", "Requests", "Age", "USD"]
    about = "Requests are those since the balancer started."
    shown = table(heads, cells, caption="Services", right=["Version", "In flight", "Requests", "Age", "USD"])
    return join([shown, element("p", about, class_="faint")])


def show_service(line: ServiceLine, events: Sequence[ServiceEvent], now_s: float) -> Markup:
    """Show one service: load, replicas with the reason of their status, and events, newest first."""
    service = line.service
    ready = sum(each.status == READY for each in line.replicas)
    warning = warn_of_expiry(line.load.certificate_ends_s, now_s) if line.load is not None else ""
    figures = {
        "Status": _show_state(line.status),
        "Version": f"{service.version} ({service.mode.value})",
        "Replicas ready": f"{ready} of {service.wanted}",
        "Endpoint": line.endpoint,
        "Requests since the balancer started": _count(line, "arrivals"),
        "In flight": _count(line, "in_flight"),
        "Waiting": _count(line, "waiting"),
        "Streams resumed": _count(line, "resumed"),
        "Responses broken": _count(line, "broken"),
        **_list_minute(line),
        "Current rate": f"{format_usd(sum_usd_hour(line))} USD/h",
        "Paid": f"{format_usd(line.paid_usd)} USD",
    }
    cards = [element("div", element("dt", name), element("dd", value)) for name, value in figures.items()]
    replicas: list[Sequence[Content]] = [
        [
            each.replica.number, each.replica.version, _show_state(each.status), each.place,
            format_usd(each.usd_hour), "-" if each.in_flight is None else each.in_flight,
            element("a", str(each.replica.job_id), href=f"/jobs/{each.replica.job_id}"),
            format_duration(now_s - each.replica.created_s), each.error,
        ]
        for each in line.replicas
    ]  # fmt: skip
    heads = ["Replica", "Version", "Status", "Location", "USD/h", "In flight", "Job", "Age", "Reason"]
    rows: list[Sequence[Content]] = [
        [format_second(each.time_s), describe_service_event(each)] for each in reversed(events)
    ]
    right = ["Replica", "Version", "USD/h", "In flight", "Job", "Age"]
    return join(
        [
            element("p", service.failure, class_="note") if service.failure else None,
            element("p", "The balancer is not running.", class_="note") if line.load is None else None,
            element("p", f"Warning: {warning}.", class_="note") if warning else None,
            element("dl", *cards, class_="figures"),
            element("p", ABOUT, class_="faint"),
            _show_gateways(line) if line.gateways else None,
            element("h2", "Replicas"),
            table(heads, replicas, caption="Replicas", right=right) if replicas else element("p", "No replicas yet."),
            element("h2", "Events"),
            table(["Time", "Event"], rows, caption="Events"),
        ]
    )


def _list_minute(line: ServiceLine) -> Mapping[str, str]:
    """List the measurements of the last minute; nothing without a balancer."""
    if line.load is None:
        return {}
    window = line.load.window
    return {
        "Requests/s": f"{window.qps:.1f}",
        "Failed requests": f"{window.errors:,} of {window.requests:,}",
        "Tokens/s": f"{window.completion_tokens_s:,.0f}",
        "First token, p50 / p95": f"{format_ms(window.ttft_p50_s)} / {format_ms(window.ttft_p95_s)}",
        "Each next token, p50 / p95": f"{format_ms(window.tpot_p50_s)} / {format_ms(window.tpot_p95_s)}",
        "USD per million tokens": format_usd(find_usd_per_million(sum_usd_hour(line), window)),
    }


def _show_gateways(line: ServiceLine) -> Markup:
    rows: list[Sequence[Content]] = [
        [
            each.number, _show_state(each.status), each.endpoint or "-", each.place, format_usd(each.usd_hour),
            "-" if each.load is None else each.load.in_flight,
            "-" if each.job_id is None else element("a", str(each.job_id), href=f"/jobs/{each.job_id}"), each.error,
        ]
        for each in line.gateways
    ]  # fmt: skip
    heads = ["Gateway", "Status", "Endpoint", "Location", "USD/h", "In flight", "Job", "Reason"]
    right = ["Gateway", "USD/h", "In flight", "Job"]
    return join([element("h2", "Gateways"), table(heads, rows, caption="Gateways", right=right)])


def _count(line: ServiceLine, name: str) -> str:
    return "-" if line.load is None else f"{getattr(line.load, name):,}"


def _show_state(status: str) -> Markup:
    kind = "good" if status == READY else "bad" if status == "FAILED" else "wait"
    return element("span", status, class_=kind)
