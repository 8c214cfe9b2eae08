"""The leader, which drives the jobs of this state folder, with an epoch that only grows, and a heartbeat."""

from __future__ import annotations

from broker.state.base import Database, read_row

STALE_S = 15.0  # a leader without a heartbeat for this long may be replaced although it holds the lock


class LeaderRow:
    """The row of the one daemon that leads: a single row, whose epoch fences earlier leaders."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def lead(self) -> int:
        """Take over, so that later writes of an earlier leader raise FencedError; return the epoch."""
        with self._database.transaction():
            self._database.execute("UPDATE leader SET epoch = epoch + 1, beat_s = ?", (self._database.clock.now_s(),))
            epoch = int(self._database.rows("SELECT epoch FROM leader")[0][0])
            self._database.epoch = epoch
        return epoch

    def beat(self) -> None:
        """Record that this leader is alive. Raises FencedError if it no longer leads."""
        self._database.write("UPDATE leader SET beat_s = ?", (self._database.clock.now_s(),), is_durable=False)

    def resign(self) -> None:
        """Stop leading, so that the next leader does not have to wait for the heartbeat to expire."""
        self._database.write("UPDATE leader SET beat_s = 0")
        self._database.epoch = None

    def measure_beat_age_s(self) -> float:
        """Return the seconds since the leader's last heartbeat; a huge number if there is no leader."""
        rows = self._database.rows("SELECT beat_s FROM leader")
        return self._database.clock.now_s() - read_row("leader", 1, lambda: float(rows[0][0] if rows else ""))
