"""Who drives the jobs of this state folder: an epoch that only grows, and a beat that shows it is alive."""

from __future__ import annotations

from broker.state.base import Database, read_row


class LeaderRow:
    def __init__(self, database: Database) -> None:
        self._database = database

    def lead(self) -> int:
        """Take over: from now on every write of an earlier leader raises FencedError. Returns the epoch."""
        with self._database.transaction():
            self._database.execute("UPDATE leader SET epoch = epoch + 1, beat_s = ?", (self._database.clock.now_s(),))
            epoch = int(self._database.rows("SELECT epoch FROM leader")[0][0])
            self._database.epoch = epoch
        return epoch

    def beat(self) -> None:
        """Say that this leader lives. Raises FencedError when it leads no more."""
        self._database.write("UPDATE leader SET beat_s = ?", (self._database.clock.now_s(),), is_durable=False)

    def resign(self) -> None:
        """The next leader need not wait for the beat to go stale."""
        self._database.write("UPDATE leader SET beat_s = 0")
        self._database.epoch = None

    def measure_beat_age_s(self) -> float:
        """Seconds since the leader last showed itself; huge where there is none."""
        rows = self._database.rows("SELECT beat_s FROM leader")
        return self._database.clock.now_s() - read_row("leader", 1, lambda: float(rows[0][0] if rows else ""))
