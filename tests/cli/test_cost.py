"""Sums of bills."""

from __future__ import annotations

import time

import pytest

from broker.app.spending import Grouping, list_shares
from broker.state.clusters import Bill


def bill(created_s: float, ended_s: float | None, *, job_id: int | None = 1, cloud: str = "aws") -> Bill:
    return Bill(
        cloud=cloud, node="n", cluster="c", job_id=job_id, usd_hour=2.0, created_s=created_s, ended_s=ended_s
    )  # fmt: skip


def test_a_bill_is_split_at_midnight() -> None:
    midnight_s = time.mktime((2026, 3, 1, 0, 0, 0, 0, 0, -1))
    shares = list(list_shares([bill(midnight_s - 3600, midnight_s + 7200)], Grouping.DAY, midnight_s + 9e9))
    assert shares == [("2026-02-28", 1.0, 2.0), ("2026-03-01", 2.0, 4.0)]


@pytest.mark.parametrize(("by", "keys"), [(Grouping.JOB, ["1", "c"]), (Grouping.CLOUD, ["aws", "gcp"])])
def test_a_running_node_is_billed_up_to_now(by: Grouping, keys: list[str]) -> None:
    bills = [bill(0.0, 3600.0), bill(0.0, None, job_id=None, cloud="gcp")]
    assert list(list_shares(bills, by, 7200.0)) == [(keys[0], 1.0, 2.0), (keys[1], 2.0, 4.0)]
