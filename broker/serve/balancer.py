"""The balancer of one service: a separate process, started and replaced by the service's controller.

It reads the replicas' addresses from `routing.json` whenever that changes, probes them, and writes `load.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Sequence

from broker.clock import Clock
from broker.errors import BrokerError, StateError
from broker.locks import try_lock
from broker.serve.admission import Gate
from broker.serve.credentials import read_stamp
from broker.serve.data_path import DataPath
from broker.serve.files import Load, Routing, ServiceFolder, read_file, write_file
from broker.serve.haproxy_path import HaproxyPath
from broker.serve.http_path import HttpPath
from broker.serve.keys import UsageBook, read_keys, read_usage
from broker.serve.memory import MemoryTrimmer, find_malloc_trim, freeze_heap
from broker.serve.router_path import RouterPath
from broker.serve.routes import BackendRoute, RouteTable
from broker.serve.tcp_path import TcpPath
from broker.types import BalancerType, ServiceProtocol

log = logging.getLogger(__name__)

POLL_S = 0.05
WRITE_EVERY_S = 0.5
# asyncio gives each TLS connection a buffer of 256 KiB and reads as much at once: 5 GiB for 10,000 idle streams.
TLS_BUFFER_BYTES = 4 << 10  # several events of a stream; a record of 16 KiB takes four reads


async def run_balancer(folder: ServiceFolder, *, clock: Clock) -> None:
    """Serve until the routing file or SIGTERM ends it; return at once if another balancer serves this folder.

    Raises StateError without a routing file, OSError if the port is in use.
    """
    with try_lock(folder.lock) as is_held:
        if not is_held:
            return
        routing = read_file(folder.routing, Routing)
        if routing is None:
            raise StateError(f"there is no {folder.routing}")
        if not routing.is_stopped:
            SSLProtocol.max_size = TLS_BUFFER_BYTES
            balancer = Balancer(folder, routing, clock=clock)
            freeze_heap()
            await balancer.run()


class Balancer:
    """Accept, route and count requests of one service."""

    def __init__(self, folder: ServiceFolder, routing: Routing, *, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._routing = routing
        self._seen = -1
        self._elsewhere_seen: int | None = None
        self.table = RouteTable(clock=clock)
        self._route(routing)
        self._probes: dict[int, tuple[BackendRoute, asyncio.Task[None]]] = {}
        self.gate = self._open_gate()
        self.path = self._make_path()

    async def run(self) -> None:
        """Serve until stopped; open requests get ten seconds to end.

        An unexpected error in a task ends the balancer, which is then started again: without that task, it would keep
        sending requests to replicas that are gone.
        """
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stopped.set)
        async with self.listen() as port:
            log.info("listening on port %s", port)
            work = (stopped.wait(), self._watch(stopped), self._write_forever())
            tasks = [asyncio.ensure_future(each) for each in work]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    each.result()
            finally:
                loop.remove_signal_handler(signal.SIGTERM)
                for each in tasks:
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _open_gate(self) -> Gate:
        """Read keys and usage; while a file is unreadable, no request is admitted."""
        ring, self._written = None, UsageBook()
        self._keys_seen = read_stamp(self._folder.keys)
        try:
            self._written = read_usage(self._folder)
            ring = read_keys(self._folder)
        except StateError as error:
            log.error("no request is admitted: %s", error)
        gate = Gate(ring, self._written, host=self._routing.host, clock=self._clock)
        gate.share(self._routing.balancers)
        return gate

    def _watch_keys(self) -> None:
        """Adopt keys that were created or revoked; a missing or unreadable file changes nothing."""
        stamp = read_stamp(self._folder.keys)
        if stamp in (None, self._keys_seen):
            return
        self._keys_seen = stamp
        try:
            self.gate.adopt(read_keys(self._folder))
        except StateError as error:
            log.warning("%s", error)

    def _watch_other_usage(self) -> None:
        """Adopt the usage at the other gateways; a file that cannot be read changes nothing."""
        stamp = read_stamp(self._folder.other_usage)
        if stamp in (None, self._elsewhere_seen):
            return
        self._elsewhere_seen = stamp
        try:
            self.gate.adopt_elsewhere(read_file(self._folder.other_usage, UsageBook) or UsageBook())
        except StateError as error:
            log.warning("%s", error)

    def _make_path(self) -> DataPath:
        """Return the data path that the routing file requests."""
        table, routing, folder, clock = self.table, self._routing, self._folder, self._clock
        if routing.balancer is BalancerType.HAPROXY:
            return HaproxyPath(table, routing, folder, clock=clock)
        if routing.balancer.is_router:
            return RouterPath(table, routing, folder, self.gate, clock=clock)
        if routing.protocol is ServiceProtocol.HTTP:
            return HttpPath(table, routing, folder, self.gate, clock=clock)
        return TcpPath(table, routing, folder, clock=clock)

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[int]:
        """Listen and probe; yield the port."""
        async with self.path.listen() as port:
            try:
                self.adopt(self._routing)
                yield port
            finally:
                probes = [probe for _, probe in self._probes.values()]
                for probe in probes:
                    probe.cancel()
                await asyncio.gather(*probes, return_exceptions=True)

    def _route(self, routing: Routing) -> Sequence[BackendRoute]:
        return self.table.update(
            routing.backends, routing.shares, region=routing.region, near_in_flight_max=routing.near_in_flight_max
        )

    def adopt(self, routing: Routing) -> None:
        """Adopt the replicas of a routing file."""
        self._routing = routing
        self.gate.share(routing.balancers)
        gone = self._route(routing)
        self.path.adopt(routing)
        self.path.cut(gone)
        for number, (route, probe) in list(self._probes.items()):
            if self.table.routes.get(number) is not route:
                probe.cancel()
                del self._probes[number]
        for number, route in self.table.routes.items():
            if number not in self._probes:  # also a replica that has another address: it is probed at once
                self._probes[number] = route, asyncio.ensure_future(self._probe_forever(route))
        self.write_load()

    def write_load(self) -> None:
        """Write the present load for the controller."""
        counts = self.path.counts
        window, windows = self.path.describe()
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
            totals=self.path.describe_totals(),
            replicas=self.table.describe(windows),
            certificate_ends_s=self.path.find_expiry_s(),
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
            self._watch_other_usage()
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
            await self._clock.sleep(POLL_S)

    async def _write_forever(self) -> None:
        trimmer = MemoryTrimmer(find_malloc_trim())
        while True:
            await self.path.refresh()
            self.write_load()
            trimmer.observe(self.path.counts.in_flight)
            await self._clock.sleep(WRITE_EVERY_S)

    async def _probe_forever(self, route: BackendRoute) -> None:
        """Probe one replica, at the end of each interval; changes are written at once."""
        while True:
            was_ready = route.is_ready
            error = await self.path.probe(route)
            is_excluded = was_ready and not route.is_ready  # by a request, which waits for a replica now
            if error:
                self.table.exclude(route, error)
            else:
                self.table.admit(route)
            if is_excluded or route.is_ready != was_ready:
                log.info("replica %s is %s", route.backend.number, "ready" if route.is_ready else f"not ready: {error}")
                self.write_load()
                self.path.wake()
            await self._clock.sleep(self._routing.find_probe(route.backend.version).interval_s)
