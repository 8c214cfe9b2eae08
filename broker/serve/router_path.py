"""An inference router, such as smg or vllm-router, between broker's own balancer and replicas.

    clients -> this process (TLS, API keys, quotas, tokens) -> router -> this process -> replicas

The router chooses the replica of each request. It sees each one as a worker on the loopback, at which this process
listens: so it needs no certificate of replicas, their loads are exact, and their connections end with them. Clients
reach only the paths of inference, and none that changes the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from aiohttp import web

from broker.clock import Clock
from broker.errors import StateError
from broker.serve.admission import Gate
from broker.serve.answers import refuse
from broker.serve.data_path import RETRY_S, ChildChanges, Counts
from broker.serve.files import Backend, LoadTotals, LoadWindow, Routing, ServiceFolder
from broker.serve.http_path import HttpPath, listen
from broker.serve.keys import KeyRing, UsageBook
from broker.serve.proxying import PassLimits, Proxy
from broker.serve.router_process import LOOPBACK, PROGRAMS, RouterError, RouterProcess
from broker.serve.routes import BackendRoute, RouteTable

log = logging.getLogger(__name__)

POLL_S, POLL_S_MAX = 0.05, 1.0  # until the router has taken over a change of its workers; doubled each time
LATE_S = 10.0  # a worker that the router has not taken over by then is added again
HEALTH = "/health"
INFERENCE_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses", "/v1/rerank"),
        *("/v1/classify", "/v1/score", "/v1/models", "/v1/audio/transcriptions", "/generate", "/rerank", HEALTH),
    }
)


class RouterPath:
    """Implement `DataPath` with a router."""

    def __init__(self, table: RouteTable, routing: Routing, folder: ServiceFolder, gate: Gate, *, clock: Clock) -> None:
        self._table, self._routing, self._clock = table, routing, clock
        self._routers = RouteTable(clock=clock)  # has one route
        limits = PassLimits(paths=INFERENCE_PATHS, continues=PROGRAMS[routing.balancer].takes_token_ids)
        self._front = HttpPath(self._routers, routing, folder, gate, clock=clock, limits=limits)
        self.counts: Counts = self._front.counts
        self._process = RouterProcess(routing.balancer, routing.balancing, folder.path)
        self._endpoints: dict[BackendRoute, ReplicaEndpoint] = {}
        self._asked_s: dict[str, float] = {}  # when the router was told of a worker, by URL
        self._changes = ChildChanges(clock=clock)
        self._has_workers = False  # the router has a ready one

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[int]:
        """Listen and start the router; yield the port. Raises StateError, and OSError if the port is taken.

        Open requests get ten seconds to end, and then the router is ended.
        """
        try:
            async with self._front.listen() as port:
                await self._start()
                applying = self._changes.apply_forever(
                    self._apply, errors=(RouterError, OSError), child=self._routing.balancer
                )
                tasks = [asyncio.ensure_future(each) for each in (applying, self._restart_forever())]
                try:
                    yield port
                finally:
                    for each in tasks:
                        each.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self._process.stop()
            await asyncio.gather(*(each.tidy(is_gone=True) for each in self._endpoints.values()))

    def adopt(self, routing: Routing) -> None:
        """Act on another routing file, in a task of its own."""
        self._routing = routing
        self._front.adopt(routing)
        self._changes.note()

    def cut(self, gone: Sequence[BackendRoute]) -> None:
        """Cut off the connections to them: the router's requests end, and streams continue elsewhere."""
        self._front.cut(gone)

    def wake(self) -> None:
        """Add ready replicas to the router and remove the others, in a task of its own."""
        self._admit()
        self._changes.note()

    async def probe(self, route: BackendRoute) -> str:
        """Send the readiness request to the replica itself."""
        return await self._front.probe(route)

    async def refresh(self) -> None:
        """Use renewed certificates; the counts are this process's own."""
        await self._front.refresh()
        self._admit()

    def describe(self) -> tuple[LoadWindow, Mapping[int, LoadWindow]]:
        """Return the responses of the last minute, in all and by replica."""
        by_replica = {
            route.backend.number: endpoint.proxy.meter.describe()[0] for route, endpoint in self._endpoints.items()
        }
        return self._front.describe()[0], by_replica

    def describe_totals(self) -> LoadTotals:
        """Return the responses since the balancer started."""
        return self._front.describe_totals()

    def find_expiry_s(self) -> float | None:
        """Return when the certificate that clients get expires; None without one."""
        return self._front.find_expiry_s()

    async def _start(self) -> None:
        self._has_workers = False
        self._asked_s.clear()
        await self._process.start()
        self._route()
        self._changes.note()

    def _route(self) -> None:
        """Send requests to the router's present port. What is known about engines holds for one version."""
        version = max((each.version for each in self._routing.backends), default=0)
        self._routers.update([Backend(number=0, version=version, host=LOOPBACK, port=self._process.port)])
        for each in self._routers.routes.values():
            each.is_router = True
        self._admit()

    def _admit(self) -> None:
        """Let requests pass while the router has a ready worker; otherwise, they wait."""
        is_ready = self._has_workers and bool(self._list_wanted())
        for each in self._routers.routes.values():
            if is_ready:
                self._routers.admit(each)
            else:
                self._routers.exclude(each, "no replica is ready")
        if is_ready:
            self._front.wake()

    def _list_wanted(self) -> list[BackendRoute]:
        """List the replicas to which the router may send requests."""
        ready = [each for each in self._table.routes.values() if each.is_ready and not each.backend.is_draining]
        return [each for each in ready if not each.backend.is_leaving] or ready

    async def _apply(self) -> None:
        """Bring the router's workers to the ready replicas. Raises RouterError, OSError."""
        self._route()
        for route, endpoint in list(self._endpoints.items()):
            if route.is_gone:
                del self._endpoints[route]
            await endpoint.tidy(is_gone=route.is_gone)
        pause_s = POLL_S
        while not self._changes.has_next:
            wanted = {route: await self._find_endpoint(route) for route in self._list_wanted()}
            urls = {endpoint.url for endpoint in wanted.values()}
            present = {each.url: each for each in await self._process.list_workers()}
            self._has_workers = any(each.is_ready for url, each in present.items() if url in urls)
            self._admit()
            removed = [each for url, each in present.items() if url not in urls]
            for each in removed:
                await self._process.remove_worker(each)
            for url in urls - present.keys():
                await self._add(url)
            if not removed and all(url in present and present[url].is_ready for url in urls):
                self._close_unwanted(wanted)
                return
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S_MAX)

    async def _add(self, url: str) -> None:
        """Add a worker, again if the router has not taken it over in time: smg does so in the background."""
        now_s = self._clock.now_s()
        if 0.0 <= now_s - self._asked_s.get(url, -LATE_S) < LATE_S:
            return
        if url in self._asked_s:
            log.warning("%s has not taken over a replica for %.0f s", self._routing.balancer, LATE_S)
        self._asked_s[url] = now_s
        await self._process.add_worker(url)

    async def _find_endpoint(self, route: BackendRoute) -> ReplicaEndpoint:
        """Return the address at which the router reaches a replica. Raises OSError."""
        endpoint = self._endpoints.get(route)
        if endpoint is None:
            proxy = ReplicaProxy(route, self._routing, self._changes, clock=self._clock)
            proxy.session = self._front.session
            endpoint = self._endpoints[route] = ReplicaEndpoint(proxy)
        await endpoint.open()
        return endpoint

    def _close_unwanted(self, wanted: Collection[BackendRoute]) -> None:
        """Retire the addresses of replicas that the router no longer has."""
        for route, endpoint in self._endpoints.items():
            if route not in wanted:
                self._asked_s.pop(endpoint.url, None)
                endpoint.retire()

    async def _restart_forever(self) -> None:
        while True:
            await self._process.wait()
            log.error("%s has ended; it is started again", self._routing.balancer)
            self._has_workers = False
            self._admit()
            await self._clock.sleep(RETRY_S)
            try:
                await self._start()
            except (StateError, OSError) as error:  # the latter: no port is free
                log.warning("%s", error)


class ReplicaTable(RouteTable):
    """One replica. A connection that it refuses takes it out of the router, too."""

    def __init__(self, route: BackendRoute, changes: ChildChanges, *, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.routes, self._changes = {route.backend.number: route}, changes

    def exclude(self, route: BackendRoute, error: str) -> None:
        """Record a refused connection: no request goes there until a probe succeeds."""
        super().exclude(route, error)
        self._changes.note()


class ReplicaProxy(Proxy):
    """Pass the router's requests on to one replica, and answer its health checks."""

    def __init__(self, route: BackendRoute, routing: Routing, changes: ChildChanges, *, clock: Clock) -> None:
        table = ReplicaTable(route, changes, clock=clock)
        gate = Gate(KeyRing(), UsageBook(), host=LOOPBACK, clock=clock)
        limits = PassLimits(waits=False, continues=False)
        super().__init__(table, routing, gate, clock=clock, draw=random.Random(), limits=limits)
        self._only = route

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request of the router."""
        if request.path == HEALTH:  # broker probes the replica, perhaps at another path
            return web.Response(text="OK") if self._only.is_ready else refuse(503, "the replica is not ready")
        return await super().handle(request)


class ReplicaEndpoint:
    """The address on the loopback at which the router reaches one replica.

    After each time that the replica was not ready, it is another one: the router may still serve requests at the old
    one, and accepts it again only once they have ended.
    """

    def __init__(self, proxy: ReplicaProxy) -> None:
        self.proxy = proxy
        self.url = ""
        self._runner: web.ServerRunner | None = None
        self._retired: list[web.ServerRunner] = []

    async def open(self) -> None:
        """Listen at a free port, unless it does. Raises OSError."""
        if self._runner is None:
            self._runner = await listen(self.proxy, LOOPBACK, 0)
            self.url = f"http://{LOOPBACK}:{self._runner.addresses[0][1]}"

    def retire(self) -> None:
        """Have the next `open` listen at another port; open requests continue."""
        if self._runner is not None:
            self._retired.append(self._runner)
            self._runner = None

    async def tidy(self, *, is_gone: bool = False) -> None:
        """Stop listening at former ports once no request is open; at all of them if the replica is gone."""
        if is_gone:
            self.retire()
        elif self.proxy.counts.in_flight:
            return
        retired, self._retired = self._retired, []
        await asyncio.gather(*(each.cleanup() for each in retired))
