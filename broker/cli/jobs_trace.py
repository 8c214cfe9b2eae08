"""`broker jobs trace`: export a job's history as an OpenTelemetry trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from broker.app.verbs.watching import read_job_history
from broker.cli.context import make_session
from broker.cli.jobs_show import JobName
from broker.cli.render import print_json, print_line
from broker.environment import read_otlp_headers
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
    from broker.app.tracing import make_trace, parse_headers, send_trace

    headers = {} if otlp is None else parse_headers(read_otlp_headers())  # another program's may be invalid
    history = make_session().call(read_job_history, job=job)
    found = history.job
    made = make_trace(found, history.events, now_s=history.now_s)
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
        send_trace(made, otlp, headers=headers)
        print_line(f"Sent the trace of job {found.id} to {otlp}")
