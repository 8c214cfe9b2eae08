"""`broker jobs trace`: export a job's history as an OpenTelemetry trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from broker.app.jobs import find_job
from broker.cli.context import check_embedded, make_context
from broker.cli.jobs_show import JobName
from broker.cli.render import print_json, print_line
from broker.errors import UsageError


def trace(
    job: JobName,
    otlp: Annotated[
        str | None, typer.Option("--otlp", metavar="URL", help="Send to an OTLP/HTTP receiver at this URL.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--output-file", "-o", metavar="FILE", help="Write OTLP/JSON to a file.")
    ] = None,
) -> None:
    """Export a job's attempts, recoveries and events as a trace.

    Prints OTLP/JSON unless a URL or file is given. A repeated export has the same trace and span IDs.
    """
    from broker.app.tracing import make_trace, send_trace

    check_embedded("jobs trace")
    context = make_context()
    found = find_job(context, job)
    made = make_trace(found, context.store.events.list(job_id=found.id), now_s=context.clock.now_s())
    if otlp is None and file is None:
        print_json(made)
        return
    if file is not None:
        try:
            file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write `{file}`: {(error.strerror or 'no access').lower()}") from None
        print_line(f"Wrote {file}")
    if otlp is not None:
        send_trace(made, otlp)
        print_line(f"Sent the trace of job {found.id} to {otlp}")
