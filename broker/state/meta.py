"""Rows about the store itself: the installation that it belongs to, and the clouds that it was compared with."""

from __future__ import annotations

from collections.abc import Sequence

from broker.state.base import Database

ADOPTED = "adopted:"  # followed by a cloud's name: any nodes there without a record were adopted
SEEN = "seen:"  # followed by a cloud's name: time when its nodes were first listed for that purpose
RESTORED = "restored_s"
SALT = "salt"


class MetaRows:
    """Facts about the store itself, by key."""

    def __init__(self, database: Database) -> None:
        self._database = database

    _salt: str | None = None

    @property
    def lineage(self) -> str:
        """The ID that all copies of this store share; "" before it is drawn."""
        return self.get("lineage") or ""

    @property
    def salt(self) -> str:
        """Part of every create token.

        Each restore and reset changes it, because the lost state may have used the same places and serial numbers. Read
        once, because it only changes while no other process has the store open.
        """
        if self._salt is None:
            self._salt = self.get(SALT) or ""
        return self._salt

    @property
    def restored_s(self) -> float:
        """Time when a copy last replaced the state file; 0 if that has never happened."""
        try:
            return float(self.get(RESTORED) or 0.0)
        except ValueError:
            return self._database.clock.now_s()  # damaged: comparing with the clouds once more is cheap

    @property
    def is_of_server(self) -> bool:
        """Whether a server has used this store, for any number of users: it has tokens or, without them, an audit."""
        found = self._database.row("SELECT 1 FROM tokens UNION ALL SELECT 1 FROM audit LIMIT 1")
        return found is not None

    def get(self, key: str) -> str | None:
        """Return a value; None if it was never set."""
        row = self._database.row("SELECT value FROM meta WHERE key = ?", (key,))
        return str(row["value"]) if row else None

    def put(self, key: str, value: str) -> None:
        """Set a value, replacing an earlier one."""
        self._database.write(
            "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (key, value),
        )

    def is_adopted(self, cloud: str) -> bool:
        """Return whether all our running nodes on this cloud were compared with the records."""
        return self.get(f"{ADOPTED}{cloud}") is not None

    def note_listed(self, cloud: str, *, settled_after_s: float) -> bool:
        """Record that a whole list of nodes was compared with the records; return whether the cloud is now adopted.

        This requires a second list, at least `settled_after_s` after the first, because a single list may silently be
        empty or outdated.
        """
        now_s = self._database.clock.now_s()
        with self._database.transaction():
            first = self.get(f"{SEEN}{cloud}")
            age_s = -1.0 if first is None else now_s - float(first)
            if age_s < 0.0:  # the first one, or the wall clock was set back since
                self.put(f"{SEEN}{cloud}", repr(now_s))
                return False
            if age_s < settled_after_s:
                return False
            self.mark_adopted(cloud)
        return True

    def mark_adopted(self, cloud: str) -> None:
        """Record that a cloud was listed completely after a restore."""
        self.put(f"{ADOPTED}{cloud}", repr(self._database.clock.now_s()))

    def forget_adoptions(self, *, prefixes: Sequence[str] = (ADOPTED, SEEN)) -> None:
        """Forget the adoptions, so that the clouds are compared with the records again."""
        with self._database.transaction():
            for prefix in prefixes:
                self.forget(prefix)

    def forget(self, prefix: str) -> None:
        """Delete the values whose keys begin with `prefix`."""
        self._database.write("DELETE FROM meta WHERE substr(key, 1, ?) = ?", (len(prefix), prefix))

    def forget_half_done(self, *, attempts_skipped: int) -> None:
        """Forget, in a copy, gangs that were starting when it was made, and skip attempt numbers used since then."""
        with self._database.transaction():
            self._database.execute(
                "DELETE FROM clusters WHERE CASE WHEN json_valid(body) THEN json_extract(body, '$.status') END = 'INIT'"
            )
            self._database.execute("DELETE FROM intents WHERE outcome IS NULL")
            self._database.execute("UPDATE jobs SET first_attempt = first_attempt + ?", (attempts_skipped,))

    def drop_row(self, table: str, where: str, key: Sequence[str], *, with_job: Sequence[str]) -> bool:
        """Delete a row and, in the tables `with_job`, the rows of the same job; return whether it existed.

        `table` and `where` come from our code, never from a user. A job's bills are kept because they are part of the
        total cost.
        """
        with self._database.transaction():
            for other in with_job:
                self._database.execute(f"DELETE FROM {other} WHERE job_id = ?", key)
            return self._database.execute(f"DELETE FROM {table} WHERE {where}", key).rowcount > 0
