"""Rows of events, the append-only story of what happened, and of refusals, what clouds said no to and until when."""

from __future__ import annotations

from collections.abc import Sequence

from broker.nouns import noun
from broker.state.database import Database
from broker.state.schema import KEPT_DAYS
from broker.types import Placement

FORGIVEN_AFTER_S = 3600.0  # a place that was silent for so long after a refusal starts anew


@noun
class Event:
    """One plain sentence about a job or a cluster; ids only grow."""

    id: int
    time_s: float
    kind: str
    message: str
    job_id: int | None
    cluster: str | None


@noun
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


class Compaction(Database):
    def compact(self) -> None:
        """Forget what nobody will ask for: the file does not grow for ever. Bills stay."""
        before_s = self.clock.now_s() - KEPT_DAYS * 86400
        with self.transaction():
            self._execute(
                "DELETE FROM events WHERE time_s < ?1 AND time_s < unixepoch() - ?2 * 86400 AND "
                "(job_id IS NULL OR job_id IN (SELECT id FROM jobs WHERE is_terminal))",
                (before_s, KEPT_DAYS),
            )
            self._execute(
                "DELETE FROM intents WHERE closed_s < ? AND cluster NOT IN (SELECT name FROM clusters)", (before_s,)
            )
            self._execute("DELETE FROM refusals WHERE expires_s < ?", (before_s,))


class RefusalRows(Database):
    def add_refusal(
        self,
        cloud: str,
        region: str,
        zone: str | None,
        instance_type: str,
        is_spot: bool,
        lasts_s: float,
        reason: str,
        *,
        lasts_s_max: float | None = None,
    ) -> None:
        """Empty `region`, `zone` or `instance_type` refuses all of them.

        A circuit breaker: each refusal soon after the last one holds twice as long, up to `lasts_s_max`; once it
        has expired, one try is let through.
        """
        key = (cloud, region, zone or "", instance_type, is_spot)
        where = "cloud = ? AND region = ? AND zone = ? AND instance_type = ? AND is_spot = ?"
        now_s = self.clock.now_s()
        with self.transaction():
            known = self._row(f"SELECT count, expires_s FROM refusals WHERE {where}", key)
            is_again = known is not None and now_s < known["expires_s"] + FORGIVEN_AFTER_S
            count = known["count"] + 1 if known is not None and is_again else 1
            held_s = min(lasts_s * 2.0 ** (count - 1), max(lasts_s, lasts_s_max or lasts_s))
            self._execute(
                "INSERT OR REPLACE INTO refusals (cloud, region, zone, instance_type, is_spot, expires_s, reason, "
                "count) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*key, now_s + held_s, reason, count),
            )

    def forgive(self, placement: Placement) -> None:
        """It gave a whole gang: earlier refusals there count no more."""
        offer = placement.offer
        self._write(
            "DELETE FROM refusals WHERE cloud = ? AND region = ? AND zone IN ('', ?) AND instance_type = ? "
            "AND is_spot = ?",
            (offer.cloud, offer.region, offer.zone or "", offer.instance_type, placement.is_spot),
        )

    def active_refusals(self, now_s: float) -> Sequence[Refusal]:
        rows = self._rows("SELECT * FROM refusals WHERE expires_s > ? ORDER BY expires_s", (now_s,))
        return [
            Refusal(
                cloud=row["cloud"], region=row["region"], zone=row["zone"], instance_type=row["instance_type"],
                is_spot=bool(row["is_spot"]), expires_s=row["expires_s"], reason=row["reason"],
            )
            for row in rows
        ]  # fmt: skip
