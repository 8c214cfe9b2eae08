"""Rows of events, an append-only log, and of refusals: places that clouds refused, with times for new requests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from broker.frozen import frozen
from broker.state.base import TIME_S_MAX, Database, Row
from broker.types import Placement
from broker.types.outcomes import Event, EventData, EventKind, make_event
from broker.wording import describe_event

FORGIVEN_AFTER_S = 3600.0  # after this time without a refusal since the last one expired, the count restarts at 1
AHEAD_S_MAX = 300.0  # more than the length of a probe: clocks of controllers may differ


@frozen
class EventRow:
    """An event of a job or a cluster; IDs only grow. `message` is the event as a sentence."""

    id: int
    time_s: float
    kind: EventKind
    data: EventData
    job_id: int | None
    cluster: str | None

    @property
    def message(self) -> str:
        """The event as a sentence."""
        return describe_event(Event(kind=self.kind, data=self.data))


@frozen
class Refusal:
    """A location that must not be requested again before `expires_s`; an empty region, zone or instance type matches
    all."""

    cloud: str
    region: str
    zone: str
    instance_type: str
    is_spot: bool
    expires_s: float
    reason: str
    reask_s: float = 0.0  # after this, a launch without any other place may request it again
    probed_until_s: float = 0.0  # until then, one launch probes the placement and all others wait
    hints: tuple[str, ...] = ()  # how to resolve the refusal

    def covers(self, placement: Placement) -> bool:
        """Return whether the refusal applies to the placement; empty fields match any."""
        offer = placement.offer
        return (
            self.cloud == offer.cloud
            and self.is_spot == placement.is_spot
            and self.region in ("", offer.region)
            and self.zone in ("", offer.zone or "")
            and self.instance_type in ("", offer.instance_type)
        )


class EventRows:
    """The events of jobs and clusters, in the order in which they were recorded."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, event: Event, *, job_id: int | None = None, cluster: str | None = None) -> None:
        """Record an event with the current time."""
        data = json.dumps(event.data, ensure_ascii=False)
        self._database.write(
            "INSERT INTO events (time_s, kind, data, job_id, cluster) VALUES (?, ?, ?, ?, ?)",
            (self._database.clock.now_s(), event.kind.value, data, job_id, cluster),
        )

    def list(self, job_id: int | None = None, cluster: str | None = None, after: int = 0) -> Sequence[EventRow]:
        """Return the events of a job or cluster with an ID above `after`, oldest first."""
        wanted = {"id > ?": after, "job_id = ?": job_id, "cluster = ?": cluster}
        chosen = {condition: value for condition, value in wanted.items() if value is not None}
        rows = self._database.rows(
            f"SELECT id, time_s, kind, data, job_id, cluster FROM events WHERE {' AND '.join(chosen)} ORDER BY id",
            tuple(chosen.values()),
        )
        return [_read_event(row) for row in rows]

    def list_kind(self, *, kind: EventKind, since_s: float) -> Sequence[EventRow]:
        """Return the events of one kind since `since_s`, oldest first."""
        rows = self._database.rows(
            "SELECT id, time_s, kind, data, job_id, cluster FROM events WHERE kind = ? AND time_s >= ? ORDER BY id",
            (kind.value, since_s),
        )
        return [_read_event(row) for row in rows]

    def list_kinds(
        self, kinds: Sequence[EventKind], *, job_id: int | None = None, since_s: float = 0.0
    ) -> Sequence[EventRow]:
        """Return the events of these kinds, of one job or of all, since `since_s`, oldest first."""
        marks = ", ".join("?" * len(kinds))
        own, values = ("", ()) if job_id is None else (" AND job_id = ?", (job_id,))
        rows = self._database.rows(
            "SELECT id, time_s, kind, data, job_id, cluster FROM events "
            f"WHERE kind IN ({marks}) AND time_s >= ?{own} ORDER BY id",
            (*(kind.value for kind in kinds), since_s, *values),
        )
        return [_read_event(row) for row in rows]

    def list_after(self, kinds: Sequence[EventKind], *, after: int, limit: int) -> Sequence[EventRow]:
        """Return the oldest `limit` events of these kinds with an ID above `after`, of jobs and clusters."""
        rows = self._database.rows(
            "SELECT id, time_s, kind, data, job_id, cluster FROM events "
            f"WHERE id > ? AND kind IN ({', '.join('?' * len(kinds))}) ORDER BY id LIMIT ?",
            (after, *(kind.value for kind in kinds), limit),
        )
        return [_read_event(row) for row in rows]

    def list_notable(self, kinds: Sequence[EventKind], *, after: int, limit: int) -> Sequence[EventRow]:
        """Return the oldest `limit` events of jobs of these kinds with an ID above `after`.

        Later calls do not miss any: writing transactions run one at a time, so IDs grow in the order of commits.
        """
        marks = ", ".join("?" * len(kinds))
        rows = self._database.rows(
            "SELECT id, time_s, kind, data, job_id, cluster FROM events "
            f"WHERE id > ? AND job_id IS NOT NULL AND kind IN ({marks}) ORDER BY id LIMIT ?",
            (after, *(kind.value for kind in kinds), limit),
        )
        return [_read_event(row) for row in rows]

    def list_newest(self, job_ids: Sequence[int], *, kinds: Sequence[EventKind] = ()) -> Mapping[int, EventRow]:
        """Return the newest event of each of these jobs; with `kinds`, only if it is of one of these kinds."""
        if not job_ids:
            return {}
        marks = ", ".join("?" * len(job_ids))
        rows = self._database.rows(
            "SELECT id, time_s, kind, data, job_id, cluster FROM events WHERE id IN "
            f"(SELECT max(id) FROM events WHERE job_id IN ({marks}) GROUP BY job_id)"
            + (f" AND kind IN ({', '.join('?' * len(kinds))})" if kinds else ""),
            (*job_ids, *(kind.value for kind in kinds)),
        )
        return {event.job_id: event for event in map(_read_event, rows) if event.job_id is not None}

    def get_newest_id(self, job_id: int | None = None) -> int:
        """Return the ID of the newest event, of one job or of all; 0 without events. IDs only grow."""
        where, parameters = ("", ()) if job_id is None else (" WHERE job_id = ?", (job_id,))
        return int(self._database.rows(f"SELECT coalesce(max(id), 0) FROM events{where}", parameters)[0][0])

    def list_newest_ids(self, job_ids: Sequence[int], *, after: int) -> Mapping[int, int]:
        """Return the ID of the newest event of each of these jobs, if it is above `after`."""
        if not job_ids:
            return {}
        rows = self._database.rows(
            f"SELECT job_id, max(id) AS newest FROM events WHERE job_id IN ({', '.join('?' * len(job_ids))}) "
            "AND id > ? GROUP BY job_id",
            (*job_ids, after),
        )
        return {int(row["job_id"]): int(row["newest"]) for row in rows}


def _read_event(row: Row) -> EventRow:
    """Read an event; from a damaged row, read as much as possible, so that it does not hide other events."""
    event = _decode(row["kind"], row["data"])
    return EventRow(
        id=int(row["id"]),
        time_s=row["time_s"] if isinstance(row["time_s"], float) and abs(row["time_s"]) < TIME_S_MAX else 0.0,
        kind=event.kind,
        data=event.data,
        job_id=row["job_id"],
        cluster=row["cluster"],
    )


def _decode(kind: object, data: object) -> Event:
    try:
        found = json.loads(str(data))
        if isinstance(found, dict):
            return Event(kind=EventKind(str(kind)), data=found)
    except ValueError:
        pass
    return make_event(EventKind.NOTE, text=f"{kind}: {data}")


class RefusalRows:
    """The refusals of clouds, shared by all searches until they expire."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self,
        cloud: str,
        region: str,
        zone: str | None,
        instance_type: str,
        is_spot: bool,
        lasts_s: float,
        reason: str,
        *,
        hints: Sequence[str] = (),
        lasts_s_max: float | None = None,
        reask_after_s: float = math.inf,
        reask_after_s_max: float = math.inf,
    ) -> None:
        """Record a refusal; an empty `region`, `zone` or `instance_type` matches all of them.


        After `reask_after_s`, which grows by half each time, a launch without any other place may request it again.
        This is a circuit breaker: a refusal soon after the previous one lasts twice as long, up to `lasts_s_max`; once
        it has expired, one launch is let through. A request sent before the previous refusal was known counts as part
        of that refusal.
        """
        key = (cloud, region, zone or "", instance_type, is_spot)
        where = "cloud = ? AND region = ? AND zone = ? AND instance_type = ? AND is_spot = ?"
        now_s = self._database.clock.now_s()
        with self._database.transaction():
            known = self._database.row(f"SELECT count, expires_s, reask_s FROM refusals WHERE {where}", key)
            count = 1
            if known is not None and now_s < known["expires_s"] + FORGIVEN_AFTER_S:
                count = known["count"] + int(now_s >= known["reask_s"])
            held_s = min(lasts_s * 2.0 ** (count - 1), max(lasts_s, lasts_s_max or lasts_s))
            pause_s = min(held_s, reask_after_s_max, reask_after_s * 1.5 ** min(count - 1, 40))
            self._database.execute(
                "INSERT INTO refusals (cloud, region, zone, instance_type, is_spot, expires_s, reason, "
                "count, reask_s, hints, refused_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (cloud, region, zone, instance_type, is_spot) DO UPDATE SET "
                "expires_s = excluded.expires_s, reason = excluded.reason, count = excluded.count, "
                "reask_s = excluded.reask_s, hints = excluded.hints, refused_s = excluded.refused_s, "
                "probed_until_s = 0.0",
                (*key, now_s + held_s, reason, count, now_s + pause_s, json.dumps(list(hints)), now_s),
            )

    def forgive(self, placement: Placement) -> None:
        """Delete the refusals that cover a placement because it provided a whole gang."""
        self._database.write(f"DELETE FROM refusals WHERE {_COVERING}", _read_place(placement))

    def begin_probe(self, placement: Placement, *, lasts_s: float) -> None:
        """Half-open the circuit breaker: during one probe, the place is refused for other launches, even after expiry.

        The probe ends with a call of `forgive` or `add`; a process that dies in between blocks the others for at most
        `lasts_s`.
        """
        now_s = self._database.clock.now_s()
        where = f"{_COVERING} AND expires_s > ?"
        bounds = (*_read_place(placement), now_s - FORGIVEN_AFTER_S)
        if self._database.rows(f"SELECT 1 FROM refusals WHERE {where}", bounds):
            self._database.write(f"UPDATE refusals SET probed_until_s = ? WHERE {where}", (now_s + lasts_s, *bounds))

    def list_active(self, now_s: float) -> Sequence[Refusal]:
        """List refusals that are active or being probed at `now_s`, earliest expiry first.

        Refusals and probes from the future are omitted: the clock was set back since, which would prolong them.
        """
        latest_s = now_s + AHEAD_S_MAX
        rows = self._database.rows(
            "SELECT cloud, region, zone, instance_type, is_spot, expires_s, reason, reask_s, probed_until_s, hints "
            "FROM refusals WHERE refused_s <= ?2 AND (expires_s > ?1 OR probed_until_s > ?1 AND probed_until_s <= ?2) "
            "ORDER BY expires_s",
            (now_s, latest_s),
        )
        return [
            Refusal(
                cloud=row["cloud"], region=row["region"], zone=row["zone"], instance_type=row["instance_type"],
                is_spot=bool(row["is_spot"]), expires_s=row["expires_s"], reason=row["reason"],
                reask_s=row["reask_s"],
                probed_until_s=row["probed_until_s"] if row["probed_until_s"] <= latest_s else 0.0,
                hints=() if row["hints"] == "[]" else tuple(json.loads(row["hints"])),
            )
            for row in rows
        ]  # fmt: skip


# The same condition as `Refusal.covers`, in SQL.
_COVERING = "cloud = ? AND is_spot = ? AND region IN ('', ?) AND zone IN ('', ?) AND instance_type IN ('', ?)"


def _read_place(placement: Placement) -> tuple[object, ...]:
    offer = placement.offer
    return offer.cloud, placement.is_spot, offer.region, offer.zone or "", offer.instance_type
