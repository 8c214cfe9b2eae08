"""The balancer of one service: a process of its own, started and replaced by the service's controller.

It reads where the replicas are from `routing.json` as soon as that changes, probes them, and writes `load.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from aiohttp import web

from broker.clock import Clock
from broker.errors import BrokerError, StateError
from broker.locks import try_lock
from broker.serve.admission import Gate
from broker.serve.connections import ReplicaConnector
from broker.serve.credentials import make_client_context
from broker.serve.files import Load, Routing, ServiceFolder, read_file, write_file
from broker.serve.keys import UsageBook, read_keys, read_usage
from broker.serve.proxying import Proxy
from broker.serve.routes import BackendRoute, RouteTable

log = logging.getLogger(__name__)

LOOK_S = 0.05
WRITE_EVERY_S = 0.5
CLOSE_S = 10.0  # for open requests when the balancer is stopped
HEADER_BYTES_MAX = 32 << 10
# asyncio gives each TLS connection a buffer of 256 KiB and reads as much at once: 5 GiB for 10,000 idle streams.
TLS_BUFFER_BYTES = 4 << 10  # several events of a stream; a record of 16 KiB takes four reads


async def run_balancer(folder: ServiceFolder, *, clock: Clock) -> None:
    """Serve until the routing file or SIGTERM ends it; return at once if another balancer serves this folder.

    Raises StateError without a routing file, OSError where the port is taken.
    """
    with try_lock(folder.lock) as is_held:
        if not is_held:
            return
        routing = read_file(folder.routing, Routing)
        if routing is None:
            raise StateError(f"there is no {folder.routing}")
        if not routing.is_stopped:
            SSLProtocol.max_size = TLS_BUFFER_BYTES
            await Balancer(folder, routing, clock=clock).run()


class Balancer:
    """Accept, route and count requests of one service."""

    def __init__(self, folder: ServiceFolder, routing: Routing, *, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._routing = routing
        self._seen = -1
        self.table = RouteTable(clock=clock)
        self.table.update(routing.backends, routing.shares)
        self._probes: dict[int, asyncio.Task[None]] = {}
        self.gate = self._open_gate()
        self.proxy: Proxy | None = None

    async def run(self) -> None:
        """Serve until stopped; open requests get ten seconds to end."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stopped.set)
        async with self.listen() as port:
            log.info("listening on port %s", port)
            watching = asyncio.ensure_future(self._watch(stopped))
            writing = asyncio.ensure_future(self._write_forever())
            try:
                await stopped.wait()
            finally:
                loop.remove_signal_handler(signal.SIGTERM)
                for each in (watching, writing):
                    each.cancel()
                await asyncio.gather(watching, writing, return_exceptions=True)

    def _open_gate(self) -> Gate:
        """Read keys and usage; a file that cannot be read closes the service until it can be."""
        ring, self._written = None, UsageBook()
        self._keys_seen = read_stamp(self._folder.keys)
        try:
            self._written = read_usage(self._folder)
            ring = read_keys(self._folder)
        except StateError as error:
            log.error("no request is admitted: %s", error)
        return Gate(ring, self._written, host=self._routing.host, clock=self._clock)

    def _watch_keys(self) -> None:
        """Adopt keys that were created or revoked; a file that cannot be read, or is gone, changes nothing."""
        stamp = read_stamp(self._folder.keys)
        if stamp in (None, self._keys_seen):
            return
        self._keys_seen = stamp
        try:
            self.gate.adopt(read_keys(self._folder))
        except StateError as error:
            log.warning("%s", error)

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[int]:
        """Listen and probe; yield the port."""
        async with aiohttp.ClientSession(
            connector=ReplicaConnector(make_client_context(self._folder)),
            cookie_jar=aiohttp.DummyCookieJar(),  # a jar would send one client's cookies for all of them
            skip_auto_headers=("user-agent", "accept-encoding", "content-type"),
            auto_decompress=False,
        ) as session:
            draw = random.Random()
            self.proxy = Proxy(self.table, session, self._routing, self.gate, clock=self._clock, draw=draw)
            server = web.Server(self.proxy.handle, access_log=None, max_field_size=HEADER_BYTES_MAX)
            runner = web.ServerRunner(server, shutdown_timeout=CLOSE_S)
            await runner.setup()
            try:
                site = web.TCPSite(runner, self._routing.host, self._routing.port, ssl_context=self._make_tls())
                await site.start()
                self.adopt(self._routing)
                yield int(runner.addresses[0][1])
            finally:
                for probe in self._probes.values():
                    probe.cancel()
                await asyncio.gather(*self._probes.values(), return_exceptions=True)
                await runner.cleanup()

    def adopt(self, routing: Routing) -> None:
        """Take over the replicas of a routing file."""
        assert self.proxy is not None
        self._routing = routing
        self.proxy.adopt(routing)
        self.table.update(routing.backends, routing.shares)
        for number in [each for each in self._probes if each not in self.table.routes]:
            self._probes.pop(number).cancel()
        for number in self.table.routes:
            if number not in self._probes:
                self._probes[number] = asyncio.ensure_future(self._probe_forever(number))
        self.write_load()

    def write_load(self) -> None:
        """Write the present load for the controller."""
        assert self.proxy is not None
        counts = self.proxy.counts
        window, windows = self.proxy.meter.describe()
        load = Load(
            generation=self._routing.generation,
            time_s=self._clock.now_s(),
            pid=os.getpid(),
            arrivals=counts.arrivals,
            in_flight=counts.in_flight,
            waiting=counts.waiting,
            resumed=counts.resumed,
            broken=counts.broken,
            window=window,
            replicas=self.table.describe(windows),
        )
        try:
            write_file(self._folder.load, load)
            if self.gate.has_keys and self.gate.usage != self._written:
                write_file(self._folder.usage, self.gate.usage)
                self._written = self.gate.usage
        except BrokerError as error:  # a full disk must not end requests
            log.warning("%s", error.message)

    async def _watch(self, stopped: asyncio.Event) -> None:
        """Adopt each new routing file; stop when it says so, or when the service's folder is gone."""
        while True:
            self._watch_keys()
            try:
                stamp = self._folder.routing.stat().st_mtime_ns
                routing = read_file(self._folder.routing, Routing) if stamp != self._seen else self._routing
            except (OSError, StateError) as error:
                if not self._folder.path.exists():
                    stopped.set()
                    return
                log.warning("%s", error)
                routing = self._routing
            else:
                self._seen = stamp
            if routing is not None and routing.generation != self._routing.generation:
                self.adopt(routing)
            if routing is not None and routing.is_stopped:
                stopped.set()
                return
            await self._clock.sleep(LOOK_S)

    async def _write_forever(self) -> None:
        while True:
            self.write_load()
            await self._clock.sleep(WRITE_EVERY_S)

    async def _probe_forever(self, number: int) -> None:
        """Probe one replica, at the end of each interval; changes are written at once."""
        while (route := self.table.routes.get(number)) is not None:
            was_ready = route.is_ready
            error = await self._probe(route)
            if error:
                self.table.exclude(route, error)
            else:
                self.table.admit(route)
            if route.is_ready != was_ready:
                log.info("replica %s is %s", number, "ready" if route.is_ready else f"not ready: {error}")
                self.write_load()
                if self.proxy and route.is_ready:
                    self.proxy.wake()
            await self._clock.sleep(self._routing.probe.interval_s)

    async def _probe(self, route: BackendRoute) -> str:
        """Return why the replica is not ready; empty if it is."""
        assert self.proxy is not None
        probe = self._routing.probe
        timeout = aiohttp.ClientTimeout(total=probe.timeout_s)
        method = "GET" if probe.post_data is None else "POST"
        headers = {"content-type": "application/json", **probe.headers} if probe.post_data else probe.headers
        url = f"{route.base_url}/{probe.path.lstrip('/')}"
        try:
            async with self.proxy.session.request(
                method, url, data=probe.post_data, headers=headers, timeout=timeout
            ) as response:
                return "" if response.status < 300 else f"the readiness probe returned {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"the readiness probe failed: {str(error) or type(error).__name__}"

    def _make_tls(self) -> ssl.SSLContext | None:
        if self._routing.tls is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._routing.tls.certificate_path, self._routing.tls.key_path)
        return context


def read_stamp(path: Path) -> int | None:
    """Return the time of a file's last change in nanoseconds; None without a file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
