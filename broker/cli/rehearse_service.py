"""The part of `broker rehearse` for services: replicas behind a balancer, with preemptions and a load of requests."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from broker.cli.rehearse_show import list_service_figures, show_verdict
from broker.cli.render import print_json, print_line, print_note
from broker.cli.terminal import is_drawing, show_wait
from broker.formatting import strip_control

if TYPE_CHECKING:
    from broker.rehearsal.context import Stage
    from broker.rehearsal.service_result import ServiceRehearsal


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

    result = run_service_rehearsal(
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
    raise_service_failure(result, preemptions, is_shown=not as_json)


def run_service_rehearsal(
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
    from broker.rehearsal.service_result import make_service_rehearsal
    from broker.rehearsal.service_run import ServiceDriver

    home = Path(tempfile.mkdtemp(prefix="broker-rehearsal-"))
    try:
        context = ServiceRehearsalContext(
            home, stage, speed=speed, on_event=lambda message: driver.report_market(message)
        )
        with show_wait("rehearsing", is_printed=False) as bar:
            driver = ServiceDriver(
                context, preemptions, notice_s, tell, bar if is_drawing(sys.stderr) else None, duration_s=duration_s
            )
            asyncio.run(driver.run())
        return make_service_rehearsal(driver)
    finally:
        shutil.rmtree(home, ignore_errors=True)
