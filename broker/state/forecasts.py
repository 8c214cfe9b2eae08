"""Rows of forecasts made at the submission of jobs, at most one per job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from broker.state.base import Database
from broker.types.forecasts import QUANTILES, ForecastRecord


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
