"""Move a whole store between files and databases: export to JSON lines, import, and check.

An imported store counts as restored: running machines are compared with the records before anything starts, as after
`broker state restore`. Secrets of live jobs are exported encrypted, with the key in `secret.key`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from broker.errors import BrokerError, DamagedRowError, StateError
from broker.frozen import frozen
from broker.state.base import Database
from broker.state.faults import explain_os_error
from broker.state.meta import ADOPTED, RESTORED, SALT, SEEN
from broker.state.restoring import ATTEMPTS_SKIPPED
from broker.state.schema import MIGRATIONS
from broker.state.secret_rows import SecretBox, load_key
from broker.state.store import Store
from broker.types import EventKind, make_event
from broker.types.jobs import name_job

EXPORT_AGAIN = "export the state again: the file was not written or copied completely"
FORMAT = "broker-state-1"
# Every table, and the columns that order its rows. Add new tables here; a test compares this with both backends.
TABLES: Mapping[str, str] = {
    "meta": "key",
    "jobs": "id",
    "attempts": "job_id, number",
    "attempt_steps": "job_id, number",
    "log_offsets": "job_id",
    "forecasts": "job_id",
    "clusters": "name",
    "run_ids": "cluster",
    "intents": "created_s, token",
    "nodes": "created_s, cloud, id",
    "totals": "month, cloud, pricing",
    "events": "id",
    "refusals": "cloud, region, zone, instance_type, is_spot",
    "paces": "cloud, answer",
    "retry_budgets": "cloud",
    "services": "name",
    "service_versions": "service, version",
    "service_replicas": "service, number",
    "service_events": "service, number",
    "schedules": "name",
    "due_times": "schedule_uid, due_s",
    "tokens": "id",
    "owners": "kind, name",
    "audit": "id",
    "limits": "scope, name",
    "commitments": "id",
}
# Tables that belong to one database, and the secrets, which are exported by job.
LEFT_OUT = frozenset(("leader", "controllers", "claims", "secrets"))
SERVICE_SECRETS = "service_secrets"  # files, on every backend
SECRETS = ("secrets", SERVICE_SECRETS)
INSTALLATION = "installation"
OWN_META = frozenset(("lineage", "schema", "secret_key"))  # rows of `meta` that belong to one database
BOOLEANS = frozenset(("is_terminal", "cancel_requested", "is_spot"))  # numbers on SQLite
# Tables with rows that a user made: a state with any of them is not empty.
OCCUPYING = ("jobs", "clusters", "nodes", "services", "schedules", "tokens", "limits")
COUNTED = ("jobs", "events", "tokens", "audit", "commitments")  # tables that number their rows


@frozen
class Moved:
    """The number of rows written to each table."""

    counts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Number of rows that were moved."""
        return sum(self.counts.values())


def export_store(store: Store, target: Path) -> Moved:
    """Write every row, as of one moment, to a new file of mode 0600. Raises StateError."""
    counts: dict[str, int] = {}
    aside = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
    try:
        try:
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                with store.snapshot():
                    for line in _list_lines(store):
                        counts[line["table"]] = counts.get(line["table"], 0) + 1
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.write(json.dumps({"table": "end", "row": counts}) + "\n")
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise explain_os_error(error, default=target) from error
    counts.pop("header")
    return Moved(counts=counts)


def _list_lines(store: Store) -> Iterator[dict[str, Any]]:
    yield {"table": "header", "row": {"format": FORMAT, "schema": len(MIGRATIONS), "time_s": store.clock.now_s()}}
    for table, order in TABLES.items():
        for row in store.rows(f"SELECT * FROM {table} ORDER BY {order}"):
            yield {"table": table, "row": {name: _to_json(row[name]) for name in list(row.keys()) if name != "rowid"}}
    box: SecretBox | None = None
    for job in store.jobs.list(on_damage=lambda error: None):
        values = {name: secret.value for name, secret in job.task.secrets.items()}
        if values and not job.status.is_terminal:
            box = box or SecretBox(load_key(store.path.parent))
            name = name_job(job.id, job.uid)
            yield {"table": "secrets", "row": {"job_id": job.id, "uid": job.uid, "body": box.seal(name, values)}}
    for service, version, wanted in store.services.list_secrets():
        box = box or SecretBox(load_key(store.path.parent))
        body = box.seal(_name_version(service.uid, version), wanted)
        yield {"table": SERVICE_SECRETS, "row": {"uid": service.uid, "version": version, "body": body}}


def import_store(store: Store, source: Path) -> Moved:
    """Fill an empty store from a file of `export_store`, all or nothing. Raises StateError."""
    if any(store.rows(f"SELECT 1 FROM {table} LIMIT 1") for table in OCCUPYING):
        raise StateError(
            "this state is not empty", hints=("import into a new database, or after `broker state reset`",)
        )
    counts: dict[str, int] = {}
    box: SecretBox | None = None
    owner = store.meta.get(INSTALLATION)
    with store.transaction():
        for table, row in _read_lines(source):
            counts[table] = counts.get(table, 0) + 1
            if table in SECRETS:
                box = box or SecretBox(load_key(store.path.parent))
                _import_secrets(store, box, table, row)
            elif table == "meta" and row["key"] == INSTALLATION and row["value"] != (owner or row["value"]):
                raise StateError(
                    f"{source} belongs to installation {row['value']}, but this state to {owner}",
                    details=("Machines are found by this ID; with a different ID, running machines would be lost.",),
                    hints=(f"import into a new folder, after `echo {row['value']} > FOLDER/owner`",),
                )
            elif table != "meta" or row["key"] not in OWN_META:
                _insert(store, table, row)
        store.skip_used_ids(COUNTED)
        _mark_restored(store, source)
    return Moved(counts=counts)


def _name_version(uid: str, version: int) -> str:
    return f"service {uid} version {version}"


def _import_secrets(store: Store, box: SecretBox, table: str, row: Mapping[str, Any]) -> None:
    is_job = table == "secrets"
    name = name_job(row["job_id"], row["uid"]) if is_job else _name_version(row["uid"], row["version"])
    owner = f"job {row['job_id']}" if is_job else "a service"
    try:
        values = box.open(name, row["body"])
    except ValueError as error:
        raise StateError(
            f"the secrets of {owner} cannot be read: {error}",
            hints=(f"copy `secret.key` from the folder of the exported state to {store.path.parent}",),
        ) from error
    if is_job:
        store.jobs.write_secrets(row["job_id"], row["uid"], values)
    else:
        store.services.write_secrets(row["uid"], row["version"], values)


def _insert(store: Database, table: str, row: Mapping[str, Any]) -> None:
    values = {name: bool(value) if name in BOOLEANS and value is not None else value for name, value in row.items()}
    if table == "meta":
        store.execute("DELETE FROM meta WHERE key = ?", (row["key"],))
    names, marks = ", ".join(values), ", ".join("?" * len(values))
    store.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))


def _mark_restored(store: Store, source: Path) -> None:
    """Proceed as after restoring a copy: resources started since then are found by their tags."""
    store.meta.forget_adoptions(prefixes=(ADOPTED, SEEN))
    store.meta.put(RESTORED, repr(store.clock.now_s()))
    store.meta.put(SALT, secrets.token_hex(8))
    store.meta.forget_half_done(attempts_skipped=ATTEMPTS_SKIPPED)
    store.events.add(make_event(EventKind.RESTORED, copy=source.name))


def _read_lines(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the rows. Raises StateError for a file that is damaged, incomplete, or from another version."""
    counts: dict[str, int] = {}
    table = ""
    try:
        with source.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                line = json.loads(text)
                table, row = line["table"], line["row"]
                if number == 1:
                    _check_header(source, table, row)
                elif table == "end" and {**row, "header": 1} != counts:
                    raise StateError(f"{source} is damaged: rows are missing", hints=(EXPORT_AGAIN,))
                elif table != "end":
                    _check_row(source, number, table, row)
                    yield table, row
                counts[table] = counts.get(table, 0) + 1
    except OSError as error:
        raise explain_os_error(error, default=source) from error
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{source} is not an export of broker's state: {error!r}") from error
    if table != "end":
        raise StateError(f"{source} is incomplete: its last line is missing", hints=(EXPORT_AGAIN,))


def _check_header(source: Path, table: str, row: Mapping[str, Any]) -> None:
    if table != "header" or row["format"] != FORMAT:
        raise StateError(f"{source} is not an export of broker's state")
    if row["schema"] != len(MIGRATIONS):
        raise StateError(
            f"{source} has schema {row['schema']}; this version has {len(MIGRATIONS)}",
            hints=("export it again with this version of broker",),
        )


def _check_row(source: Path, number: int, table: str, row: object) -> None:
    """Raise StateError for a name that is not an identifier, because names become part of SQL statements."""
    is_valid = isinstance(row, dict) and all(isinstance(name, str) and name.isidentifier() for name in row)
    if (table not in TABLES and table not in SECRETS) or not is_valid:
        raise StateError(f"{source}:{number}: unknown table or column")


def _to_json(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def check_store(store: Store, *, on_damage: Callable[[DamagedRowError], None] = lambda error: None) -> list[str]:
    """Read every row and follow its references; return the errors, empty for an intact store.

    Each damaged row is reported to `on_damage`, too.
    """
    found: list[str] = []

    def note(error: DamagedRowError) -> None:
        found.append(error.message)
        on_damage(error)

    store.jobs.list(on_damage=note)
    store.clusters.list(on_damage=note)
    store.bills.list(on_damage=note)
    for read in (store.intents.list_open, store.events.list, store.history.list_stays, store.retention.list_totals):
        try:
            read()
        except DamagedRowError as error:
            note(error)
        except BrokerError as error:
            found.append(error.message)
    for table in ("attempts", "attempt_steps", "log_offsets", "forecasts"):
        for row in store.rows(f"SELECT DISTINCT job_id FROM {table} WHERE job_id NOT IN (SELECT id FROM jobs)"):
            found.append(f"{table} of job {row['job_id']}, which is missing")
    # NULL, the job of an unmanaged cluster, is `NOT IN` an empty table
    for row in store.rows(
        "SELECT name, job_id FROM clusters WHERE job_id IS NOT NULL AND job_id NOT IN (SELECT id FROM jobs)"
    ):
        found.append(f"cluster {row['name']} belongs to job {row['job_id']}, which is missing")
    for row in store.rows("SELECT id, resumes FROM jobs WHERE resumes NOT IN (SELECT id FROM jobs)"):
        found.append(f"job {row['id']} resumes job {row['resumes']}, which is missing")
    found += store.schedules.list_orphans()
    _check_tasks(store, note)
    return sorted(set(found))


def _check_tasks(store: Store, note: Callable[[DamagedRowError], None]) -> None:
    """Read the tasks of schedules and services, with their secrets; pass on what is damaged."""
    for schedule in store.schedules.list(on_damage=note):
        try:
            store.schedules.get_task(schedule)
            store.schedules.list_due_times(schedule)
        except DamagedRowError as error:
            note(error)
    try:
        services = store.services.list()
    except DamagedRowError as error:
        return note(error)
    for service in services:
        try:
            store.services.get_task(service.name, service.version)
        except DamagedRowError as error:
            note(error)
