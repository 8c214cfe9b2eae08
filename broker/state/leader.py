"""The leader, which drives the jobs of this state folder, with an epoch that only grows, and a heartbeat."""

from __future__ import annotations

from broker.state.base import Database, read_row
from broker.state.daemon_stats import DaemonStats, decode_stats

STALE_S = 15.0  # a leader without a heartbeat for this long may be replaced although it holds the lock


class LeaderRow:
    """The row of the one daemon that leads: a single row, whose epoch fences earlier leaders."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def lead(self) -> int:
        """Take over, so that later writes of an earlier leader raise FencedError; return the epoch."""
        with self._database.transaction():
            self._database.execute(
                "UPDATE leader SET epoch = epoch + 1, beat_s = ?, stats = ''", (self._database.clock.now_s(),)
            )
            epoch = int(self._database.rows("SELECT epoch FROM leader")[0][0])
            self._database.epoch = epoch
        return epoch

    def beat(self, stats: DaemonStats | None = None) -> None:
        """Record that this leader is alive, and its work so far. Raises FencedError if it no longer leads."""
        text = "" if stats is None else stats.encode()
        values = self._database.clock.now_s(), text
        self._database.write("UPDATE leader SET beat_s = ?, stats = ?", values, is_durable=False)

    def extend(self, epoch: int) -> bool:
        """Renew the heartbeat of the leader with this epoch if it is not stale; return whether it was renewed.

        Used by a second connection of the leader's process, which itself does not lead.
        """
        now_s = self._database.clock.now_s()
        done = self._database.write(
            "UPDATE leader SET beat_s = ?1 WHERE epoch = ?2 AND ?1 - beat_s <= ?3", (now_s, epoch, STALE_S),
            is_durable=False,
        )  # fmt: skip
        return done.rowcount == 1

    def resign(self) -> None:
        """Stop leading, so that the next leader does not have to wait for the heartbeat to expire."""
        self._database.write("UPDATE leader SET beat_s = 0")
        self._database.epoch = None

    def read_epoch(self) -> int:
        """Return the epoch of the newest leader; 0 if none has ever led."""
        return int(self._database.rows("SELECT epoch FROM leader")[0][0])

    def read_stats(self) -> DaemonStats | None:
        """Return what the leader reported with its newest heartbeat; None if it reported nothing."""
        rows = self._database.rows("SELECT stats FROM leader")
        return decode_stats(str(rows[0][0])) if rows else None

    def measure_beat_age_s(self) -> float:
        """Return the seconds since the leader's last heartbeat; a huge number if there is no leader."""
        rows = self._database.rows("SELECT beat_s FROM leader")
        return self._database.clock.now_s() - read_row("leader", 1, lambda: float(rows[0][0] if rows else ""))
