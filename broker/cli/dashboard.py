"""`broker dashboard` and `broker top`: jobs, clusters and cost in a browser and in a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli import options, terminal
from broker.cli.context import make_context, make_session
from broker.cli.render import format_table, print_json, print_line, print_note, show_usage
from broker.clock import pause
from broker.config import find_login
from broker.dashboard.model import Overview, measure_rate_usd_hour
from broker.dashboard.verbs import show_overview
from broker.errors import UsageError
from broker.formatting import format_duration, format_time_of_day, format_usd, to_plain

if TYPE_CHECKING:
    from broker.app.session import Session

HOST = "127.0.0.1"
WATCH_S = 2.0
ROWS = 15


def dashboard(
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port to listen on (0: any free one).")
    ] = 8470,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Show jobs, clusters and cost in a browser.

    Listens on 127.0.0.1 only. The printed link works once. Ctrl-C stops the dashboard; jobs continue. After
    `broker login`, the command opens the server's pages instead.
    """
    if (login := find_login()) is not None:
        _open_server(login, is_opening=open_browser)
        return
    try:
        from broker.dashboard.server import serve
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the dashboard requires `{error.name}`", hints=["install it: `pip install 'intercloud-broker[serve]'`"]
        ) from None
    context = make_context()

    def show_link(link: str) -> None:
        print_line(f"Dashboard: {link}")
        print_note("press Ctrl-C to stop it; jobs continue")
        if open_browser:
            import webbrowser

            webbrowser.open(link)

    try:
        asyncio.run(serve(context, host=HOST, port=port, on_ready=show_link, until=asyncio.Event().wait))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot listen on {HOST}:{port}: {reason}", hints=["choose another port: `broker dashboard --port 0`"]
        ) from None


def _open_server(path: Path, *, is_opening: bool) -> None:
    """Print and open the pages of the server that the user is logged in to."""
    from broker.client.login import read_login

    login = read_login(path)
    print_line(f"Dashboard: {login.url}")
    print_note("log in there with the token that you gave to `broker login`")
    if login.fingerprint is not None:
        print_note(f"the certificate that your browser must show: {login.fingerprint}")
    if is_opening:
        import webbrowser

        webbrowser.open(login.url)


def top(as_json: options.AsJson = False) -> None:
    """Show spending, jobs and clusters, refreshed every two seconds."""
    session = make_session()
    if as_json:
        print_json(describe_overview(session.call(show_overview)))
        return
    try:
        _watch(session)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _watch(session: Session) -> None:
    """Redraw one view on a terminal; print it once in a pipe."""
    with terminal.show_view() as view:
        if view is None:
            for line in list_lines(session.call(show_overview)):
                print_line(line)
            return
        while True:
            view.show(list_lines(session.call(show_overview)))
            pause(WATCH_S)


def describe_overview(overview: Overview) -> dict[str, object]:
    """Make the overview JSON-ready."""
    return {
        **to_plain(overview),
        "jobs": [
            {
                **to_plain(row.line), "spent_usd": row.spent_usd, "budget_usd": row.budget_usd,
                "usage": row.usage and to_plain(row.usage),
            }
            for row in overview.jobs
        ],
        "live_jobs": overview.live_count,
    }  # fmt: skip


def list_lines(overview: Overview) -> Sequence[str]:
    """List the lines of the view, 80 columns wide."""
    stamp = format_time_of_day(overview.now_s)
    lines = [
        f"{stamp}  {format_usd(overview.usd_hour)} USD/h now, {format_usd(overview.today_usd)} USD today, "
        f"{format_usd(overview.month_usd)} this month ({format_usd(overview.month_ondemand_usd or 0.0)} on-demand)",
        "",
    ]
    if overview.attention:
        cells = [[str(row.job_id), row.name[:16], row.reason[:54]] for row in overview.attention[:ROWS]]
        lines += format_table(["JOB", "NAME", "REQUIRES ATTENTION"], cells, right=("JOB",))
        if (more := len(overview.attention) - len(cells)) > 0:
            lines.append(f"... and {more} more that require attention")
        lines.append("")
    if services := overview.failed_services:
        cells = [[name, reason[:60]] for name, reason in services.items()]
        lines += [*format_table(["SERVICE", "REQUIRES ATTENTION"], cells[:ROWS]), ""]
    rows = [
        [
            str(row.line.id), row.line.name[:20], row.line.status.value,
            "-" if row.line.step is None else f"{row.line.step}/{row.line.total or '?'}",
            str(max(0, row.line.starts - 1)),
            format_duration((row.line.ended_s or overview.now_s) - row.line.submitted_s), *show_usage(row.usage),
            format_usd(row.spent_usd),
        ]
        for row in overview.jobs[:ROWS]
    ]  # fmt: skip
    heads = ["JOB", "NAME", "STATUS", "STEP", "RECOVERIES", "TIME", "CPU", "GPU", "USD"]
    right = ("JOB", *heads[3:])
    lines += format_table(heads, rows, right=right) if rows else ["No managed jobs"]
    if (hidden := overview.job_count - len(rows)) > 0:
        lines.append(f"... and {hidden} more; show them with `broker jobs queue --all`")
    if overview.clusters:
        cells = [
            [each.name[:24], each.status.value, each.placement.offer.cloud, format_usd(measure_rate_usd_hour(each)),
             format_usd(overview.cluster_usd[each.name])]
            for each in overview.clusters[:ROWS]
        ]  # fmt: skip
        lines += ["", *format_table(["CLUSTER", "STATUS", "CLOUD", "USD/h", "USD"], cells, right=("USD/h", "USD"))]
    return lines
