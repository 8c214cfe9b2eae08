"""Rows about the store itself: which installation it belongs to, and which clouds it was compared with."""

from __future__ import annotations

from collections.abc import Sequence

from broker.state.base import Database

ADOPTED = "adopted:"  # with a cloud's name: nodes there that no record names were adopted, as far as there were any
SEEN = "seen:"  # with a cloud's name: when its nodes were first listed for that
RESTORED = "restored_s"
SALT = "salt"


class MetaRows:
    def __init__(self, database: Database) -> None:
        self._database = database

    _salt: str | None = None

    @property
    def lineage(self) -> str:
        return self.get("lineage") or ""

    @property
    def salt(self) -> str:
        """Part of every create token: another one after each restore and reset, as the same places and serial numbers
        may have been used by what was lost. Read once: it changes only while no other process has the store open."""
        if self._salt is None:
            self._salt = self.get(SALT) or ""
        return self._salt

    @property
    def restored_s(self) -> float:
        """When a copy was put in the place of the state file; 0 where that has never happened."""
        try:
            return float(self.get(RESTORED) or 0.0)
        except ValueError:
            return self._database.clock.now_s()  # damaged: looking at the clouds once too often costs little

    def get(self, key: str) -> str | None:
        row = self._database.row("SELECT value FROM meta WHERE key = ?", (key,))
        return str(row["value"]) if row else None

    def put(self, key: str, value: str) -> None:
        self._database.write("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, value))

    def is_adopted(self, cloud: str) -> bool:
        """Whether all nodes of ours on this cloud that run were compared with the records."""
        return self.get(f"{ADOPTED}{cloud}") is not None

    def note_listed(self, cloud: str, *, settled_after_s: float) -> bool:
        """A whole list was compared with the records: whether the first such list is so long ago that the cloud
        counts as adopted. One list may be empty or late and not say so."""
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
        self.put(f"{ADOPTED}{cloud}", repr(self._database.clock.now_s()))

    def forget_adoptions(self, *, prefixes: Sequence[str] = (ADOPTED, SEEN)) -> None:
        """After this the clouds are compared with the records again."""
        with self._database.transaction():
            for prefix in prefixes:
                self._database.execute("DELETE FROM meta WHERE substr(key, 1, ?) = ?", (len(prefix), prefix))

    def forget_half_done(self, *, attempts_skipped: int) -> None:
        """Of a copy: gangs whose start had not ended when it was made, and attempt numbers used since then."""
        with self._database.transaction():
            self._database.execute(
                "DELETE FROM clusters WHERE CASE WHEN json_valid(body) THEN json_extract(body, '$.status') END = 'INIT'"
            )
            self._database.execute("DELETE FROM intents WHERE outcome IS NULL")
            self._database.execute("UPDATE jobs SET first_attempt = first_attempt + ?", (attempts_skipped,))

    def drop_row(self, table: str, where: str, key: Sequence[str], *, with_job: Sequence[str]) -> bool:
        """`table` and `where` are ours, never a user's. Bills of a job stay: they are part of what was spent."""
        with self._database.transaction():
            for other in with_job:
                self._database.execute(f"DELETE FROM {other} WHERE job_id = ?", key)
            return self._database.execute(f"DELETE FROM {table} WHERE {where}", key).rowcount > 0
