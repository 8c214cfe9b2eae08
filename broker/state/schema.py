"""The tables, as a list of migrations: entry n migrates schema n to n + 1. Entries are only ever added.

A step is a statement, or a function of the connection if SQL alone cannot convert the data.
Nested values are in one JSON column, `body`; values that SQL searches or protects have their own columns.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

Step = str | Callable[[sqlite3.Connection], None]

KEPT_DAYS = 90  # how long a job's events and the requests to clouds are kept


def _convert_sentences(connection: sqlite3.Connection) -> None:
    """Turn outcomes and events from sentences into kinds with data."""
    from broker.state import sentences

    sentences.convert(connection)


def _convert_placements(connection: sqlite3.Connection) -> None:
    """Add to each placement the alternative of the task from which it came, and move recovery to the task."""
    from broker.state import alternatives

    alternatives.convert(connection)


_FIRST = (
    "CREATE TABLE clusters (name TEXT PRIMARY KEY, job_id INTEGER, body BLOB NOT NULL)",
    "CREATE TABLE run_ids (cluster TEXT PRIMARY KEY, newest INTEGER NOT NULL)",
    """CREATE TABLE intents (token TEXT PRIMARY KEY, cluster TEXT NOT NULL, created_s REAL NOT NULL,
       body BLOB NOT NULL, outcome TEXT, closed_s REAL)""",
    "CREATE INDEX intents_cluster ON intents (cluster)",
    """CREATE TABLE nodes (cloud TEXT NOT NULL, id TEXT NOT NULL, cluster TEXT NOT NULL, job_id INTEGER,
       usd_hour REAL NOT NULL, created_s REAL NOT NULL, ended_s REAL, PRIMARY KEY (cloud, id))""",
    "CREATE INDEX nodes_cluster ON nodes (cluster)",
    """CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, status TEXT NOT NULL,
       is_terminal INTEGER NOT NULL DEFAULT 0, request_id TEXT UNIQUE, task TEXT NOT NULL, secret_names BLOB NOT NULL,
       submitted_s REAL NOT NULL, ended_s REAL, failure TEXT NOT NULL DEFAULT '',
       cancel_requested INTEGER NOT NULL DEFAULT 0, progress BLOB)""",
    """CREATE TRIGGER jobs_terminal BEFORE UPDATE OF status, failure, ended_s ON jobs WHEN OLD.is_terminal
       BEGIN SELECT RAISE(ABORT, 'a terminal job never changes'); END""",
    """CREATE TABLE attempts (job_id INTEGER NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL,
       PRIMARY KEY (job_id, number))""",
    """CREATE TABLE attempt_steps (job_id INTEGER NOT NULL, number INTEGER NOT NULL, first_step INTEGER NOT NULL,
       last_step INTEGER NOT NULL, checkpoint_step INTEGER, PRIMARY KEY (job_id, number))""",
    """CREATE TABLE log_offsets (job_id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, source_bytes INTEGER NOT NULL,
       file_bytes INTEGER NOT NULL)""",
    """CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL NOT NULL, kind TEXT NOT NULL,
       message TEXT NOT NULL, job_id INTEGER, cluster TEXT)""",
    "CREATE INDEX events_job ON events (job_id)",
    """CREATE TRIGGER events_keep BEFORE UPDATE ON events
       BEGIN SELECT RAISE(ABORT, 'events are append-only'); END""",
    """CREATE TRIGGER events_stay BEFORE DELETE ON events
       BEGIN SELECT RAISE(ABORT, 'events are append-only'); END""",
    """CREATE TABLE refusals (cloud TEXT NOT NULL, region TEXT NOT NULL, zone TEXT NOT NULL,
       instance_type TEXT NOT NULL, is_spot INTEGER NOT NULL, expires_s REAL NOT NULL, reason TEXT NOT NULL,
       PRIMARY KEY (cloud, region, zone, instance_type, is_spot))""",
)

_LEADER = (
    "CREATE TABLE leader (one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL, beat_s REAL NOT NULL)",
    "INSERT INTO leader (one, epoch, beat_s) VALUES (1, 0, 0)",
)

_PIPELINES = (
    "ALTER TABLE jobs ADD COLUMN needs TEXT NOT NULL DEFAULT '[]'",
    "ALTER TABLE jobs ADD COLUMN pipeline TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE jobs ADD COLUMN resumes INTEGER",
    "ALTER TABLE jobs ADD COLUMN first_attempt INTEGER NOT NULL DEFAULT 1",
)

_LIVE_INDEXES = (  # a daemon queries three times a second; ten thousand ended jobs must not slow it down
    "CREATE INDEX jobs_live ON jobs (id) WHERE NOT is_terminal",
    "CREATE INDEX attempts_open ON attempts (job_id) WHERE json_extract(body, '$.ended_s') IS NULL",
    "CREATE INDEX intents_open ON intents (created_s) WHERE outcome IS NULL",
    "CREATE INDEX nodes_job ON nodes (job_id)",
)

_COMPACTION = (  # recent events remain protected from deletion
    "DROP TRIGGER events_stay",
    f"""CREATE TRIGGER events_stay BEFORE DELETE ON events WHEN OLD.time_s > unixepoch() - {KEPT_DAYS} * 86400
       BEGIN SELECT RAISE(ABORT, 'events are append-only'); END""",
    "ALTER TABLE refusals ADD COLUMN count INTEGER NOT NULL DEFAULT 1",
)

_CALLS = (
    """CREATE TABLE paces (cloud TEXT NOT NULL, answer TEXT NOT NULL, mean_s REAL NOT NULL, deviation_s REAL NOT NULL,
       PRIMARY KEY (cloud, answer))""",
    "ALTER TABLE refusals ADD COLUMN probed_until_s REAL NOT NULL DEFAULT 0",
    "ALTER TABLE refusals ADD COLUMN reask_s REAL NOT NULL DEFAULT 0",
    "ALTER TABLE jobs ADD COLUMN hedge INTEGER NOT NULL DEFAULT 2",
    "CREATE TABLE retry_budgets (cloud TEXT PRIMARY KEY, tokens REAL NOT NULL, at_s REAL NOT NULL)",
)

_HINTS = ("ALTER TABLE refusals ADD COLUMN hints TEXT NOT NULL DEFAULT '[]'",)

_MADE_NODES = ("ALTER TABLE intents ADD COLUMN nodes BLOB",)

_IDENTITY = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "INSERT INTO meta (key, value) VALUES ('lineage', lower(hex(randomblob(8))))",
    # empty for older jobs, whose names do not contain a uid
    "ALTER TABLE jobs ADD COLUMN uid TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE nodes ADD COLUMN is_spot INTEGER",
    """UPDATE nodes SET is_spot = (SELECT json_extract(body, '$.placement.is_spot') FROM attempts
       WHERE attempts.job_id = nodes.job_id AND json_extract(body, '$.cluster') = nodes.cluster)""",
    """CREATE TABLE totals (month TEXT NOT NULL, cloud TEXT NOT NULL, pricing TEXT NOT NULL, node_hours REAL NOT NULL,
       usd REAL NOT NULL, PRIMARY KEY (month, cloud, pricing))""",
)

_KINDS: tuple[Step, ...] = (  # outcomes and events as kinds with data instead of sentences
    "ALTER TABLE attempts ADD COLUMN outcome_kind TEXT",
    "ALTER TABLE attempts ADD COLUMN outcome_detail TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE attempts ADD COLUMN outcome_step INTEGER",
    "ALTER TABLE attempts ADD COLUMN exit_code INTEGER",
    "ALTER TABLE jobs ADD COLUMN outcome_kind TEXT",
    "ALTER TABLE intents ADD COLUMN detail TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE events ADD COLUMN data TEXT NOT NULL DEFAULT '{}'",
    "DROP TRIGGER events_keep",
    _convert_sentences,
    "ALTER TABLE events DROP COLUMN message",
    """CREATE TRIGGER events_keep BEFORE UPDATE ON events
       BEGIN SELECT RAISE(ABORT, 'events are append-only'); END""",
)

# From here on, both backends run the same statements; `postgres_schema.py` translates types and keys for PostgreSQL.
_CLAIMS = (
    "CREATE TABLE controllers (name TEXT PRIMARY KEY, until_s REAL NOT NULL)",
    """CREATE TABLE claims (job_id INTEGER PRIMARY KEY, holder TEXT NOT NULL DEFAULT '',
       epoch INTEGER NOT NULL DEFAULT 0)""",
)

SQLITE_ONLY = 11  # the schema that a new PostgreSQL database starts from

_SERVICES = (
    """CREATE TABLE services (name TEXT PRIMARY KEY, uid TEXT NOT NULL, version INTEGER NOT NULL, host TEXT NOT NULL,
       port INTEGER NOT NULL, mode TEXT NOT NULL, wanted INTEGER NOT NULL, drawn INTEGER NOT NULL,
       created_s REAL NOT NULL, down_requested INTEGER NOT NULL, failure TEXT NOT NULL)""",
    """CREATE TABLE service_versions (service TEXT NOT NULL, version INTEGER NOT NULL, task TEXT NOT NULL,
       secret_names TEXT NOT NULL, was_ready INTEGER NOT NULL, PRIMARY KEY (service, version))""",
    """CREATE TABLE service_replicas (service TEXT NOT NULL, number INTEGER NOT NULL, job_id INTEGER NOT NULL,
       body TEXT NOT NULL, PRIMARY KEY (service, number))""",
    """CREATE TABLE service_events (service TEXT NOT NULL, number INTEGER NOT NULL, time_s REAL NOT NULL,
       kind TEXT NOT NULL, replica INTEGER, detail TEXT NOT NULL, PRIMARY KEY (service, number))""",
)

_PEOPLE = (
    """CREATE TABLE tokens (id INTEGER PRIMARY KEY AUTOINCREMENT, digest TEXT NOT NULL UNIQUE, person TEXT NOT NULL,
       role TEXT NOT NULL, created_s REAL NOT NULL, expires_s REAL, revoked_s REAL)""",
    "CREATE TABLE owners (kind TEXT NOT NULL, name TEXT NOT NULL, person TEXT NOT NULL, PRIMARY KEY (kind, name))",
    """CREATE TABLE audit (id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL NOT NULL, person TEXT NOT NULL,
       verb TEXT NOT NULL, target TEXT NOT NULL, outcome TEXT NOT NULL)""",
)
_LIMITS = (
    """CREATE TABLE limits (scope TEXT NOT NULL, name TEXT NOT NULL, usd_month REAL, gpus REAL,
       PRIMARY KEY (scope, name))""",
    """CREATE TABLE commitments (id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL NOT NULL, ended_s REAL,
       is_pending INTEGER NOT NULL, person TEXT NOT NULL, project TEXT NOT NULL, kind TEXT NOT NULL,
       names TEXT NOT NULL, usd REAL, usd_hour REAL NOT NULL, gpus REAL NOT NULL)""",
    "ALTER TABLE tokens ADD COLUMN project TEXT NOT NULL DEFAULT ''",
)
_FORECASTS = ("CREATE TABLE forecasts (job_id INTEGER PRIMARY KEY, body TEXT NOT NULL)",)

_DISPLACEMENTS = (  # for a job whose slot is taken by a waiting job of higher priority
    "ALTER TABLE jobs ADD COLUMN displaced_by INTEGER",  # while it has not returned the slot
    "ALTER TABLE jobs ADD COLUMN displaced_s REAL",  # the last time
)
_REFUSED = ("ALTER TABLE refusals ADD COLUMN refused_s REAL NOT NULL DEFAULT 0",)

_SCHEDULES = (
    """CREATE TABLE schedules (name TEXT PRIMARY KEY, uid TEXT NOT NULL, spec TEXT NOT NULL, task TEXT NOT NULL,
       secret_names TEXT NOT NULL, secrets TEXT, hedge INTEGER NOT NULL, request_id TEXT UNIQUE, person TEXT NOT NULL,
       project TEXT NOT NULL, created_s REAL NOT NULL, next_s REAL, is_paused INTEGER NOT NULL)""",
    """CREATE TABLE due_times (schedule_uid TEXT NOT NULL, due_s REAL NOT NULL, outcome TEXT NOT NULL, job_id INTEGER,
       detail TEXT NOT NULL, count INTEGER NOT NULL, last_s REAL, PRIMARY KEY (schedule_uid, due_s))""",
)
_SERVICE_CLAIMS = (  # a service is claimed like a job, under a negative number, which no job has
    "ALTER TABLE services ADD COLUMN claim INTEGER",
    "UPDATE services SET claim = -(SELECT count(*) FROM services AS other WHERE other.name <= services.name)",
)
_STATS = (
    "ALTER TABLE leader ADD COLUMN stats TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE controllers ADD COLUMN stats TEXT NOT NULL DEFAULT ''",
    # For counts by status, and for lists with live jobs first: without reading the tasks of all jobs.
    "CREATE INDEX jobs_status ON jobs (status)",
    "CREATE INDEX jobs_live_first ON jobs (is_terminal, id DESC)",
)

MIGRATIONS: tuple[tuple[Step, ...], ...] = (
    *(_FIRST, _LEADER, _PIPELINES, _LIVE_INDEXES, _COMPACTION, _CALLS, _HINTS),
    _MADE_NODES,
    _IDENTITY,
    _KINDS,
    (_convert_placements,),
    _CLAIMS,
    _SERVICES,
    _PEOPLE,
    _FORECASTS,
    _LIMITS,
    (*_DISPLACEMENTS, *_REFUSED),
    _SCHEDULES,
    _SERVICE_CLAIMS,
    _STATS,
)
