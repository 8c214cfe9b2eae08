"""Spending by job, cloud, day, user or project, from the bills of all nodes and the totals of pruned jobs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from broker.app.payers import Payer, find_payers
from broker.errors import DamagedRowError
from broker.frozen import frozen

if TYPE_CHECKING:
    from broker.state.clusters import Bill
    from broker.state.retention import Total
    from broker.state.store import Store

PRUNED = "pruned"


class Grouping(StrEnum):
    """The key by which costs are grouped."""

    JOB = "job"
    CLOUD = "cloud"
    DAY = "day"
    USER = "user"  # of a server
    PROJECT = "project"


@frozen
class Spending:
    """Node-hours and USD by key; `pruned_before_s` is None if every job is recorded.

    A key is a job ID or a cluster, a cloud, a day, a user or a project.
    """

    rows: Mapping[str, tuple[float, float]]
    pruned_before_s: float | None

    @property
    def usd(self) -> float:
        """Total of all rows in USD."""
        return sum(usd for _, usd in self.rows.values())


def read_spending(
    store: Store, by: Grouping, now_s: float, *, on_damage: Callable[[DamagedRowError], None] | None = None
) -> Spending:
    """Sum all bills up to now; days are in local time."""
    sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    bills = store.bills.list(on_damage=on_damage)
    if by in (Grouping.USER, Grouping.PROJECT):
        shares = list_payer_shares(bills, find_payers(store, bills), by, now_s)
    else:
        shares = list_shares(bills, by, now_s)
    for key, hours, usd in (*list_pruned(store.retention.list_totals(), by), *shares):
        sums[key] = (sums[key][0] + hours, sums[key][1] + usd)
    return Spending(rows=dict(sums), pruned_before_s=store.retention.get_pruned_before_s())


def list_shares(bills: Sequence[Bill], by: Grouping, now_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield (key, node-hours, USD) of every bill; by day, split bills at midnight, local time."""
    for bill in bills:
        end_s = now_s if bill.ended_s is None else bill.ended_s
        if by is not Grouping.DAY:
            key = bill.cloud if by is Grouping.CLOUD else (str(bill.job_id) if bill.job_id else bill.cluster)
            yield key, *_price(bill, bill.created_s, end_s)
            continue
        start_s = bill.created_s
        while start_s < end_s:
            day = time.localtime(start_s)
            midnight_s = time.mktime((day.tm_year, day.tm_mon, day.tm_mday + 1, 0, 0, 0, 0, 0, -1))
            yield time.strftime("%Y-%m-%d", day), *_price(bill, start_s, min(end_s, midnight_s))
            start_s = midnight_s


def list_payer_shares(
    bills: Sequence[Bill], payers: Mapping[tuple[str, str], Payer], by: Grouping, now_s: float
) -> Iterator[tuple[str, float, float]]:
    """Yield (user or project, node-hours, USD) of every bill."""
    for bill in bills:
        payer = payers[bill.cloud, bill.node]
        end_s = now_s if bill.ended_s is None else bill.ended_s
        yield payer.user if by is Grouping.USER else payer.project, *_price(bill, bill.created_s, end_s)


def list_pruned(totals: Sequence[Total], by: Grouping) -> Iterator[tuple[str, float, float]]:
    """Yield (key, node-hours, USD) of pruned jobs, whose names and days are no longer known."""
    for total in totals:
        key = {Grouping.CLOUD: total.cloud, Grouping.DAY: total.month}.get(by, PRUNED)
        yield key, total.node_hours, total.usd


def _price(bill: Bill, start_s: float, end_s: float) -> tuple[float, float]:
    hours = max(0.0, end_s - start_s) / 3600
    return hours, hours * bill.usd_hour


@frozen
class Share:
    """Spending of a job, or of a cluster without one, at one cloud on one local day. `owner`: job ID or name."""

    day: str
    cloud: str
    owner: str
    user: str
    project: str
    node_hours: float
    usd: float


def list_day_shares(bills: Sequence[Bill], payers: Mapping[tuple[str, str], Payer], now_s: float) -> Sequence[Share]:
    """Sum bills by day, cloud, job and payer, the newest day first; of a day, the highest cost first.

    `payers` are those of `find_payers`. Pruned jobs are omitted because their days are no longer known.
    """
    sums: dict[tuple[str, str, str, Payer], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for bill in bills:
        owner, payer = str(bill.job_id) if bill.job_id else bill.cluster, payers[bill.cloud, bill.node]
        for day, hours, usd in list_shares([bill], Grouping.DAY, now_s):
            known = sums[day, bill.cloud, owner, payer]
            sums[day, bill.cloud, owner, payer] = (known[0] + hours, known[1] + usd)
    found = [
        Share(day=day, cloud=cloud, owner=owner, user=payer.user, project=payer.project, node_hours=hours, usd=usd)
        for (day, cloud, owner, payer), (hours, usd) in sums.items()
    ]
    return sorted(sorted(found, key=lambda each: -each.usd), key=lambda each: each.day, reverse=True)


def read_day_shares(
    store: Store, now_s: float, *, on_damage: Callable[[DamagedRowError], None] | None = None
) -> Sequence[Share]:
    """Sum all bills up to now by day, cloud, job and payer."""
    bills = store.bills.list(on_damage=on_damage)
    return list_day_shares(bills, find_payers(store, bills), now_s)
