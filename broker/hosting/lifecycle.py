"""Set up, upgrade and remove a server on its machine. Every step may be repeated, after the record announces it.

    up       record STARTING -> machine -> install -> start -> record UP
    down     record ENDING -> stop and remove -> end the machine -> no record

A command that was killed leaves the record, so the next `up` continues, and the next `down` removes what exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from broker import __version__
from broker.client.login import ServerLogin
from broker.client.remote import RemoteSession, check_handshake
from broker.dashboard.verbs import show_overview
from broker.errors import BrokerError, StateError, UsageError
from broker.formatting import format_usd
from broker.frozen import frozen
from broker.hosting.machines import HostMachine, call
from broker.hosting.record import HostedRecord, HostedServer, HostedStatus
from broker.runtime.package import list_requirements, pack_wheel
from broker.types import Secret


class FindsMachine(Protocol):
    """Provides the machine of a server."""

    def ensure(self, server: HostedServer) -> HostMachine:
        """Return the machine; create it first if it is a cluster. Raises BrokerError."""
        ...

    def find(self, server: HostedServer) -> HostMachine | None:
        """Return the machine; None if it was never created, or is gone."""
        ...

    def end(self, server: HostedServer) -> None:
        """End a machine that `ensure` created; already gone is success."""
        ...

    def make_settings(self, server: HostedServer) -> Mapping[str, str]:
        """Make the settings files of the machine's cloud for the server. Raises BrokerError."""
        ...

    def allow(self, server: HostedServer, owner: str) -> None:
        """Let the machine's own role start and end machines of `owner`, the server's ID. Raises BrokerError."""
        ...

    def end_login(self, server: HostedServer) -> None:
        """Delete the machine's own role; already gone is success. Raises BrokerError."""
        ...


@frozen
class WorkCounts:
    """The number of live jobs, clusters, services and schedules of a server, and the price of all its machines."""

    jobs: int
    clusters: int
    services: int
    schedules: int
    usd_hour: float

    @property
    def is_busy(self) -> bool:
        """Whether anything runs, is due later, or costs money, such as the machines of a job that has just ended."""
        return bool(self.jobs or self.clusters or self.services or self.schedules or self.usd_hour)

    def describe(self) -> str:
        """Return the counts above 0, such as `2 jobs, 1 cluster`, or else the price of the machines."""
        counts = (
            ("job", self.jobs), ("cluster", self.clusters), ("service", self.services), ("schedule", self.schedules)
        )  # fmt: skip
        told = [f"{count} {noun}{'s' if count > 1 else ''}" for noun, count in counts if count]
        return ", ".join(told or [f"machines for {format_usd(self.usd_hour)} USD/h that are not confirmed as gone"])


class Hosting:
    """Brings up, upgrades and takes down the server of one installation."""

    def __init__(
        self, record: HostedRecord, machines: FindsMachine, *, owner: str, note: Callable[[str], None]
    ) -> None:
        self.owner = owner
        self._record = record
        self._machines = machines
        self._note = note

    def bring_up(self, wanted: HostedServer) -> HostedServer:
        """Set up the server, or continue where an earlier call stopped. Raises UsageError if another one exists."""
        known = self._record.read()
        if known is not None and known.status is HostedStatus.ENDING:
            self._note("completing the `down` that was interrupted")
            self._end(known, is_forced=False)
            known = None
        if known is not None and known.infra != wanted.infra:
            raise UsageError(
                f"this installation already has a server on {known.infra}",
                hints=["see `broker server status`", "remove it with `broker server down`"],
            )
        if known is not None and wanted.config not in ("", known.config):
            if known.config:
                raise UsageError(
                    "this server has another location for its backups",
                    hints=["change `backup` in `config.toml` in its state folder, and restart it"],
                )
            known = replace(known, config=wanted.config)
        if known is not None and known.login != wanted.login and self._machines.find(known) is None:
            self._machines.end_login(known)  # no machine has it; an earlier call may have been denied a part of it
            known = replace(known, login=wanted.login)
        begun = known or wanted
        self._record.write(begun)
        machine = self._machines.ensure(begun)
        self._note(f"installing broker {__version__}")
        return self._install_and_start(begun, machine)

    def upgrade(self) -> HostedServer:
        """Replace the server's program with the one that runs here; jobs continue.

        Raises StateError if that fails, and UsageError for a server that is being removed.
        """
        server = self.get()
        if server.status is HostedStatus.ENDING:  # its state may be deleted already, and an empty one would look whole
            raise UsageError(
                "the server is being removed: `broker server down` was interrupted",
                hints=["complete the removal with `broker server down`", "or set it up again with `broker server up`"],
            )
        machine = self.find_machine(server)
        return self._install_and_start(server, machine)

    def _install_and_start(self, server: HostedServer, machine: HostMachine) -> HostedServer:
        wheel = pack_wheel()
        needs = list_requirements(server.extras)
        base = {"folder": server.folder, "owner": self.owner, "digest": wheel.digest}
        restoring = {"restore_from": server.restore_from, "files": self._read_key()} if server.restore_from else {}
        install = {
            **base, **restoring, "verb": "install", "python": server.python, "config": server.config,
            "settings": self._make_settings(server),
            "needs": [[each.name, each.least] for each in needs], "packages": [each.text for each in needs],
        }  # fmt: skip
        arguments = ["--host", machine.listens_on, "--port", str(server.port), *server.options]
        installed = asyncio.run(call(machine, install, wheel.content))
        if installed["owner"]:  # restored jobs continue at once, and this version may need other permissions
            self._allow(server, installed["owner"])
        found = asyncio.run(call(machine, {**base, "verb": "start", "arguments": arguments}))
        if found["owner"] != installed["owner"]:
            self._allow(server, found["owner"])
        scheme = "http" if found["listening"]["fingerprint"] is None else "https"
        up = replace(
            server, status=HostedStatus.UP, url=f"{scheme}://{machine.address}:{server.port}",
            fingerprint=found["listening"]["fingerprint"], version=found["listening"]["version"],
        )  # fmt: skip
        self._record.write_private("admin.token", found["token"] + "\n")
        if found["key"]:
            self._record.write_private("secret.key", found["key"])
        self._record.write(up)
        return up

    def _make_settings(self, server: HostedServer) -> Mapping[str, str]:
        try:
            return self._machines.make_settings(server)
        except BrokerError as error:
            if server.status is HostedStatus.STARTING:
                raise
            self._note(f"note: the settings of `{server.cloud}` were not sent again: {error.message}")
            return {}

    def _allow(self, server: HostedServer, owner: str) -> None:
        try:
            self._machines.allow(server, owner)
        except BrokerError as error:
            if server.status is HostedStatus.STARTING:
                raise
            self._note(f"note: the permissions of `{server.login.name}` were not updated: {error.message}")

    def _read_key(self) -> Mapping[str, str]:
        path = self._record.key_path
        return {"secret.key": path.read_text()} if path.exists() else {}

    def read_status(self) -> tuple[HostedServer, Mapping[str, Any]]:
        """Return the record and the machine's report; without a machine, the report that nothing is installed."""
        server = self.get()
        machine = self._machines.find(server)
        if machine is None:
            return server, {"is_installed": False}
        request = {"folder": server.folder, "owner": self.owner, "verb": "status"}
        found = asyncio.run(call(machine, request))
        return server, {name: value for name, value in found.items() if name not in ("token", "key")}

    def take_down(self, *, is_forced: bool) -> WorkCounts | None:
        """Remove the server, and terminate its cluster if it has one. Raises UsageError if it has work, unless forced.

        Return the work it had; None if that is unknown.
        """
        server = self.get()
        counts = None
        if server.status is not HostedStatus.ENDING:
            counts = self._count(server, is_forced=is_forced)
            if counts is not None and counts.is_busy and not is_forced:
                raise UsageError(
                    f"the server runs {counts.describe()}",
                    hints=["end them first: `broker jobs cancel --all`, `broker serve down --all`, "
                           "`broker jobs schedules remove NAME`, `broker down --all`",
                           "`broker server down --force` removes the server and leaves them running"],
                )  # fmt: skip
        self._end(server, is_forced=is_forced)
        return counts

    def _count(self, server: HostedServer, *, is_forced: bool) -> WorkCounts | None:
        try:
            overview = self.open(server).call(show_overview)
            services, schedules = (len(each) for each in self._list_lasting(server))
            return WorkCounts(
                jobs=overview.live_count, clusters=len(overview.clusters), services=services, schedules=schedules,
                usd_hour=overview.usd_hour,
            )  # fmt: skip
        except BrokerError as error:
            if is_forced or server.status is HostedStatus.STARTING:
                return None
            raise StateError(
                f"cannot find out what the server runs: {error.message}",
                hints=("repair it with `broker server up`", "remove it regardless: `broker server down --force`"),
            ) from None

    def _list_lasting(self, server: HostedServer) -> tuple[Sequence[object], Sequence[object]]:
        """List the services and the schedules of the server."""
        from broker.app.verbs.schedules import list_schedules
        from broker.app.verbs.services import list_services

        session = self.open(server)
        return session.call(list_services, names=()), session.call(list_schedules)

    def _end(self, server: HostedServer, *, is_forced: bool) -> None:
        """Remove the server, then its machine; a cluster is terminated even if its node does not answer."""
        self._record.write(replace(server, status=HostedStatus.ENDING))
        machine = self._machines.find(server)
        if machine is not None and self._has_new_work(machine, server, is_forced=is_forced):
            self._record.write(replace(server, status=HostedStatus.UP))
            raise UsageError(
                "the server got work while it was being removed, so it continues",
                hints=[
                    "list the work: `broker jobs queue --all-users`, `broker status --all-users`",
                    "if the server does not answer, start it again: `broker server up`",
                ],
            )
        self._machines.end(server)
        try:
            self._machines.end_login(server)
        except BrokerError as error:
            if not is_forced:
                raise
            self._note(f"note: the role `{server.login.name}` was not deleted: {error.message}")
        self._record.forget()

    def _has_new_work(self, machine: HostMachine, server: HostedServer, *, is_forced: bool) -> bool:
        """Remove the server from its machine; return whether it continues there because it has got work."""
        request = {**self.make_request(server), "verb": "remove", "is_idle_only": not is_forced}
        try:
            return bool(asyncio.run(call(machine, request)).get("has_work"))
        except BrokerError as error:
            if server.cluster is None and not is_forced:
                hints = (*error.hints, "forget the server without reaching it: `broker server down --force`")
                raise StateError(error.message, hints=hints) from error
            self._note(f"note: the server was not removed from its machine: {error.message}")
            return False

    def get(self) -> HostedServer:
        """Return the record. Raises UsageError if there is no server."""
        server = self._record.read()
        if server is None:
            raise UsageError(
                "this installation has no server", hints=["set one up: `broker server up --infra ssh://HOST`"]
            )
        return server

    def find_machine(self, server: HostedServer) -> HostMachine:
        """Return the server's machine. Raises StateError if it is gone."""
        machine = self._machines.find(server)
        if machine is None:
            raise StateError("the server's machine is gone", hints=("repeat `broker server up`",))
        return machine

    def make_request(self, server: HostedServer) -> dict[str, object]:
        """Return the fields that every request to the host program has."""
        return {"folder": server.folder, "owner": self.owner}

    def make_login(self, server: HostedServer) -> ServerLogin:
        """Return the administrator's login."""
        token = Secret(value=self._record.token_path.read_text().strip())
        return ServerLogin(url=server.url, token=token, fingerprint=server.fingerprint)

    def open(self, server: HostedServer) -> RemoteSession:
        """Open a session as administrator. Raises BrokerError if the server does not answer."""
        try:
            session = RemoteSession(self.make_login(server), on_note=self._note)
        except OSError:
            raise StateError(
                "the server is not completely set up", hints=("complete it with `broker server up`",)
            ) from None
        check_handshake(session)
        return session
