"""Rows about a server's users: tokens, the owners of clusters and jobs, and the audit of writes.

Only the SHA-256 of a token is stored: tokens are random, so a slow hash would not add security.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from broker.frozen import frozen
from broker.state.base import Database, Row, read_s


class Role(StrEnum):
    """Permissions of a token; each role includes those before it."""

    VIEWER = "viewer"  # read
    USER = "user"  # start work, and change what it owns
    ADMIN = "admin"  # change everything


class Owned(StrEnum):
    """The kinds of objects that a user owns."""

    CLUSTER = "cluster"
    JOB = "job"
    SERVICE = "service"
    SCHEDULE = "schedule"


@frozen
class Token:
    """A token without its value; `expires_s` is None if it does not expire."""

    id: int
    user: str
    role: Role
    created_s: float
    expires_s: float | None
    revoked_s: float | None
    project: str = ""


@frozen
class AuditEvent:
    """A write requested by a user; `outcome` is `started`, `done`, or the class of the error."""

    id: int
    time_s: float
    user: str
    verb: str
    target: str
    outcome: str


class TokenRows:
    """Tokens of the server's users, by digest."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, *, digest: str, user: str, role: Role, expires_s: float | None, project: str = "") -> int:
        """Add a token by its digest; return its ID."""
        with self._database.transaction():
            cursor = self._database.execute(
                "INSERT INTO tokens (digest, person, role, created_s, expires_s, project) VALUES (?, ?, ?, ?, ?, ?) "
                "RETURNING id",
                (digest, user, role.value, self._database.clock.now_s(), expires_s, project),
            )
            return int(cursor.fetchone()["id"])

    def find(self, digest: str) -> Token | None:
        """Return the token if it is valid now; None if it is unknown, expired or revoked."""
        row = self._database.row("SELECT * FROM tokens WHERE digest = ?", (digest,))
        token = _read_token(row) if row else None
        if token is None or token.revoked_s is not None:
            return None
        is_expired = token.expires_s is not None and token.expires_s <= self._database.clock.now_s()
        return None if is_expired else token

    def list(self) -> Sequence[Token]:
        """List all tokens, oldest first, including revoked and expired ones."""
        return [_read_token(row) for row in self._database.rows("SELECT * FROM tokens ORDER BY id")]

    def revoke(self, token_id: int) -> bool:
        """Revoke a token; return whether it was not revoked before. The server refuses it from the next request."""
        now_s = self._database.clock.now_s()
        done = self._database.write(
            "UPDATE tokens SET revoked_s = ? WHERE id = ? AND revoked_s IS NULL", (now_s, token_id)
        )
        return done.rowcount > 0


class OwnerRows:
    """Owners of clusters and jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, kind: Owned, name: str) -> str | None:
        """Return the owner of a cluster or a job (by id); None if it was created without a server."""
        row = self._database.row("SELECT person FROM owners WHERE kind = ? AND name = ?", (kind.value, name))
        return None if row is None else str(row["person"])

    def put(self, kind: Owned, name: str, user: str) -> None:
        """Set the owner of a cluster or job, replacing an earlier one."""
        with self._database.transaction():
            self._database.execute("DELETE FROM owners WHERE kind = ? AND name = ?", (kind.value, name))
            self._database.execute("INSERT INTO owners (kind, name, person) VALUES (?, ?, ?)", (kind.value, name, user))

    def list(self) -> Mapping[tuple[Owned, str], str]:
        """Return the owner of every cluster, by name, and every job, by ID."""
        rows = self._database.rows("SELECT kind, name, person FROM owners")
        return {(Owned(row["kind"]), str(row["name"])): str(row["person"]) for row in rows}


class AuditRows:
    """The audit log of the server."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, *, user: str, verb: str, target: str, outcome: str) -> None:
        """Append an entry with the current time."""
        self._database.write(
            "INSERT INTO audit (time_s, person, verb, target, outcome) VALUES (?, ?, ?, ?, ?)",
            (self._database.clock.now_s(), user, verb, target, outcome),
        )

    def list(
        self, *, newest: int = 100, user: str | None = None, verb: str | None = None, outcome: str | None = None
    ) -> Sequence[AuditEvent]:
        """Return the `newest` events, oldest first, optionally only those of a user, a verb or an outcome."""
        given = {"person": user, "verb": verb, "outcome": outcome}
        wanted = {column: value for column, value in given.items() if value is not None}
        where = " AND ".join(f"{column} = ?" for column in wanted)
        rows = self._database.rows(
            f"SELECT * FROM audit{' WHERE ' + where if where else ''} ORDER BY id DESC LIMIT ?",
            (*wanted.values(), newest),
        )
        return [
            AuditEvent(
                id=row["id"], time_s=read_s(row["time_s"]), user=row["person"], verb=row["verb"],
                target=row["target"], outcome=row["outcome"],
            )
            for row in rows[::-1]
        ]  # fmt: skip

    def list_newest_s(self) -> Mapping[str, float]:
        """Return the time of each user's last change."""
        rows = self._database.rows("SELECT person, MAX(time_s) AS newest_s FROM audit GROUP BY person")
        return {str(row["person"]): read_s(row["newest_s"]) for row in rows}


def _read_token(row: Row) -> Token:
    return Token(
        id=row["id"], user=row["person"], role=Role(row["role"]), created_s=read_s(row["created_s"]),
        expires_s=row["expires_s"], revoked_s=row["revoked_s"], project=row["project"],
    )  # fmt: skip
