"""Rows of services, their versions, replicas and events. All are deleted when a service is down; its jobs are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from broker.errors import UsageError
from broker.frozen import frozen
from broker.state.base import Database, Row, read_row, read_s, read_text
from broker.state.jobs import REPLICA_REQUEST
from broker.state.secret_files import SecretFiles
from broker.task.codec import decode_task, encode_task
from broker.types import Replica, Service, ServiceEventKind, Task, UpdateMode

COLUMNS = "name, uid, version, host, port, mode, wanted, created_s, down_requested, failure"
KEYED = "service_keys:"  # with a service's uid, in `meta`: API keys were created
HISTORY = "service_history:"  # with a service's uid, in `meta`: observations of its replicas
EVENTS_MAX = 1000  # of one service; older ones are deleted


@frozen
class ServiceEvent:
    """An event of a service, or of one of its replicas."""

    time_s: float
    kind: ServiceEventKind
    replica: int | None = None
    detail: str = ""


class ServiceRows:
    """The services, their versions, replicas and events."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._secrets = SecretFiles(database.path.parent / "service-secrets", database)

    def add(self, name: str, task: Task, *, host: str, port: int, wanted: int) -> Service:
        """Add a service with its first version. Raises UsageError if a service with this name exists."""
        with self._database.transaction():
            if self.get(name) is not None:
                raise UsageError(
                    f"service `{name}` already exists",
                    hints=[f"change it with `broker serve update {name} TASK.yaml`", f"or `broker serve down {name}`"],
                )
            self._database.execute(
                "INSERT INTO services (name, uid, version, host, port, mode, wanted, drawn, created_s, down_requested, "
                "failure, claim) VALUES (?, ?, 0, ?, ?, ?, ?, 0, ?, 0, '', "
                # A reused number keeps its epoch, which only grows.
                "(SELECT coalesce(min(claim), 0) - 1 FROM services))",
                (name, self._database.draw_uid(), host, port, UpdateMode.ROLLING.value, wanted, self._now_s()),
            )
            self.add_version(name, task)
            self.add_event(name, ServiceEventKind.CREATED)
            return self._must_get(name)

    def add_version(self, name: str, task: Task, *, mode: UpdateMode = UpdateMode.ROLLING) -> int:
        """Add a version and make it the wanted one; return its number."""
        with self._database.transaction():
            service = self._must_get(name)
            row = self._database.row("SELECT max(version) AS newest FROM service_versions WHERE service = ?", (name,))
            version = int(row["newest"] or 0) + 1 if row else 1
            self._database.execute(
                "INSERT INTO service_versions (service, version, task, secret_names, was_ready) VALUES (?, ?, ?, ?, 0)",
                (name, version, encode_task(task), msgspec.json.encode(sorted(task.secrets)).decode()),
            )
            if task.secrets:
                values = {key: secret.value for key, secret in task.secrets.items()}
                self._secrets.write(version, service.uid, values)
            self._database.execute(
                "UPDATE services SET version = ?, mode = ?, failure = '' WHERE name = ?", (version, mode.value, name)
            )
            return version

    def get(self, name: str) -> Service | None:
        """Return a service; None if the name is unknown. Raises DamagedRowError."""
        row = self._database.row(f"SELECT {COLUMNS} FROM services WHERE name = ?", (name,))
        return _read_service(row) if row else None

    def list(self) -> Sequence[Service]:
        """List all services by name."""
        return [_read_service(row) for row in self._database.rows(f"SELECT {COLUMNS} FROM services ORDER BY name")]

    def list_names(self) -> Sequence[str]:
        """List the services that need a controller."""
        return [read_text(row["name"]) for row in self._database.rows("SELECT name FROM services ORDER BY name")]

    def list_failures(self) -> Mapping[str, str]:
        """Return the reason for the failure of each failed service, by name."""
        rows = self._database.rows("SELECT name, failure FROM services WHERE failure <> '' ORDER BY name")
        return {read_text(row["name"]): read_text(row["failure"]) for row in rows}

    def list_claims(self) -> Mapping[int, str]:
        """Return the name of each service by the number under which it is claimed (`claims.py`)."""
        rows = self._database.rows("SELECT claim, name FROM services")
        return {int(row["claim"]): read_text(row["name"]) for row in rows}

    def get_task(self, name: str, version: int) -> Task:
        """Return a version's task with its secrets."""
        row = self._database.row(
            "SELECT task, secret_names FROM service_versions WHERE service = ? AND version = ?", (name, version)
        )
        service = self._must_get(name)
        if row is None:
            raise UsageError(
                f"service `{name}` has no version {version}", hints=[f"`broker serve status {name}` shows its version"]
            )

        def read() -> Task:
            names = msgspec.json.decode(row["secret_names"], type=list[str])
            values = self._secrets.read(version, service.uid, names) if names else {}
            return decode_task(row["task"], values)

        return read_row("service_versions", f"{name}/{version}", read)

    def find_ready_version(self, name: str) -> int | None:
        """Return the newest version that ever had a ready replica; None if there is none."""
        row = self._database.row(
            "SELECT max(version) AS newest FROM service_versions WHERE service = ? AND was_ready = 1", (name,)
        )
        return None if row is None or row["newest"] is None else int(row["newest"])

    def mark_ready(self, name: str, version: int) -> None:
        """Record that a replica of this version was ready."""
        self._database.write(
            "UPDATE service_versions SET was_ready = 1 WHERE service = ? AND version = ?", (name, version)
        )

    def set_version(self, name: str, version: int) -> None:
        """Set the version that the service's replicas should have."""
        self._database.write("UPDATE services SET version = ? WHERE name = ?", (version, name))

    def set_wanted(self, name: str, wanted: int) -> None:
        """Set the number of replicas that the controller aims for."""
        self._database.write("UPDATE services SET wanted = ? WHERE name = ?", (wanted, name))

    def set_failure(self, name: str, failure: str) -> None:
        """Record the reason for the service's failure; empty if it has not failed."""
        self._database.write("UPDATE services SET failure = ? WHERE name = ?", (failure, name))

    def request_down(self, name: str) -> None:
        """Request the end of a service; repeated calls have no effect."""
        with self._database.transaction():
            changed = self._database.execute(
                "UPDATE services SET down_requested = 1 WHERE name = ? AND down_requested = 0", (name,)
            )
            if changed.rowcount:
                self.add_event(name, ServiceEventKind.DOWN_REQUESTED)

    def draw_number(self, name: str) -> int:
        """Return the number of the next replica, which was never used by another replica of this service."""
        with self._database.transaction():
            self._database.execute("UPDATE services SET drawn = drawn + 1 WHERE name = ?", (name,))
            row = self._database.row("SELECT drawn FROM services WHERE name = ?", (name,))
            assert row is not None
            return int(row["drawn"])

    def put_replica(self, replica: Replica) -> None:
        """Insert or replace the record of a replica."""
        self._database.write(
            "INSERT INTO service_replicas (service, number, job_id, body) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (service, number) DO UPDATE SET body = excluded.body",
            (replica.service, replica.number, replica.job_id, msgspec.json.encode(replica).decode()),
        )

    def list_replicas(self, name: str) -> Sequence[Replica]:
        """Return the replicas of a service by number."""
        rows = self._database.rows(
            "SELECT number, body FROM service_replicas WHERE service = ? ORDER BY number", (name,)
        )
        return [_read_replica(name, row) for row in rows]

    def list_jobs(self) -> Mapping[int, str]:
        """Return the services by the IDs of their jobs: of replicas and gateways, including those that were replaced.

        No row is decoded, so that a damaged one hides nothing.
        """
        prefix = f"'{REPLICA_REQUEST}' || services.name || '/' || services.uid || '/'"
        rows = self._database.rows(
            "SELECT jobs.id AS id, services.name AS name FROM services "
            f"JOIN jobs ON substr(jobs.request_id, 1, length({prefix})) = {prefix}"
        )
        return {int(row["id"]): read_text(row["name"]) for row in rows}

    def list_replica_jobs(self, service: Service) -> Mapping[int, int]:
        """Return the replica numbers of a service by job ID, including replicas that were replaced, but no gateways."""
        prefix = f"{REPLICA_REQUEST}{service.name}/{service.uid}/"
        rows = self._database.rows(
            "SELECT id, substr(request_id, ?) AS number FROM jobs WHERE substr(request_id, 1, ?) = ? ORDER BY id",
            (len(prefix) + 1, len(prefix), prefix),
        )
        return {int(row["id"]): int(row["number"]) for row in rows if str(row["number"]).isdecimal()}

    def delete_replica(self, replica: Replica) -> None:
        """Delete the row of a replica whose job has ended."""
        self._database.write(
            "DELETE FROM service_replicas WHERE service = ? AND number = ?", (replica.service, replica.number)
        )

    def add_event(self, name: str, kind: ServiceEventKind, *, replica: int | None = None, detail: str = "") -> None:
        """Add an event, and delete the oldest beyond the limit."""
        with self._database.transaction():
            row = self._database.row("SELECT max(number) AS newest FROM service_events WHERE service = ?", (name,))
            number = int(row["newest"] or 0) + 1 if row else 1
            self._database.execute(
                "INSERT INTO service_events (service, number, time_s, kind, replica, detail) VALUES (?, ?, ?, ?, ?, ?)",
                (name, number, self._now_s(), kind.value, replica, detail),
            )
            self._database.execute(
                "DELETE FROM service_events WHERE service = ? AND number <= ?", (name, number - EVENTS_MAX)
            )

    def list_events(self, name: str) -> Sequence[ServiceEvent]:
        """List the events of a service, oldest first."""
        rows = self._database.rows(
            "SELECT number, time_s, kind, replica, detail FROM service_events WHERE service = ? ORDER BY number",
            (name,),
        )
        return [read_row("service_events", f"{name}/{row['number']}", lambda row=row: _read_event(row)) for row in rows]  # type: ignore[misc]

    def delete(self, name: str) -> None:
        """Delete a service that is down, with its versions, events and secrets."""
        with self._database.transaction():
            service = self._must_get(name)
            versions = self._database.rows("SELECT version FROM service_versions WHERE service = ?", (name,))
            for table in ("service_versions", "service_replicas", "service_events"):
                self._database.execute(f"DELETE FROM {table} WHERE service = ?", (name,))
            self._database.execute("DELETE FROM services WHERE name = ?", (name,))
            for prefix in (KEYED, HISTORY):
                self._database.execute("DELETE FROM meta WHERE key = ?", (f"{prefix}{service.uid}",))
        for row in versions:
            self._secrets.forget(int(row["version"]), service.uid)

    def list_secrets(self) -> Iterator[tuple[Service, int, Mapping[str, str]]]:
        """Yield the secrets of each version that has some, with its service and number. Raises DamagedRowError."""
        for row in self._database.rows("SELECT service, version FROM service_versions WHERE secret_names != '[]'"):
            service, version = self._must_get(row["service"]), int(row["version"])
            secrets = self.get_task(service.name, version).secrets
            yield service, version, {name: secret.value for name, secret in secrets.items()}

    def write_secrets(self, uid: str, version: int, values: Mapping[str, str]) -> None:
        """Keep the secrets of a version that was imported. Raises StateError."""
        self._secrets.write(version, uid, values)

    def note_keys(self, service: Service) -> None:
        """Record that the service has API keys, so that no controller without them opens it to everyone."""
        self._database.write(
            "INSERT INTO meta (key, value) VALUES (?, '1') ON CONFLICT (key) DO NOTHING", (f"{KEYED}{service.uid}",)
        )

    def has_keys(self, service: Service) -> bool:
        """Return whether API keys were created for the service; revoked ones count."""
        return self._database.row("SELECT 1 FROM meta WHERE key = ?", (f"{KEYED}{service.uid}",)) is not None

    def put_placement_history(self, service: Service, history: str) -> None:
        """Store what its controller has observed. After a power cut, the last minutes are observed again."""
        self._database.write(
            "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (f"{HISTORY}{service.uid}", history),
            is_durable=False,
        )

    def get_placement_history(self, service: Service) -> str:
        """Return what `put_placement_history` stored last; "" before that."""
        row = self._database.row("SELECT value FROM meta WHERE key = ?", (f"{HISTORY}{service.uid}",))
        return read_text(row["value"]) if row else ""

    def _must_get(self, name: str) -> Service:
        service = self.get(name)
        if service is None:
            raise UsageError(f"unknown service `{name}`", hints=["list services with `broker serve status`"])
        return service

    def _now_s(self) -> float:
        return self._database.clock.now_s()


def _read_service(row: Row) -> Service:
    return read_row(
        "services",
        row["name"],
        lambda: Service(
            name=read_text(row["name"]),
            uid=read_text(row["uid"]),
            version=int(row["version"]),
            host=read_text(row["host"]),
            port=int(row["port"]),
            created_s=read_s(row["created_s"]),
            mode=UpdateMode(row["mode"]),
            wanted=int(row["wanted"]),
            down_requested=bool(row["down_requested"]),
            failure=read_text(row["failure"]),
        ),
    )


def _read_replica(name: str, row: Row) -> Replica:
    return read_row(
        "service_replicas", f"{name}/{row['number']}", lambda: msgspec.json.decode(row["body"], type=Replica)
    )


def _read_event(row: Row) -> ServiceEvent:
    return ServiceEvent(
        time_s=read_s(row["time_s"]),
        kind=ServiceEventKind(row["kind"]),
        replica=None if row["replica"] is None else int(row["replica"]),
        detail=read_text(row["detail"]),
    )
