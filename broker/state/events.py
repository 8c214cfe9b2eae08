"""Rows of events: an append-only log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from broker.frozen import frozen
from broker.state.base import TIME_S_MAX, Database, Row
from broker.types.outcomes import Event, EventData, EventKind, make_event
from broker.wording import describe_event


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

    def has_notable(self, kinds: Sequence[EventKind], *, after: int, since_s: float) -> bool:
        """Return whether an event of a job of these kinds, since that time, has an ID above `after`."""
        marks = ", ".join("?" * len(kinds))
        return bool(
            self._database.rows(
                "SELECT 1 FROM events "
                f"WHERE id > ? AND job_id IS NOT NULL AND kind IN ({marks}) AND time_s >= ? LIMIT 1",
                (after, *(kind.value for kind in kinds), since_s),
            )
        )

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
