"""`broker report`: a month's spending, savings and losses, as Markdown or HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from broker.app.verbs.account import report_month
from broker.cli import options
from broker.cli.context import make_session
from broker.cli.render import print_json, print_line
from broker.dashboard.report import write_html, write_markdown
from broker.errors import UsageError
from broker.formatting import to_plain


def report(
    month: Annotated[
        str | None, typer.Option("--month", metavar="YYYY-MM", help="Month, local time (default: the current one).")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--output-file", "-o", metavar="FILE", help="Write to a .html or .md file.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Report a month's spending, savings against on-demand and losses to preemptions.

    Prints Markdown, or writes HTML or Markdown to a file.
    """
    if file is not None and file.suffix.lower() not in (".html", ".md"):
        raise UsageError(
            f"`-o` must name a .html or .md file, not `{file}`", hints=[f"write `-o {file.with_suffix('.html')}`"]
        )
    found = make_session().call(report_month, month=month)
    if as_json:
        totals = (
            "usd", "node_hours", "ondemand_usd", "saved_usd", "preemptions", "steps_lost", "lost_usd",
            "forecast_error_ratio",
        )  # fmt: skip
        print_json({**to_plain(found), **{name: getattr(found, name) for name in totals}})
    if file is None:
        if not as_json:
            print_line(write_markdown(found).rstrip("\n"))
        return
    try:
        file.write_text(
            write_html(found) if file.suffix.lower() == ".html" else write_markdown(found), encoding="utf-8"
        )
    except OSError as error:
        raise UsageError(f"cannot write `{file}`: {(error.strerror or 'no access').lower()}") from None
    if not as_json:
        print_line(f"Wrote {file}")
