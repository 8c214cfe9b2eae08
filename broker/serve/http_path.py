"""HTTP through this process: requests are read, admitted by API key, and repeated or continued elsewhere."""

from __future__ import annotations

import contextlib
import logging
import random
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from broker.clock import Clock
from broker.serve.admission import Gate
from broker.serve.connections import ReplicaConnector
from broker.serve.credentials import ListenerFiles, make_client_context, make_listener_context
from broker.serve.files import LoadTotals, LoadWindow, Routing, ServiceFolder
from broker.serve.probing import probe_request
from broker.serve.proxying import NO_LIMITS, PassLimits, Proxy
from broker.serve.routes import BackendRoute, RouteTable

CLOSE_S = 10.0  # for open requests when the balancer is stopped
HEADER_BYTES_MAX = 32 << 10
# For the headers of a request, and between two requests: as nginx waits. aiohttp's default is an hour, in which clients
# without a key could take all descriptors.
IDLE_S_MAX = 75.0
SERVER_LOG = logging.getLogger("aiohttp.server")


class HttpPath:
    """Implement `DataPath` with aiohttp."""

    def __init__(
        self,
        table: RouteTable,
        routing: Routing,
        folder: ServiceFolder,
        gate: Gate,
        *,
        clock: Clock,
        limits: PassLimits = NO_LIMITS,
    ) -> None:
        """Create a path that is not listening yet."""
        self._routing, self._folder = routing, folder
        self._proxy = Proxy(table, routing, gate, clock=clock, draw=random.Random(), limits=limits)
        self.counts = self._proxy.counts
        self._connector: ReplicaConnector | None = None
        self._renewal: tuple[ListenerFiles, ssl.SSLContext] | None = None

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[int]:
        """Listen; yield the port. Open requests get ten seconds to end."""
        self._connector = ReplicaConnector(make_client_context(self._folder))
        async with aiohttp.ClientSession(
            connector=self._connector,
            timeout=aiohttp.ClientTimeout(  # until a WebSocket is open
                total=None, sock_read=self._routing.stream_timeout_s
            ),
            cookie_jar=aiohttp.DummyCookieJar(),  # a jar would send one client's cookies for all of them
            skip_auto_headers=("user-agent", "accept-encoding", "content-type"),
            auto_decompress=False,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
        ) as session:
            self._proxy.session = session
            tls, context = self._routing.tls, None
            if tls is not None:
                context = make_listener_context(tls)
                self._renewal = ListenerFiles(tls), context
            runner = await listen(self._proxy, self._routing.host, self._routing.port, context)
            try:
                yield int(runner.addresses[0][1])
            finally:
                await runner.cleanup()

    @property
    def session(self) -> aiohttp.ClientSession:
        """Return the connections to replicas, while listening."""
        return self._proxy.session

    def adopt(self, routing: Routing) -> None:
        """Act on another routing file."""
        self._routing = routing
        self._proxy.adopt(routing)

    def cut(self, gone: Sequence[BackendRoute]) -> None:
        """Cut off the connections to them, so that their requests and streams continue elsewhere."""
        if self._connector is not None:
            for each in gone:
                self._connector.cut(each.base_url)

    def wake(self) -> None:
        """Make waiting requests look for a replica again."""
        self._proxy.wake()

    async def probe(self, route: BackendRoute) -> str:
        """Send the readiness request."""
        return await probe_request(self._proxy.session, route, self._routing.find_probe(route.backend.version))

    async def refresh(self) -> None:
        """Use renewed certificates; the counts are this process's own."""
        if self._renewal is not None and self._renewal[0].are_renewed():
            files, context = self._renewal
            files.load_into(context)

    def describe(self) -> tuple[LoadWindow, Mapping[int, LoadWindow]]:
        """Return the responses of the last minute, in all and by replica."""
        return self._proxy.meter.describe()

    def describe_totals(self) -> LoadTotals:
        """Return the responses since the balancer started."""
        return self._proxy.meter.totals.describe()

    def find_expiry_s(self) -> float | None:
        """Return when the certificate that clients get expires; None without one."""
        return None if self._renewal is None else self._renewal[0].ends_s


def is_own_fault(record: logging.LogRecord) -> bool:
    """Return False for the record of an unreadable request, which is answered with 400.

    With its traceback, anyone who can connect could fill the disk.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


async def listen(proxy: Proxy, host: str, port: int, context: ssl.SSLContext | None = None) -> web.ServerRunner:
    """Pass the requests at an address to a proxy; `cleanup` of the result gives open ones ten seconds to end.

    Raises OSError if the port is taken. A request whose client has left must not keep a replica busy. Bodies are passed
    on as they are, since their headers are.
    """
    server = web.Server(
        proxy.handle,
        handler_cancellation=True,
        access_log=None,
        max_field_size=HEADER_BYTES_MAX,
        auto_decompress=False,
        keepalive_timeout=IDLE_S_MAX,
    )
    SERVER_LOG.addFilter(is_own_fault)
    runner = web.ServerRunner(server, shutdown_timeout=CLOSE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=context).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner
