"""The part of `broker rehearse` for services: replicas behind a balancer, with preemptions and a load of requests."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from broker.cli.rehearse_show import show_verdict
from broker.cli.render import print_json, print_line, print_note
from broker.cli.terminal import is_drawing, show_wait
from broker.formatting import format_count, format_duration, format_usd, strip_control
from broker.rehearsal.result import list_places
from broker.rehearsal.service_verdict import format_percent

if TYPE_CHECKING:
    from broker.rehearsal.context import Stage
    from broker.rehearsal.service_result import ServiceRehearsal
    from broker.rehearsal.uptime import Uptime

SHARES_MAX = 3  # numbers of replicas whose share of time is shown


def rehearse_service(
    stage: Stage,
    *,
    duration_s: float,
    preemptions: int,
    notice_s: float | None,
    speed: float,
    as_json: bool,
    html: Path | None,
) -> None:
    """Rehearse a service, and show the verdict. Raises BrokerError if it does not start or recover."""
    from broker.rehearsal.service_staging import raise_service_failure

    def tell(text: str) -> None:
        (print_note if as_json else print_line)(strip_control(text))

    result = play_service(
        stage, duration_s=duration_s, preemptions=preemptions, notice_s=notice_s, speed=speed, tell=tell
    )
    if as_json:
        print_json(result.describe())
    else:
        show_verdict(list_service_figures(result), result.findings)
    if html is not None:
        from broker.cli.rehearse_html import write_service_rehearsal

        write_service_rehearsal(html, result)
        print_note(f"wrote {html}")
    raise_service_failure(result, preemptions)


def list_service_figures(result: ServiceRehearsal) -> Sequence[tuple[str, str]]:
    """List the summary as (name, text)."""
    uptime, requests = result.uptime, result.requests
    return [
        ("status", "READY" if uptime.start_s is not None else "FAILED"),
        ("replicas", f"{uptime.wanted} wanted"),
        ("preemptions", f"{result.preemptions}; {format_count(result.refusals, 'refused request')} for machines"),
        ("lost replicas", _say_losses(uptime)),
        ("ready", _say_shares(uptime)),
        ("requests", f"{requests.sent:,} sent, {requests.answered:,} answered, {requests.failed:,} failed"),
        ("ran in", ", then ".join(list_places(result.places)) or "-"),
        ("simulated time", _say_times(result)),
        ("simulated bill", _say_bill(result)),
        ("measured here", _say_measures(result) or "-"),
        ("real time", format_duration(result.real_s)),
    ]


def _say_losses(uptime: Uptime) -> str:
    lost = sum(len(each.loss.replicas) for each in uptime.recoveries)
    times = [each.recovery_s for each in uptime.recoveries if each.recovery_s]
    longest = f"; ready again after at most {format_duration(max(times))}" if times else ""
    return f"{lost}{longest}"


def _say_shares(uptime: Uptime) -> str:
    """Return the share of time for each number of replicas: `2 or more 99.85%, 1 or more 100%`."""
    counts = sorted(uptime.shares, reverse=True)[:SHARES_MAX]
    words = [f"{count} or more {format_percent(uptime.shares[count])}" for count in counts]
    return f"{', '.join(words)} of {format_duration(uptime.served_s)}" if words else "-"


def _say_times(result: ServiceRehearsal) -> str:
    start_s = result.uptime.start_s
    start = "never ready" if start_s is None else f"{format_duration(start_s)} until all replicas were ready"
    return f"{format_duration(result.total_s)}; {start}"


def _say_bill(result: ServiceRehearsal) -> str:
    text = f"{format_usd(result.paid_usd)} USD"
    if not result.ondemand_usd:
        return text
    return f"{text}; on-demand {format_usd(result.ondemand_usd)}, saved {1 - result.paid_usd / result.ondemand_usd:.0%}"


def _say_measures(result: ServiceRehearsal) -> str:
    words = []
    if result.start_s is not None:
        words.append(f"{result.start_s:.1f} s from start to ready")
    if result.requests.median_s is not None:
        words.append(f"{result.requests.median_s * 1000:,.0f} ms per request")
    return ", ".join(words)


def play_service(
    stage: Stage,
    *,
    duration_s: float,
    preemptions: int,
    notice_s: float | None,
    speed: float,
    tell: Callable[[str], None],
) -> ServiceRehearsal:
    """Run the service in a temporary state folder until its time is over; return the result."""
    from broker.rehearsal.service_context import ServiceRehearsalContext
    from broker.rehearsal.service_result import draw_up_service
    from broker.rehearsal.service_run import ServiceDriver

    home = Path(tempfile.mkdtemp(prefix="broker-rehearsal-"))
    try:
        context = ServiceRehearsalContext(
            home, stage, speed=speed, on_event=lambda message: driver.report_market(message)
        )
        with show_wait("rehearsing", is_told=False) as bar:
            driver = ServiceDriver(
                context, preemptions, notice_s, tell, bar if is_drawing(sys.stderr) else None, duration_s=duration_s
            )
            asyncio.run(driver.run())
        return draw_up_service(driver)
    finally:
        shutil.rmtree(home, ignore_errors=True)
