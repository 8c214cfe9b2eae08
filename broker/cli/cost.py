"""`broker cost`: show spending, failed attempts included."""

from __future__ import annotations

from typing import Annotated

import typer

from broker.app.spending import Grouping
from broker.app.verbs.account import show_cost
from broker.cli import options
from broker.cli.context import make_session
from broker.cli.render import print_json, print_line, print_table
from broker.formatting import format_date, format_usd, to_plain


def cost(
    by: Annotated[Grouping, typer.Option("--by", help="Group by job, cloud, day, user or project.")] = Grouping.JOB,
    forecast: Annotated[
        bool, typer.Option("--forecast", help="Compare ended jobs with the forecast made when they were submitted.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show spending by job, cloud, day, user or project."""
    if forecast:
        from broker.cli.forecast_score import show_judged

        show_judged(make_session(), as_json=as_json)
        return
    bill = make_session().call(show_cost, by=by)
    names, spending = bill.names, bill.spending
    sums, before_s = spending.rows, spending.pruned_before_s
    pruned_before = None if before_s is None else format_date(before_s)
    if as_json:
        rows = [{by.value: key, "node_hours": hours, "usd": usd} for key, (hours, usd) in sums.items()]
        data = {"by": by.value, "rows": rows, "usd": spending.usd, "totals_only_before": pruned_before}
        print_json({**data, "shares": to_plain(bill.shares)} if by is Grouping.DAY else data)
        return
    if not sums:
        print_line("Nothing has been spent yet")
        return

    def label(key: str) -> str:
        name = names.get(int(key)) if by is Grouping.JOB and key.isdigit() else None
        return f"job {key} ({name})" if name else key

    print_table(
        [by.value.upper(), "NODE HOURS", "USD"],
        [[label(key), f"{hours:.2f}", format_usd(usd)] for key, (hours, usd) in sums.items()],
        right=("NODE HOURS", "USD"),
    )
    print_line(f"Total: {format_usd(spending.usd)} USD")
    if pruned_before is not None:
        print_line(f"Jobs that ended before {pruned_before} are included as totals only (`keep_days` in config.toml)")
