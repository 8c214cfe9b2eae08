"""Claims: the assignment of jobs to controller processes, so that any number of processes share the jobs of one store.

A process holds a lease, which it renews. Each job has an epoch that only grows: a claim raises it, and a task under a
claim (`FENCE`) only writes while the job still has the epoch of that claim. The lease determines when a job may be
taken over; the epoch alone determines which process may write, so a process that was suspended, was cut off from the
store, or has a wrong clock loses its jobs but damages nothing. Job 0 is housekeeping: collecting machines and
compacting the store. Numbers below 0 are services (`services.claim`): one controller drives each, as for jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from broker.frozen import frozen
from broker.state.base import FENCE, Database, Fence
from broker.state.daemon_stats import DaemonStats, decode_stats
from broker.state.jobs import UNFINISHED

HOUSEKEEPING = 0
LEASE_S = 9.0  # four missed renewals of a process that renews every two seconds; a takeover then takes less than 15 s
_NEED_CONTROLLER = " UNION ".join((*UNFINISHED, "SELECT claim FROM services"))


@frozen
class JobLoad:
    """The number of processes that share the jobs, and the number of unfinished jobs."""

    controller_count: int
    job_count: int


class Claims:
    """Claims of jobs by controllers that share a store. Each claim has an epoch, and expires unless it is renewed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def renew(self, holder: str, stats: DaemonStats | None = None) -> Mapping[int, int]:
        """Extend or begin the lease of `holder`; return the epoch of each job that it holds, by job ID.

        `stats`: its work so far.
        """
        with self._database.claiming(is_durable=False):
            until_s = self._database.read_time_s() + LEASE_S
            self._database.execute(
                "INSERT INTO controllers (name, until_s, stats) VALUES (?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET until_s = excluded.until_s, stats = excluded.stats",
                (holder, until_s, "" if stats is None else stats.encode()),
            )
            # A controller without a lease for an hour is gone; until then, its row shows users what happened.
            self._database.execute("DELETE FROM controllers WHERE until_s < ?", (until_s - 3600.0,))
            rows = self._database.rows("SELECT job_id, epoch FROM claims WHERE holder = ?", (holder,))
        return {row["job_id"]: row["epoch"] for row in rows}

    def extend(self, holder: str) -> bool:
        """Extend the lease of `holder` if it has not ended; return whether it has one now. Its claims do not change."""
        with self._database.claiming(is_durable=False):
            now_s = self._database.read_time_s()
            done = self._database.execute(
                f"UPDATE controllers SET until_s = ?2 WHERE name = ?3 AND {write_has_lease()}",
                (now_s, now_s + LEASE_S, holder),
            )
        return done.rowcount == 1

    def find_free(self, limit: int) -> Sequence[int]:
        """Return services, unfinished jobs and housekeeping not held by a process with a lease, oldest first."""
        rows = self._database.rows(
            f"SELECT id FROM ({_NEED_CONTROLLER} UNION SELECT {HOUSEKEEPING}) AS wanted WHERE id NOT IN "
            f"(SELECT job_id FROM claims WHERE NOT {write_is_free()}) ORDER BY id LIMIT {int(limit)}",
            (self._database.read_time_s(),),
        )
        return [row["id"] for row in rows]

    def claim(self, holder: str, job_ids: Sequence[int]) -> Mapping[int, int]:
        """Claim the jobs that are still free; return their new epochs."""
        marks = ", ".join(f"?{number}" for number in range(2, len(job_ids) + 2))
        with self._database.claiming(is_durable=True):  # a lost epoch would be assigned twice
            for job_id in job_ids:
                self._database.execute(
                    "INSERT INTO claims (job_id) VALUES (?) ON CONFLICT (job_id) DO NOTHING", (job_id,)
                )
            free = self._database.rows(
                f"SELECT job_id FROM claims WHERE job_id IN ({marks}) AND {write_is_free()}"
                f"{self._database.lock_and_skip}",
                (self._database.read_time_s(), *job_ids),
            )
            for row in free:
                self._database.execute(
                    "UPDATE claims SET holder = ?, epoch = epoch + 1 WHERE job_id = ?", (holder, row["job_id"])
                )
            rows = self._database.rows(
                f"SELECT job_id, epoch FROM claims WHERE holder = ?1 AND job_id IN ({marks})", (holder, *job_ids)
            )
        taken = {row["job_id"] for row in free}
        return {row["job_id"]: row["epoch"] for row in rows if row["job_id"] in taken}

    def release(self, holder: str, job_ids: Sequence[int]) -> None:
        """Give up jobs. Until another process takes over, this one may complete writes that it has begun."""
        with self._database.claiming(is_durable=False):
            for job_id in job_ids:
                self._database.execute(
                    "UPDATE claims SET holder = '' WHERE job_id = ? AND holder = ?", (job_id, holder)
                )

    def resign(self, holder: str) -> None:
        """End the lease, so that other processes take over all its jobs at once."""
        with self._database.claiming(is_durable=False):
            self._database.execute("UPDATE claims SET holder = '' WHERE holder = ?", (holder,))
            self._database.execute("DELETE FROM controllers WHERE name = ?", (holder,))

    def has_controller(self) -> bool:
        """Return whether any process has a lease."""
        found = self._database.rows(
            f"SELECT 1 FROM controllers WHERE {write_has_lease()} LIMIT 1", (self._database.read_time_s(),)
        )
        return bool(found)

    def list_stats(self) -> Mapping[str, DaemonStats]:
        """Return what each process with a lease reported when it last renewed it, by name."""
        rows = self._database.rows(
            f"SELECT name, stats FROM controllers WHERE {write_has_lease()} ORDER BY name",
            (self._database.read_time_s(),),
        )
        found = {str(row["name"]): decode_stats(str(row["stats"])) for row in rows}
        return {name: stats for name, stats in found.items() if stats is not None}

    def measure_load(self) -> JobLoad:
        """Return the number of live controllers and of unfinished jobs."""
        row = self._database.rows(
            f"SELECT (SELECT count(*) FROM controllers WHERE {write_has_lease()}), "
            f"(SELECT count(*) FROM ({_NEED_CONTROLLER}) AS jobs)",
            (self._database.read_time_s(),),
        )[0]
        return JobLoad(controller_count=row[0], job_count=row[1])


def write_has_lease() -> str:
    """Write the SQL condition for a process in `controllers` with a lease; `?1` is the time of the store.

    A lease that ends later than any renewal could set it is from before the store's clock was set back, for example by
    a failover: a live process renews it at once, and a dead one must not keep its jobs until then.
    """
    return f"until_s > ?1 AND until_s <= ?1 + {2 * LEASE_S}"


def write_is_free() -> str:
    """Write the SQL condition for a claim whose holder has no lease."""
    return f"holder NOT IN (SELECT name FROM controllers WHERE {write_has_lease()})"


@contextmanager
def hold_claim(job_id: int, epoch: int) -> Iterator[None]:
    """Allow the block, and the tasks that it starts, to write only while the claim is valid."""
    token = FENCE.set(Fence(job_id=job_id, epoch=epoch))
    try:
        yield
    finally:
        FENCE.reset(token)
