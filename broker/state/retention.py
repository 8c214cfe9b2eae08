"""Retention: reduce old ended jobs to totals, so that the state file does not grow without bound."""

from __future__ import annotations

import json
import time
from calendar import timegm
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set

from broker.frozen import frozen
from broker.state.base import Database, Row, read_row, read_s
from broker.state.clusters import ONDEMAND_USD_HOUR, PRUNED_SAVED_USD, read_usd
from broker.state.people import Owned
from broker.state.schema import KEPT_DAYS

ENDED_JOBS_MAX = 20_000
BUDGET_DAYS = 32.0  # no month is longer: bills of the current one count towards monthly budgets
TABLES_OF_JOBS = ("attempts", "attempt_steps", "log_offsets", "forecasts", "nodes", "claims")
TABLES_OF_TASKS = ("jobs", "service_versions", "schedules")
BATCH = 500


@frozen
class Total:
    """The sum of pruned bills for one month (UTC) and cloud. `pricing`: "spot", "on-demand" or "unknown"."""

    month: str
    cloud: str
    pricing: str
    node_hours: float
    usd: float


class Compaction:
    """Delete old rows, and keep their totals."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def compact(self, *, keep_days: float = KEPT_DAYS, ended_jobs_max: int = ENDED_JOBS_MAX) -> int:
        """Prune ended jobs that are older than `keep_days` or exceed `ended_jobs_max`; return their number.

        Events, intents, refusals and bills that are older than `keep_days` are pruned too, and on a server tokens that
        have ended, and owners and commitments of what has been pruned. The audit log stays. The cost is added to the
        totals in the same commit. A job is kept while a kept job needs or resumes it, while any of its nodes is not
        known to have ended, and while its bills may count towards a monthly budget.
        """
        now_s = self._database.clock.now_s()
        with self._database.transaction():
            has_budget = self._database.row("SELECT 1 FROM limits WHERE usd_month IS NOT NULL LIMIT 1") is not None
            before_s = now_s - max(keep_days, BUDGET_DAYS if has_budget else 0.0) * 86400
            crowded_s = now_s - BUDGET_DAYS * 86400 if has_budget else now_s
            pruned = self._find_prunable(before_s, ended_jobs_max, crowded_s)
            self._prune_jobs(pruned)
            self._prune_bills(before_s)
            self._prune_stories(before_s)
            self._prune_people(before_s)
        self._database.reclaim_space()
        return len(pruned)

    def list_totals(self) -> Sequence[Total]:
        """Return the totals of deleted rows by month, cloud and pricing."""
        rows = self._database.rows(
            "SELECT month, cloud, pricing, node_hours, usd FROM totals ORDER BY month, cloud, pricing"
        )
        return [
            read_row("totals", row["month"], lambda row=row: Total(**dict(row)))  # type: ignore[misc]
            for row in rows
        ]

    def is_named(self, text: str) -> bool:
        """Return whether the task of a recorded job, service or schedule contains this text, without wildcards."""
        return any(
            self._database.row(f"SELECT 1 FROM {table} WHERE task LIKE ? LIMIT 1", (f"%{text}%",)) is not None
            for table in TABLES_OF_TASKS
        )

    def get_pruned_before_s(self) -> float | None:
        """Return the time before which ended jobs may exist only as totals; None if nothing was pruned."""
        row = self._database.row("SELECT value FROM meta WHERE key = 'pruned_before_s'")
        try:
            return read_s(float(row["value"])) if row else None
        except ValueError:
            return None  # damaged, but the totals do not depend on it

    def _find_prunable(self, before_s: float, ended_jobs_max: int, crowded_s: float) -> list[int]:
        rows = self._database.rows("SELECT id, is_terminal, ended_s, needs, resumes FROM jobs ORDER BY id DESC")
        busy = {
            row[0]
            for row in self._database.rows(
                "SELECT job_id FROM clusters WHERE job_id IS NOT NULL "
                "UNION SELECT job_id FROM nodes WHERE ended_s IS NULL AND job_id IS NOT NULL "
                "UNION SELECT job_id FROM attempts WHERE json_extract(body, '$.ended_s') IS NULL"
            )
        }
        return list(_choose_prunable(rows, busy, before_s=before_s, ended_jobs_max=ended_jobs_max, crowded_s=crowded_s))

    def _prune_jobs(self, job_ids: Sequence[int]) -> None:
        for start in range(0, len(job_ids), BATCH):
            batch = job_ids[start : start + BATCH]
            marks = ", ".join("?" * len(batch))
            self._add_to_totals(f"job_id IN ({marks})", batch)
            for table in TABLES_OF_JOBS:
                self._database.execute(f"DELETE FROM {table} WHERE job_id IN ({marks})", batch)
            self._database.execute(f"DELETE FROM jobs WHERE id IN ({marks})", batch)

    def _prune_bills(self, before_s: float) -> None:
        """Prune the bills of clusters without a job, and of jobs that were pruned before their last bill arrived."""
        where = (
            "ended_s < ? AND (job_id IS NULL OR job_id NOT IN (SELECT id FROM jobs)) "
            "AND cluster NOT IN (SELECT name FROM clusters)"
        )
        self._add_to_totals(where, (before_s,))
        self._database.execute(f"DELETE FROM nodes WHERE {where}", (before_s,))

    def _add_to_totals(self, where: str, parameters: Sequence[object]) -> None:
        rows = self._database.rows(
            f"SELECT cloud, usd_hour, created_s, ended_s, is_spot, {ONDEMAND_USD_HOUR} AS ondemand_usd_hour "
            f"FROM nodes WHERE {where}",
            parameters,
        )
        if not rows:
            return
        hours: dict[tuple[str, str, str], float] = defaultdict(float)
        usd: dict[tuple[str, str, str], float] = defaultdict(float)
        for row in rows:
            pricing = "unknown" if row["is_spot"] is None else "spot" if row["is_spot"] else "on-demand"
            for month, share_s in split_by_month(row["created_s"], row["ended_s"]):
                key = (month, row["cloud"], pricing)
                hours[key] += share_s / 3600
                usd[key] += share_s / 3600 * row["usd_hour"]
        for key in hours:
            self._database.execute(
                "INSERT INTO totals (month, cloud, pricing, node_hours, usd) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (month, cloud, pricing) DO UPDATE SET "
                "node_hours = totals.node_hours + excluded.node_hours, usd = totals.usd + excluded.usd",
                (*key, hours[key], usd[key]),
            )
        newest_s = max(row["ended_s"] for row in rows)
        self._put("pruned_before_s", max(newest_s, self.get_pruned_before_s() or newest_s))
        saved_usd = sum(
            (row["ondemand_usd_hour"] - row["usd_hour"]) * max(0.0, row["ended_s"] - row["created_s"]) / 3600
            for row in rows
        )
        known = self._database.row("SELECT value FROM meta WHERE key = ?", (PRUNED_SAVED_USD,))
        self._put(PRUNED_SAVED_USD, read_usd(None if known is None else known["value"]) + saved_usd)

    def _put(self, key: str, value: float) -> None:
        self._database.execute(
            "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (key, repr(value)),
        )

    def _prune_stories(self, before_s: float) -> None:
        """Prune events, intents and refusals; a trigger protects recent events, regardless of `before_s`."""
        self._database.execute(
            "DELETE FROM events WHERE time_s < ?1 AND time_s < unixepoch() - ?2 * 86400 AND "
            "(job_id IS NULL OR job_id NOT IN (SELECT id FROM jobs WHERE NOT is_terminal))",
            (before_s, KEPT_DAYS),
        )
        self._database.execute(
            "DELETE FROM intents WHERE closed_s < ? AND cluster NOT IN (SELECT name FROM clusters)", (before_s,)
        )
        self._database.execute("DELETE FROM refusals WHERE expires_s < ?", (before_s,))
        self._database.execute(  # the newest of each schedule is kept, because it shows the schedule's last outcome
            "DELETE FROM due_times WHERE due_s < ? AND due_s < (SELECT max(newer.due_s) FROM due_times AS newer "
            "WHERE newer.schedule_uid = due_times.schedule_uid)",
            (before_s,),
        )

    def _prune_people(self, before_s: float) -> None:
        """Prune the records that a server keeps of users' work, once no row of that work is left.

        Every launch and every login adds a row, and the queue reads all commitments.
        """
        self._database.execute("DELETE FROM tokens WHERE revoked_s < ?1 OR expires_s < ?1", (before_s,))
        self._database.execute(
            "DELETE FROM owners WHERE kind = ? AND name NOT IN (SELECT CAST(id AS TEXT) FROM jobs)", (Owned.JOB.value,)
        )
        rows = self._database.rows("SELECT id, kind, names FROM commitments WHERE time_s < ?", (before_s,))
        if not rows:
            return
        jobs = {str(row["id"]) for row in self._database.rows("SELECT id FROM jobs")}
        clusters = {
            str(row[0])
            for row in self._database.rows(
                "SELECT name FROM clusters UNION SELECT cluster FROM nodes "
                "UNION SELECT cluster FROM intents WHERE outcome IS NULL"
            )
        }
        kept = {Owned.JOB.value: jobs, Owned.CLUSTER.value: clusters}
        gone = [
            row["id"]
            for row in rows
            if row["kind"] in kept and not kept[row["kind"]].intersection(_read_names(row["names"]))
        ]
        for start in range(0, len(gone), BATCH):
            batch = gone[start : start + BATCH]
            self._database.execute(f"DELETE FROM commitments WHERE id IN ({', '.join('?' * len(batch))})", batch)


def _read_names(text: object) -> Sequence[str]:
    try:
        found = json.loads(str(text))
    except ValueError:
        return ()
    return [str(each) for each in found] if isinstance(found, list) else ()


def _choose_prunable(
    rows: Iterable[Row], busy: Set[int], *, before_s: float, ended_jobs_max: int, crowded_s: float
) -> Iterator[int]:
    """Yield the IDs of jobs to prune.

    These are the jobs that ended before `before_s` and, if there are more than `ended_jobs_max`, those that ended until
    `crowded_s`. `rows` are newest first; jobs only refer to older ones, so one pass is enough.
    """
    named: set[int] = set()
    ended = 0
    for row in rows:
        ended += bool(row["is_terminal"])
        ended_s = row["ended_s"] if isinstance(row["ended_s"], int | float) else None
        is_old = ended_s is not None and ended_s < before_s  # a job with a damaged time is kept
        is_crowded = ended > ended_jobs_max and (ended_s is None or ended_s <= crowded_s)
        is_over = bool(row["is_terminal"]) and (is_old or is_crowded)
        if is_over and row["id"] not in named and row["id"] not in busy:
            yield row["id"]
            continue
        named.update(_read_needs(row["needs"]))
        if row["resumes"] is not None:
            named.add(row["resumes"])


def _read_needs(text: object) -> Sequence[int]:
    try:
        found = json.loads(str(text))
    except ValueError:
        return ()  # a damaged row does not prevent pruning other jobs
    return [each for each in found if isinstance(each, int)] if isinstance(found, list) else ()


def split_by_month(start_s: float, end_s: float) -> Iterator[tuple[str, float]]:
    """Yield (month in UTC, seconds) for each month between start and end."""
    while start_s < end_s:
        date = time.gmtime(start_s)
        year, month = (date.tm_year + 1, 1) if date.tm_mon == 12 else (date.tm_year, date.tm_mon + 1)
        next_s = float(timegm((year, month, 1, 0, 0, 0)))
        yield f"{date.tm_year:04d}-{date.tm_mon:02d}", min(end_s, next_s) - start_s
        start_s = next_s
