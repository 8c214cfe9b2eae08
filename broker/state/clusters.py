"""Rows of clusters, of intents to create nodes, and of the cost of each node."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from broker.errors import DamagedRowError
from broker.frozen import frozen
from broker.state.base import Database, Row, keep_readable, read_row, read_s, read_text
from broker.types import Cluster, ClusterStatus, IntentEnd, Node, NodeRequest, NodeState


@frozen
class Intent:
    """A gang that was requested; open until its outcome is known."""

    request: NodeRequest
    created_s: float


class ClusterRows:
    """The clusters by name, one row each."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, cluster: Cluster) -> None:
        """Insert or replace the record of a cluster."""
        self._database.write(
            "INSERT INTO clusters (name, job_id, body) VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET job_id = excluded.job_id, body = excluded.body",
            (cluster.name, cluster.job_id, msgspec.json.encode(cluster)),
        )

    def get(self, name: str) -> Cluster | None:
        """Return a cluster; None if the name is unknown. Raises DamagedRowError."""
        row = self._database.row("SELECT name, body FROM clusters WHERE name = ?", (name,))
        return _read_cluster(row) if row else None

    def has_terminating(self) -> bool:
        """Return whether the termination of any cluster has begun and not ended."""
        status = "CASE WHEN json_valid(body) THEN json_extract(body, '$.status') END"
        query = f"SELECT 1 FROM clusters WHERE {status} = ? LIMIT 1"
        return bool(self._database.rows(query, (ClusterStatus.TERMINATING.value,)))

    def list(
        self, *, on_damage: Callable[[DamagedRowError], None] | None = None, with_jobs: bool = True
    ) -> Sequence[Cluster]:
        """Return all clusters by name, optionally without those of jobs.

        Damaged ones are reported to `on_damage` and omitted, or raised if it is None. Pass `on_damage` only to display
        clusters: the nodes of a damaged cluster are still running.
        """
        where = "" if with_jobs else "WHERE job_id IS NULL "
        rows = self._database.rows(f"SELECT name, body FROM clusters {where}ORDER BY name")
        return keep_readable([partial(_read_cluster, row) for row in rows], on_damage)

    def delete(self, name: str) -> None:
        """Delete a cluster and its run counter: the next cluster with this name starts at run 1.

        Intents, bills and events are kept.
        """
        with self._database.transaction():
            self._database.write("DELETE FROM clusters WHERE name = ?", (name,))
            self._database.write("DELETE FROM run_ids WHERE cluster = ?", (name,))

    def next_run_id(self, cluster: str) -> int:
        """Draw the next run ID of a cluster, starting at 1; `delete` resets the counter."""
        with self._database.transaction():
            row = self._database.write(
                "INSERT INTO run_ids (cluster, newest) VALUES (?, 1) "
                "ON CONFLICT (cluster) DO UPDATE SET newest = run_ids.newest + 1 RETURNING newest",
                (cluster,),
            ).fetchone()
        return int(row["newest"])

    def newest_run_id(self, cluster: str) -> int:
        """Return the newest run ID, or 0 if there was no run."""
        row = self._database.row("SELECT newest FROM run_ids WHERE cluster = ?", (cluster,))
        return int(row["newest"]) if row else 0


class IntentRows:
    """The intents: one row for each create call, committed before the call and closed with its outcome."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, request: NodeRequest) -> None:
        """Record an intent; a repeated call with the same token changes nothing."""
        self._database.write(
            "INSERT INTO intents (token, cluster, created_s, body) VALUES (?, ?, ?, ?) ON CONFLICT (token) DO NOTHING",
            (request.token, request.cluster, self._database.clock.now_s(), msgspec.json.encode(request)),
        )

    def note_account(self, token: str, account: str) -> None:
        """Record the account durably, because the create call follows."""
        with self._database.transaction():
            request = self.get_request(token)
            assert request is not None, "an intent is written before its account is known"
            body = msgspec.json.encode(replace(request, account=account))
            self._database.write("UPDATE intents SET body = ? WHERE token = ?", (body, token))

    def get_request(self, token: str) -> NodeRequest | None:
        """Return the request of an intent; None if the token is unknown. Raises DamagedRowError."""
        row = self._database.row("SELECT body FROM intents WHERE token = ?", (token,))
        return read_row("intents", token, lambda: msgspec.json.decode(row["body"], type=NodeRequest)) if row else None

    def note_nodes(self, token: str, nodes: Sequence[Node]) -> None:
        """Record the nodes that the create call returned: they are terminated even if no list shows them."""
        self._database.write("UPDATE intents SET nodes = ? WHERE token = ?", (msgspec.json.encode(nodes), token))

    def list_nodes(self, token: str) -> Sequence[Node]:
        """Return the recorded nodes of an intent; empty before the call has returned. Raises DamagedRowError."""
        row = self._database.row("SELECT nodes FROM intents WHERE token = ?", (token,))
        if row is None or not row["nodes"]:
            return ()
        return read_row("intents", token, lambda: msgspec.json.decode(row["nodes"], type=list[Node]))

    def close(self, token: str, outcome: IntentEnd, detail: str = "") -> None:
        """Close an intent; a later outcome is ignored. `detail` is for people."""
        self._database.write(
            "UPDATE intents SET outcome = ?, detail = ?, closed_s = ? WHERE token = ? AND outcome IS NULL",
            (outcome.value, detail, self._database.clock.now_s(), token),
        )

    def is_open(self, token: str) -> bool:
        """Return whether the intent is open; called immediately before each create call.

        Raises FencedError for a leader that was replaced while it was suspended.
        """
        with self._database.transaction(is_durable=False):
            return bool(self._database.rows("SELECT 1 FROM intents WHERE token = ? AND outcome IS NULL", (token,)))

    def list_open(self, cluster: str | None = None) -> Sequence[Intent]:
        """Return the intents without an outcome, oldest first, of one cluster or of all."""
        # Two statements: a single one for both cases would read every open intent of ten thousand jobs for each job.
        where, parameters = ("", ()) if cluster is None else (" AND cluster = ?", (cluster,))
        rows = self._database.rows(
            f"SELECT token, body, created_s FROM intents WHERE outcome IS NULL{where} ORDER BY created_s, rowid",
            parameters,
        )
        return [_read_intent(row) for row in rows]

    def has_surplus(self) -> bool:
        """Return whether a cluster is up beside an open launch, whose command was killed before it released it."""
        status = "CASE WHEN json_valid(clusters.body) THEN json_extract(clusters.body, '$.status') END"
        query = (
            "SELECT 1 FROM intents JOIN clusters ON clusters.name = intents.cluster "
            f"WHERE intents.outcome IS NULL AND clusters.job_id IS NULL AND {status} IN (?, ?) LIMIT 1"
        )
        return bool(self._database.rows(query, (ClusterStatus.UP.value, ClusterStatus.STOPPED.value)))

    def list_known_tokens(self, tokens: Iterable[str]) -> frozenset[str]:
        """Return the tokens among these that this store has ever used, open or closed."""
        return frozenset(
            token for token in tokens if self._database.rows("SELECT 1 FROM intents WHERE token = ?", (token,))
        )

    def list_tokens(self, cluster: str) -> frozenset[str]:
        """Return every token ever used for this cluster name, open or closed."""
        return frozenset(
            row["token"] for row in self._database.rows("SELECT token FROM intents WHERE cluster = ?", (cluster,))
        )

    def count_closed(self, cluster: str) -> int:
        """Return the number of ended launches of a cluster."""
        rows = self._database.rows("SELECT count(*) FROM intents WHERE cluster = ? AND outcome IS NOT NULL", (cluster,))
        return int(rows[0][0])


def _read_cluster(row: Row) -> Cluster:
    def read() -> Cluster:
        cluster = msgspec.json.decode(row["body"], type=Cluster)
        _ = cluster.placement.usd_hour  # raises if the field is missing because its name is damaged
        return cluster

    return read_row("clusters", row["name"], read)


def _read_intent(row: Row) -> Intent:
    return read_row(
        "intents",
        row["token"],
        lambda: Intent(request=msgspec.json.decode(row["body"], type=NodeRequest), created_s=read_s(row["created_s"])),
    )


@frozen
class Bill:
    """The billed time of one node; `ended_s` is None while it still costs money."""

    cloud: str
    node: str
    cluster: str
    job_id: int | None
    usd_hour: float
    created_s: float
    ended_s: float | None


_PRICE = "CASE WHEN json_valid(body) THEN json_extract(body, '$.placement.offer.ondemand_usd_hour') END"
_OF_CLUSTER = "CASE WHEN json_valid(body) THEN json_extract(body, '$.cluster') END = cluster"
# The on-demand price of a row of `nodes`: of its attempt's offer, or its own price without one. Attempts that restart
# in place share a cluster and its placement.
ONDEMAND_USD_HOUR = (
    f"coalesce(CAST((SELECT {_PRICE} FROM attempts WHERE attempts.job_id = nodes.job_id AND {_OF_CLUSTER} LIMIT 1) "
    "AS DOUBLE PRECISION), usd_hour)"
)
PRUNED_SAVED_USD = "pruned_saved_usd"  # in `meta`: by how much pruned bills were below their on-demand price
# The cost of nodes until `?`, which is passed twice; a node that ended before its creation costs nothing.
_BILLED_USD = (
    "coalesce(sum(CASE WHEN coalesce(ended_s, ?) > created_s "
    "THEN usd_hour * (coalesce(ended_s, ?) - created_s) END), 0.0) / 3600"
)


@frozen
class SpendSums:
    """USD spent today, this month and in total, and the current USD/h of all billed nodes."""

    today_usd: float
    month_usd: float
    total_usd: float
    usd_hour: float


class BillRows:
    """The bills: one row for each node, with its price and the times of its creation and end."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(self, *, on_damage: Callable[[DamagedRowError], None] | None = None) -> Sequence[Bill]:
        """List all bills, oldest first. Damaged rows are skipped if `on_damage` is given, and raised otherwise."""
        rows = self._database.rows(
            "SELECT cloud, id AS node, cluster, job_id, usd_hour, created_s, ended_s FROM nodes "
            "ORDER BY created_s, rowid"
        )
        return keep_readable([partial(_read_bill, row) for row in rows], on_damage)

    def is_open(self, node: Node) -> bool:
        """Return whether the node is being billed."""
        found = "SELECT 1 FROM nodes WHERE cloud = ? AND id = ? AND ended_s IS NULL"
        return bool(self._database.rows(found, (node.cloud, node.id)))

    def record(self, node: Node) -> None:
        """Record a node as its cloud lists it.

        An outdated list can neither reopen a closed bill, nor close one that was reopened by a start: a node that is
        listed as stopped since before that start is still billed.
        """
        self._database.write(
            "INSERT INTO nodes (cloud, id, cluster, job_id, usd_hour, created_s, ended_s, is_spot) "
            "VALUES (?1, ?2, ?3, (SELECT job_id FROM clusters WHERE name = ?3), ?4, ?5, ?6, ?8) "
            "ON CONFLICT (cloud, id) DO UPDATE SET usd_hour = excluded.usd_hour, "
            "ended_s = CASE WHEN nodes.ended_s IS NULL AND (?7 OR excluded.ended_s >= nodes.created_s) "
            "THEN excluded.ended_s ELSE nodes.ended_s END, job_id = COALESCE(nodes.job_id, excluded.job_id)",
            (
                *(node.cloud, node.id, node.cluster, node.usd_hour, node.created_s, node.ended_s),
                node.state is NodeState.TERMINATED,
                node.is_spot,
            ),
        )

    def close(self, node: Node) -> None:
        """Close the bill of a stopped node now, regardless of the time that its cloud reports."""
        self._database.write(
            "UPDATE nodes SET ended_s = COALESCE(ended_s, ?) WHERE cloud = ? AND id = ?",
            (self._database.clock.now_s(), node.cloud, node.id),
        )

    def reopen(self, node: Node, *, since_s: float | None = None) -> None:
        """Open a new bill for a restarted node; its cost until it was stopped moves to a separate row.

        A repeated call changes nothing. `since_s`: time of the restart, else now.
        """
        since_s = self._database.clock.now_s() if since_s is None else since_s
        with self._database.transaction():
            ended = self._database.row(
                "SELECT created_s FROM nodes WHERE cloud = ? AND id = ? AND ended_s IS NOT NULL", (node.cloud, node.id)
            )
            if ended is not None:
                self._database.write(
                    "UPDATE nodes SET id = ? WHERE cloud = ? AND id = ?",
                    (f"{node.id}@{ended['created_s']}", node.cloud, node.id),
                )
            self._database.write(
                "INSERT INTO nodes (cloud, id, cluster, job_id, usd_hour, created_s, ended_s, is_spot) "
                "VALUES (?1, ?2, ?3, (SELECT job_id FROM clusters WHERE name = ?3), ?4, ?5, NULL, ?6) "
                "ON CONFLICT (cloud, id) DO NOTHING",
                (node.cloud, node.id, node.cluster, node.usd_hour, since_s, node.is_spot),
            )

    def spend_usd(self, cluster: str | None = None, job_id: int | None = None, *, now_s: float) -> float:
        """Return the cost so far, in USD, of a cluster name, of a job, or of everything (including pruned bills)."""
        wanted = {"cluster = ?": cluster, "job_id = ?": job_id}
        chosen = {condition: value for condition, value in wanted.items() if value is not None}
        where = f" WHERE {' AND '.join(chosen)}" if chosen else ""
        rows = self._database.rows(f"SELECT {_BILLED_USD} FROM nodes{where}", (now_s, now_s, *chosen.values()))
        return float(rows[0][0]) + (0.0 if chosen else self._sum_pruned_usd())

    def list_spend_usd(self, job_ids: Sequence[int] | None = None, *, now_s: float) -> Mapping[int, float]:
        """Return the cost so far, in USD, by job ID: of each managed job that has had nodes, or only of `job_ids`."""
        if job_ids is not None and not job_ids:
            return {}
        where = "IS NOT NULL" if job_ids is None else f"IN ({', '.join('?' * len(job_ids))})"
        rows = self._database.rows(
            f"SELECT job_id, {_BILLED_USD} FROM nodes WHERE job_id {where} GROUP BY job_id",
            (now_s, now_s, *(job_ids or ())),
        )
        return {row[0]: row[1] for row in rows}

    def list_cloud_spend_usd(self, *, now_s: float) -> Mapping[str, float]:
        """Return the cost so far by cloud, in USD, including pruned bills."""
        rows = self._database.rows(
            f"SELECT cloud, sum(usd) FROM (SELECT cloud, {_BILLED_USD} AS usd FROM nodes GROUP BY cloud "
            "UNION ALL SELECT cloud, sum(usd) AS usd FROM totals GROUP BY cloud) AS spent "
            "GROUP BY cloud ORDER BY cloud",
            (now_s, now_s),
        )
        return {row[0]: float(row[1]) for row in rows}

    def sum_spend(self, *, midnight_s: float, month_s: float, now_s: float) -> SpendSums:
        """Sum up all bills in one read of them. Pruned bills count in the total only: they are older than any month."""
        usd = "CASE WHEN end_s > created_s THEN usd_hour * (end_s - created_s) END"
        since = f"CASE WHEN created_s > {{0}} THEN {usd} WHEN end_s > {{0}} THEN usd_hour * (end_s - {{0}}) END"
        hourly = "CASE WHEN ended_s IS NULL THEN usd_hour END"
        sums = ", ".join(
            f"coalesce(sum({each}), 0.0)" for each in (since.format("?2"), since.format("?3"), usd, hourly)
        )
        (row,) = self._database.rows(
            f"SELECT {sums} FROM (SELECT usd_hour, created_s, ended_s, coalesce(ended_s, ?1) AS end_s FROM nodes) "
            "AS billed",
            (now_s, midnight_s, month_s),
        )
        today_usd, month_usd, total_usd = (float(row[index]) / 3600 for index in range(3))
        total_usd += self._sum_pruned_usd()
        return SpendSums(today_usd=today_usd, month_usd=month_usd, total_usd=total_usd, usd_hour=float(row[3]))

    def _sum_pruned_usd(self) -> float:
        return float(self._database.rows("SELECT coalesce(sum(usd), 0.0) FROM totals")[0][0])

    def ondemand_since_usd(self, since_s: float, *, now_s: float, job_id: int | None = None) -> float:
        """Return the on-demand cost, in USD, of the machines that were billed from `since_s` to now, or of one job's.

        The price is that of their attempt's offer; machines without one count at their own price.
        """
        of_job = "" if job_id is None else " AND job_id = ?3"
        rows = self._database.rows(
            "SELECT coalesce(sum(CASE WHEN end_s > begin_s THEN price * (end_s - begin_s) END), 0.0) / 3600 FROM "
            f"(SELECT {ONDEMAND_USD_HOUR} AS price, "
            "coalesce(ended_s, ?1) AS end_s, CASE WHEN created_s > ?2 THEN created_s ELSE ?2 END AS begin_s "
            f"FROM nodes WHERE (ended_s IS NULL OR ended_s > ?2){of_job}) AS billed",
            (now_s, since_s, *([] if job_id is None else [job_id])),
        )
        return float(rows[0][0])

    def ondemand_total_usd(self, *, now_s: float) -> float:
        """Return the on-demand cost, in USD, of all machines so far, including pruned bills.

        Bills that were pruned by a release that did not record their on-demand price count at what was paid.
        """
        row = self._database.row("SELECT value FROM meta WHERE key = ?", (PRUNED_SAVED_USD,))
        saved_usd = read_usd(None if row is None else row["value"])
        return self.ondemand_since_usd(0.0, now_s=now_s) + self._sum_pruned_usd() + saved_usd


def read_usd(text: object) -> float:
    """Read an amount in `meta`; a missing or damaged one is 0."""
    try:
        value = float(str(text))
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def _read_bill(row: Row) -> Bill:
    return read_row(
        "nodes",
        f"{row['cloud']}/{row['node']}",
        lambda: Bill(
            cloud=read_text(row["cloud"]),
            node=read_text(row["node"]),
            cluster=read_text(row["cluster"]),
            job_id=None if row["job_id"] is None else int(row["job_id"]),
            usd_hour=float(row["usd_hour"]),
            created_s=read_s(row["created_s"]),
            ended_s=None if row["ended_s"] is None else read_s(row["ended_s"]),
        ),
    )
