"""Rows of events, the append-only story of what happened, and of refusals, what clouds said no to and until when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from broker.state.database import Database
from broker.types import Placement


@dataclass(frozen=True, kw_only=True)
class Event:
    """One plain sentence about a job or a cluster; ids only grow."""

    id: int
    time_s: float
    kind: str
    message: str
    job_id: int | None
    cluster: str | None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A place not to ask again before `expires_s`. Empty region, zone or instance type: all of them."""

    cloud: str
    region: str
    zone: str
    instance_type: str
    is_spot: bool
    expires_s: float
    reason: str

    def covers(self, placement: Placement) -> bool:
        offer = placement.offer
        return (
            self.cloud == offer.cloud
            and self.is_spot == placement.is_spot
            and self.region in ("", offer.region)
            and self.zone in ("", offer.zone or "")
            and self.instance_type in ("", offer.instance_type)
        )


class EventRows(Database):
    def add_event(self, kind: str, message: str, *, job_id: int | None = None, cluster: str | None = None) -> None:
        self._write(
            "INSERT INTO events (time_s, kind, message, job_id, cluster) VALUES (?, ?, ?, ?, ?)",
            (self.clock.now_s(), kind, message, job_id, cluster),
        )

    def list_events(self, job_id: int | None = None, cluster: str | None = None, after: int = 0) -> Sequence[Event]:
        rows = self._rows(
            "SELECT id, time_s, kind, message, job_id, cluster FROM events "
            "WHERE id > ?1 AND (?2 IS NULL OR job_id = ?2) AND (?3 IS NULL OR cluster = ?3) ORDER BY id",
            (after, job_id, cluster),
        )
        return [Event(**dict(row)) for row in rows]


class RefusalRows(Database):
    def add_refusal(
        self,
        cloud: str,
        region: str,
        zone: str | None,
        instance_type: str,
        is_spot: bool,
        expires_s: float,
        reason: str,
    ) -> None:
        """Empty `region`, `zone` or `instance_type` refuses all of them."""
        self._write(
            "INSERT OR REPLACE INTO refusals (cloud, region, zone, instance_type, is_spot, expires_s, reason) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (cloud, region, zone or "", instance_type, is_spot, expires_s, reason),
        )

    def active_refusals(self, now_s: float) -> Sequence[Refusal]:
        rows = self._rows("SELECT * FROM refusals WHERE expires_s > ? ORDER BY expires_s", (now_s,))
        return [Refusal(**{**dict(row), "is_spot": bool(row["is_spot"])}) for row in rows]
