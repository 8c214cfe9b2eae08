"""HAProxy between clients and replicas: this process configures it, and reports its loads.

replicas, drains or shares change      write the configuration, reload
a probe changes what is ready          set the states of servers
HAProxy is gone                        start it again
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import aiohttp

from broker.clock import Clock
from broker.errors import StateError
from broker.serve import haproxy_config as config
from broker.serve.connections import ReplicaConnector
from broker.serve.credentials import ListenerFiles, make_client_context, read_certificate
from broker.serve.data_path import RETRY_S, ChildChanges, Counts, find_exposure
from broker.serve.files import LoadTotals, LoadWindow, Routing, ServiceFolder
from broker.serve.haproxy_control import CONFIG, HaproxyControl, NoAnswerError
from broker.serve.probing import probe_connection, probe_request
from broker.serve.routes import BackendRoute, RouteTable
from broker.types import ServiceProtocol

log = logging.getLogger(__name__)


class HaproxyPath:
    """Implement `DataPath` with HAProxy."""

    def __init__(self, table: RouteTable, routing: Routing, folder: ServiceFolder, *, clock: Clock) -> None:
        self.counts = Counts()
        self._table, self._routing, self._folder, self._clock = table, routing, folder, clock
        self._control = HaproxyControl(folder.path)
        self._context = make_client_context(folder)
        self._renewal = None if routing.tls is None else ListenerFiles(routing.tls)
        self._session: aiohttp.ClientSession | None = None
        self._changes = ChildChanges(clock=clock)
        self._served = ""  # the structure that the running worker has
        self._gone: list[str] = []  # servers to which old workers may have connections
        self._ended: dict[int, tuple[int, int]] = {}  # arrivals and broken ones by worker, of all so far

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[int]:
        """Start HAProxy; yield its port. Raises StateError."""
        if fault := find_exposure(self._routing, self._routing.host):
            raise StateError(fault)
        async with aiohttp.ClientSession(
            connector=ReplicaConnector(self._context), cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            self._session = session
            self._write_credentials()
            self._write_config()
            await self._control.start()
            self._served = self._describe_structure()
            applying = self._changes.apply_forever(self._apply, errors=(NoAnswerError, StateError), child="haproxy")
            tasks = [asyncio.ensure_future(each) for each in (applying, self._restart_forever())]
            try:
                yield self._routing.port
            finally:
                for each in tasks:
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._control.stop()

    def adopt(self, routing: Routing) -> None:
        """Reload with the new replicas, in a task of its own."""
        self._routing = routing
        self._changes.note()

    def cut(self, gone: Sequence[BackendRoute]) -> None:
        """End the connections to them once the new worker has taken over, in a task of its own.

        They may be to machines that vanished, which the old worker would keep for an hour.
        """
        self._gone += [config.name_server(each.backend) for each in gone]
        self._changes.note()

    def wake(self) -> None:
        """Enable the servers of ready replicas and disable the others, in a separate task."""
        self._changes.note()

    async def probe(self, route: BackendRoute) -> str:
        """Probe as the builtin balancer does."""
        if self._routing.protocol is not ServiceProtocol.HTTP:
            return await probe_connection(route, self._context, self._routing.find_probe(route.backend.version))
        assert self._session is not None
        return await probe_request(self._session, route, self._routing.find_probe(route.backend.version))

    async def refresh(self) -> None:
        """Use renewed certificates, and read the figures of all workers; without an answer, keep the last ones."""
        if self._renewal is not None and self._renewal.are_renewed():
            self._use_renewed_files()
        busy: Counter[str] = Counter()
        queued = 0
        try:
            for worker in await self._control.list_workers():
                figures = await self._control.read_figures(worker)
                broken = sum(each.broken for each in figures.servers)
                self._ended[worker.pid] = figures.arrivals, broken
                queued += figures.queued
                for each in figures.servers:
                    busy[each.name] += each.in_flight
        except NoAnswerError:
            return
        for route in self._table.routes.values():
            route.in_flight = busy[config.name_server(route.backend)]
        self.counts.arrivals = sum(arrivals for arrivals, _ in self._ended.values())
        self.counts.broken = sum(broken for _, broken in self._ended.values())
        self.counts.in_flight, self.counts.waiting = sum(busy.values()) + queued, queued

    def _use_renewed_files(self) -> None:
        try:
            self._write_credentials()
        except StateError as error:
            log.warning("%s", error.message)
            return
        self._served = ""
        self._changes.note()

    def describe(self) -> tuple[LoadWindow, Mapping[int, LoadWindow]]:
        """Return nothing: HAProxy keeps no times of the last minute."""
        return LoadWindow(), {}

    def describe_totals(self) -> LoadTotals:
        """Return nothing, for the same reason."""
        return LoadTotals()

    def find_expiry_s(self) -> float | None:
        """Return when the certificate that clients get expires; None without one."""
        return None if self._renewal is None else self._renewal.ends_s

    async def _apply(self) -> None:
        """Apply the current routing and readiness to HAProxy. Raises NoAnswerError, StateError."""
        gone = self._gone[:]
        self._write_config()  # also for a process that starts later
        structure = self._describe_structure()
        if structure != self._served:
            if not await self._control.reload():
                raise StateError("the configuration was not applied; see the log of the balancer")
            self._served = structure
        if gone:
            await self._control.end_sessions(gone)
            del self._gone[: len(gone)]  # not those of a later routing file
        ready = self._list_ready()
        for name, backends in config.group_backends(self._routing).items():
            for each in backends:
                await self._control.set_state(f"{name}/{config.name_server(each)}", config.choose_state(each, ready))

    async def _restart_forever(self) -> None:
        while True:
            await self._control.wait()
            log.error("haproxy has ended; it is started again")
            await self._clock.sleep(RETRY_S)
            with contextlib.suppress(StateError):
                await self._control.start()
                self._served = ""
                self._changes.note()

    def _list_ready(self) -> frozenset[int]:
        return frozenset(number for number, route in self._table.routes.items() if route.is_ready)

    def _describe_structure(self) -> str:
        """Return the part of the routing whose change requires a reload: everything except readiness."""
        return config.render(self._routing, [each.number for each in self._routing.backends])

    def _write_config(self) -> None:
        self._write(CONFIG, config.render(self._routing, self._list_ready()))

    def _write_credentials(self) -> None:
        """Write the certificates in the form that HAProxy reads: key and certificate in one file."""
        folder, tls = self._folder, self._routing.tls
        if folder.replica_pem.exists():
            self._write(config.REPLICAS_CA, read_certificate(folder.replica_pem))
        if tls is None:
            return
        paths = dict.fromkeys((tls.certificate_path, tls.key_path))
        try:
            self._write(config.CLIENTS_PEM, "\n".join(Path(each).read_text(encoding="ascii") for each in paths))
            if tls.client_ca_path is not None:
                self._write(config.CLIENT_CA, Path(tls.client_ca_path).read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            raise StateError(f"cannot read a certificate of the balancer: {error}") from error

    def _write(self, name: str, text: str) -> None:
        """Replace a file of the folder, which only its owner may read. Raises StateError."""
        path = self._folder.path / name
        aside = path.with_name(f".{name}.{os.getpid()}")
        try:
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
                file.write(text)
            shutil.move(aside, path)
        except OSError as error:
            raise StateError(f"cannot write {path}: {error}") from error
