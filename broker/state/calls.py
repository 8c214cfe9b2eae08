"""Rows of what calls to clouds have taught: how long answers usually take, and how many failures are still allowed."""

from __future__ import annotations

from collections.abc import Callable

from broker.nouns import noun
from broker.state.base import Database


@noun
class Pace:
    """Smoothed seconds of one kind of answer of one cloud, and how far single answers lie from it."""

    mean_s: float
    deviation_s: float


class PaceRows:
    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, cloud: str, answer: str) -> Pace | None:
        """`answer`: which of a cloud's answers, as `provision.patience` names them."""
        row = self._database.row(
            "SELECT mean_s, deviation_s FROM paces WHERE cloud = ? AND answer = ?", (cloud, answer)
        )
        return Pace(mean_s=row["mean_s"], deviation_s=row["deviation_s"]) if row else None

    def learn(self, cloud: str, answer: str, learn: Callable[[Pace | None], Pace]) -> None:
        """Commands and the daemon learn into one row: read and written in one transaction."""
        with self._database.transaction(is_durable=False):
            pace = learn(self.get(cloud, answer))
            self._database.execute(
                "INSERT OR REPLACE INTO paces (cloud, answer, mean_s, deviation_s) VALUES (?, ?, ?, ?)",
                (cloud, answer, pace.mean_s, pace.deviation_s),
            )


class RetryBudgetRows:
    """A token bucket for each cloud that all jobs and commands share: a failed call takes one, time gives them back."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, cloud: str, *, tokens_max: float, refill_s: float) -> None:
        """A call failed. `refill_s`: seconds for one token to come back."""
        with self._database.transaction(is_durable=False):
            tokens = self._count_tokens(cloud, tokens_max, refill_s)
            self._database.execute(
                "INSERT OR REPLACE INTO retry_budgets (cloud, tokens, at_s) VALUES (?, ?, ?)",
                (cloud, max(0.0, tokens - 1.0), self._database.clock.now_s()),
            )

    def measure_wait_s(self, cloud: str, *, tokens_max: float, refill_s: float) -> float:
        """Seconds until a call may be tried; 0 while there is a token left."""
        return max(0.0, 1.0 - self._count_tokens(cloud, tokens_max, refill_s)) * refill_s

    def _count_tokens(self, cloud: str, tokens_max: float, refill_s: float) -> float:
        row = self._database.row("SELECT tokens, at_s FROM retry_budgets WHERE cloud = ?", (cloud,))
        if row is None:
            return tokens_max
        passed_s = self._database.clock.now_s() - float(row["at_s"])
        if passed_s < -tokens_max * refill_s:
            return tokens_max  # written while the clock was set far ahead: waiting for that time could take days
        passed_s = max(0.0, passed_s)  # a clock that was set back a little gives nothing
        tokens = float(row["tokens"])
        return min(tokens_max, tokens + passed_s / refill_s)
