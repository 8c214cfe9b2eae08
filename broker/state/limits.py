"""Rows of the limits of users and projects, and of their admitted launches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum

from broker.frozen import frozen
from broker.state.base import Database, Row, read_s
from broker.state.people import Owned

EVERYONE = "*"  # as the name of a limit: of each user, or each project, without limits of its own


class LimitScope(StrEnum):
    """The subjects of a limit."""

    USER = "user"
    PROJECT = "project"


@frozen
class Limit:
    """The limits of a user or a project; None is unlimited. `usd_month` is per calendar month, local time."""

    scope: LimitScope
    name: str
    usd_month: float | None
    gpus: float | None


@frozen
class Commitment:
    """The expected cost of one admitted request. `usd` is None if the amount of work is unknown.

    `names` are the name of a cluster, the IDs of jobs, or the name and the unique ID of a service. A commitment is
    pending while its request runs, before its work is recorded, and ended once another request has replaced it.
    """

    id: int
    time_s: float
    ended_s: float | None
    is_pending: bool
    user: str
    project: str
    kind: Owned
    names: tuple[str, ...]
    usd: float | None
    usd_hour: float
    gpus: float


class LimitRows:
    """The table `limits`: one row for each user or project with a limit."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, limit: Limit) -> None:
        """Set a limit, replacing an earlier one."""
        self._database.write(
            "INSERT INTO limits (scope, name, usd_month, gpus) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (scope, name) DO UPDATE SET usd_month = excluded.usd_month, gpus = excluded.gpus",
            (limit.scope.value, limit.name, limit.usd_month, limit.gpus),
        )

    def delete(self, scope: LimitScope, name: str) -> bool:
        """Remove a limit; return whether there was one."""
        done = self._database.write("DELETE FROM limits WHERE scope = ? AND name = ?", (scope.value, name))
        return done.rowcount > 0

    def list(self) -> Sequence[Limit]:
        """List the limits by scope and name."""
        rows = self._database.rows("SELECT * FROM limits ORDER BY scope, name")
        return [
            Limit(scope=LimitScope(row["scope"]), name=row["name"], usd_month=row["usd_month"], gpus=row["gpus"])
            for row in rows
        ]


class CommitmentRows:
    """The table `commitments`: admitted launches, by request."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self, *, user: str, project: str, kind: Owned, names: Sequence[str], usd: float | None, usd_hour: float,
        gpus: float,
    ) -> int:  # fmt: skip
        """Add a pending commitment; return its ID."""
        with self._database.transaction():
            cursor = self._database.execute(
                "INSERT INTO commitments (time_s, is_pending, person, project, kind, names, usd, usd_hour, gpus) "
                "VALUES (?, 1, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
                (
                    self._database.clock.now_s(), user, project, kind.value, json.dumps(list(names)), usd, usd_hour,
                    gpus,
                ),
            )  # fmt: skip
            return int(cursor.fetchone()["id"])

    def bind(self, commitment_id: int, names: Sequence[str]) -> None:
        """Record the resources that the request has started."""
        self._database.write(
            "UPDATE commitments SET names = ? WHERE id = ?", (json.dumps(list(names)), commitment_id)
        )  # fmt: skip

    def settle(self, commitment_id: int) -> None:
        """Record that the request has ended; delete the commitment if nothing was started."""
        with self._database.transaction():
            self._database.execute("DELETE FROM commitments WHERE id = ? AND names = '[]'", (commitment_id,))
            self._database.execute("UPDATE commitments SET is_pending = 0 WHERE id = ?", (commitment_id,))

    def end(self, commitment_id: int) -> None:
        """Record that another commitment for the same cluster or service replaces this one."""
        self._database.write(
            "UPDATE commitments SET ended_s = ? WHERE id = ? AND ended_s IS NULL",
            (self._database.clock.now_s(), commitment_id),
        )

    def list(self) -> Sequence[Commitment]:
        """Return all commitments, oldest first."""
        return [_read_commitment(row) for row in self._database.rows("SELECT * FROM commitments ORDER BY id")]


def _read_commitment(row: Row) -> Commitment:
    return Commitment(
        id=row["id"], time_s=read_s(row["time_s"]), ended_s=row["ended_s"], is_pending=bool(row["is_pending"]),
        user=row["person"], project=row["project"], kind=Owned(row["kind"]), names=tuple(json.loads(row["names"])),
        usd=row["usd"], usd_hour=row["usd_hour"], gpus=row["gpus"],
    )  # fmt: skip
