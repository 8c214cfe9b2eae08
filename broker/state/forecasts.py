"""Rows of forecasts made at the submission of jobs, at most one per job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from broker.state.base import Database, read_s
from broker.types.forecasts import QUANTILES, ForecastRecord
from broker.types.outcomes import EventKind

_IN_QUEUE = (EventKind.QUEUED, EventKind.DISPLACING, EventKind.SLOT_RETURNED)  # a job without a slot


class ForecastRows:
    """Forecasts of jobs, as recorded at submission."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, job_id: int, forecast: ForecastRecord) -> None:
        """Store the forecast of a job, unless it already has one."""
        self._database.write(
            "INSERT INTO forecasts (job_id, body) VALUES (?, ?) ON CONFLICT (job_id) DO NOTHING",
            (job_id, json.dumps(asdict(forecast))),
        )

    def list(self) -> Mapping[int, ForecastRecord]:
        """Return the forecasts by job; damaged rows are omitted because nothing else depends on them."""
        rows = self._database.rows("SELECT job_id, body FROM forecasts ORDER BY job_id")
        found = {int(row["job_id"]): _read(row["body"]) for row in rows}
        return {job_id: forecast for job_id, forecast in found.items() if forecast is not None}

    def list_waits(self) -> Mapping[int, float]:
        """Return by job the seconds for which other jobs kept it from starting; jobs that never waited are omitted.

        Jobs wait until those that they need have ended, and then for a slot (`max_live_jobs`), which the next event of
        another kind shows to be taken. Waiting for a cloud's capacity does not count: forecasts include it.
        """
        waits = dict[int, float]()
        for job_id, begin_s, end_s in [*self._list_waits_for_needs(), *self._list_waits_for_slots()]:
            if end_s > begin_s:
                waits[job_id] = waits.get(job_id, 0.0) + end_s - begin_s
        return waits

    def _list_waits_for_needs(self) -> Iterator[tuple[int, float, float]]:
        rows = self._database.rows(
            "SELECT id, needs, submitted_s FROM jobs WHERE needs <> '[]' AND id IN (SELECT job_id FROM forecasts)"
        )
        if not rows:
            return
        ended = self._database.rows("SELECT id, ended_s FROM jobs WHERE ended_s IS NOT NULL")
        ended_s = {int(row["id"]): read_s(row["ended_s"]) for row in ended}
        for row in rows:
            try:
                needs = [ended_s[need] for need in json.loads(row["needs"]) if need in ended_s]
            except (ValueError, TypeError):
                continue
            yield int(row["id"]), read_s(row["submitted_s"]), max(needs, default=0.0)

    def _list_waits_for_slots(self) -> Iterator[tuple[int, float, float]]:
        kinds = tuple(kind.value for kind in _IN_QUEUE)
        marks = ", ".join("?" * len(kinds))
        rows = self._database.rows(
            "SELECT job_id, min(time_s) AS begin_s, until_s FROM (SELECT job_id, time_s, ("
            "SELECT min(later.time_s) FROM events AS later "
            f"WHERE later.job_id = events.job_id AND later.id > events.id AND later.kind NOT IN ({marks})) AS until_s "
            f"FROM events WHERE kind IN ({marks}) AND job_id IN (SELECT job_id FROM forecasts)) AS waits "
            "WHERE until_s IS NOT NULL GROUP BY job_id, until_s",
            (*kinds, *kinds),
        )
        for row in rows:
            yield int(row["job_id"]), read_s(row["begin_s"]), read_s(row["until_s"])


def _read(body: object) -> ForecastRecord | None:
    try:
        data = json.loads(str(body))
        usd, hours = (tuple(float(each) for each in data[name]) for name in ("usd", "hours"))
        if len(usd) != len(QUANTILES) or len(hours) != len(QUANTILES):
            return None
        chance, limit = data["deadline_chance"], data["deadline_hours"]
        return ForecastRecord(
            usd=usd,
            hours=hours,
            usd_mean=float(data["usd_mean"]),
            hours_mean=float(data["hours_mean"]),
            deadline_hours=None if limit is None else float(limit),
            deadline_chance=None if chance is None else float(chance),
        )
    except (ValueError, TypeError, KeyError):
        return None
