"""Rows about calls to clouds: the usual response times, and the number of failures that are still allowed."""

from __future__ import annotations

from collections.abc import Callable

from broker.frozen import frozen
from broker.state.base import Database


@frozen
class ResponseTime:
    """The smoothed response time of a cloud for one kind of call, and the mean deviation from it, both in seconds."""

    mean_s: float
    deviation_s: float


class ResponseTimeRows:
    """Learned response times, one row for each cloud and kind of answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, cloud: str, answer: str) -> ResponseTime | None:
        """Return the response time of a cloud for one kind of answer: a value of `provision.hedge_timer.Answer`."""
        row = self._database.row(
            "SELECT mean_s, deviation_s FROM paces WHERE cloud = ? AND answer = ?", (cloud, answer)
        )
        return ResponseTime(mean_s=row["mean_s"], deviation_s=row["deviation_s"]) if row else None

    def update(self, cloud: str, answer: str, compute: Callable[[ResponseTime | None], ResponseTime]) -> None:
        """Update a response time with `compute`, in one transaction, because commands and the daemon share the row."""
        with self._database.transaction(is_durable=False):
            response_time = compute(self.get(cloud, answer))
            self._database.execute(
                "INSERT INTO paces (cloud, answer, mean_s, deviation_s) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (cloud, answer) "
                "DO UPDATE SET mean_s = excluded.mean_s, deviation_s = excluded.deviation_s",
                (cloud, answer, response_time.mean_s, response_time.deviation_s),
            )


class RetryBudgetRows:
    """A token bucket per cloud, shared by all jobs and commands: a failed call takes a token, and time refills it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, cloud: str, *, tokens_max: float, refill_s: float) -> None:
        """Take a token for a failed call. One token is refilled every `refill_s` seconds."""
        with self._database.transaction(is_durable=False):
            tokens = self._count_tokens(cloud, tokens_max, refill_s)
            self._database.execute(
                "INSERT INTO retry_budgets (cloud, tokens, at_s) VALUES (?, ?, ?) "
                "ON CONFLICT (cloud) DO UPDATE SET tokens = excluded.tokens, at_s = excluded.at_s",
                (cloud, max(0.0, tokens - 1.0), self._database.clock.now_s()),
            )

    def measure_wait_s(self, cloud: str, *, tokens_max: float, refill_s: float) -> float:
        """Return the seconds until a call may be retried; 0 while a token remains."""
        return max(0.0, 1.0 - self._count_tokens(cloud, tokens_max, refill_s)) * refill_s

    def _count_tokens(self, cloud: str, tokens_max: float, refill_s: float) -> float:
        row = self._database.row("SELECT tokens, at_s FROM retry_budgets WHERE cloud = ?", (cloud,))
        if row is None:
            return tokens_max
        passed_s = self._database.clock.now_s() - float(row["at_s"])
        if passed_s < -tokens_max * refill_s:
            return tokens_max  # written while the clock was far ahead: waiting for that time could take days
        passed_s = max(0.0, passed_s)  # a clock that was set back slightly refills nothing
        tokens = float(row["tokens"])
        return min(tokens_max, tokens + passed_s / refill_s)
