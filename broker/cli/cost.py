"""`broker cost`: show spending, failed attempts included."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from broker.cli import options
from broker.cli.context import make_context
from broker.cli.render import note_damage, print_json, print_line, print_table
from broker.formatting import format_usd

if TYPE_CHECKING:
    from broker.state.store import Bill, Total


PRUNED = "pruned"


class By(StrEnum):
    JOB = "job"
    CLOUD = "cloud"
    DAY = "day"


def cost(
    by: Annotated[By, typer.Option("--by", help="Group by job, cloud or day.")] = By.JOB,
    as_json: options.AsJson = False,
) -> None:
    """Show spending by job, cloud or day."""
    context = make_context()
    store = context.store
    context.keep_jobs_going()
    names = {job.id: job.name for job in store.jobs.list_lines(on_damage=note_damage)} if by is By.JOB else {}
    sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    shares = list_shares(store.bills.list(on_damage=note_damage), by, context.clock.now_s())
    for key, hours, usd in (*list_pruned(store.retention.list_totals(), by), *shares):
        sums[key] = (sums[key][0] + hours, sums[key][1] + usd)
    pruned_before_s = store.retention.get_pruned_before_s()
    pruned_before = None if pruned_before_s is None else time.strftime("%Y-%m-%d", time.localtime(pruned_before_s))
    total_usd = sum(usd for _, usd in sums.values())
    if as_json:
        rows = [{by.value: key, "node_hours": hours, "usd": usd} for key, (hours, usd) in sums.items()]
        print_json({"by": by.value, "rows": rows, "usd": total_usd, "totals_only_before": pruned_before})
        return
    if not sums:
        print_line("Nothing has been spent yet")
        return

    def label(key: str) -> str:
        name = names.get(int(key)) if by is By.JOB and key.isdigit() else None
        return f"job {key} ({name})" if name else key

    print_table(
        [by.value.upper(), "NODE HOURS", "USD"],
        [[label(key), f"{hours:.2f}", format_usd(usd)] for key, (hours, usd) in sums.items()],
        right=("NODE HOURS", "USD"),
    )
    print_line(f"Total: {format_usd(total_usd)} USD")
    if pruned_before is not None:
        print_line(f"Jobs that ended before {pruned_before} are kept as totals only (`keep_days` in config.toml)")


def list_shares(bills: Sequence[Bill], by: By, now_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield (key, node-hours, USD) of every bill; by day, split bills at midnight, local time."""
    for bill in bills:
        end_s = now_s if bill.ended_s is None else bill.ended_s
        if by is not By.DAY:
            key = bill.cloud if by is By.CLOUD else (str(bill.job_id) if bill.job_id else bill.cluster)
            yield key, *_price(bill, bill.created_s, end_s)
            continue
        start_s = bill.created_s
        while start_s < end_s:
            day = time.localtime(start_s)
            midnight_s = time.mktime((day.tm_year, day.tm_mon, day.tm_mday + 1, 0, 0, 0, 0, 0, -1))
            yield time.strftime("%Y-%m-%d", day), *_price(bill, start_s, min(end_s, midnight_s))
            start_s = midnight_s


def list_pruned(totals: Sequence[Total], by: By) -> Iterator[tuple[str, float, float]]:
    """Yield (key, node-hours, USD) of pruned jobs, whose names and days are no longer known."""
    for total in totals:
        key = {By.JOB: PRUNED, By.CLOUD: total.cloud, By.DAY: total.month}[by]
        yield key, total.node_hours, total.usd


def _price(bill: Bill, start_s: float, end_s: float) -> tuple[float, float]:
    hours = max(0.0, end_s - start_s) / 3600
    return hours, hours * bill.usd_hour
