"""Connections passed through, for `tcp` and `grpc`: bytes are copied, not read.

A connection is opened at the less busy of two replicas. One that refuses it is out of rotation at once, and the next is
tried before the client's first byte is sent, so that no byte is ever sent twice. From then on, a connection belongs to
its replica: if either end breaks off, the other is cut off as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from broker.clock import Clock
from broker.serve.connections import CONNECTING_MAX, HANDSHAKE_S, limit_connecting, watch_client, watch_peer
from broker.serve.credentials import ListenerFiles, make_client_context, make_listener_context
from broker.serve.data_path import WAIT_S_MAX, Counts, ReplicaQueue, find_exposure
from broker.serve.files import LoadTotals, LoadWindow, Routing, ServiceFolder
from broker.serve.probing import probe_connection
from broker.serve.routes import BackendRoute, RouteTable
from broker.types import ServiceProtocol

log = logging.getLogger(__name__)

CLOSE_S = 10.0  # for open connections when the balancer is stopped
CONNECTIONS_MAX = 20_000
BACKLOG = 1_024
CHUNK_BYTES = 64 << 10
HALF_OPEN_S_MAX = 300.0  # silence of one direction after the other has ended
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
ALPN = {ServiceProtocol.GRPC: ("h2",), ServiceProtocol.TCP: ()}


class TcpPath:
    """Implement `DataPath` with asyncio's streams."""

    def __init__(self, table: RouteTable, routing: Routing, folder: ServiceFolder, *, clock: Clock) -> None:
        self.counts = Counts()
        self._table, self._routing, self._folder, self._clock = table, routing, folder, clock
        self._queue = ReplicaQueue(self.counts, clock=clock)
        self._fault = find_exposure(routing, routing.host)
        self._context = make_client_context(folder)
        self._joined: set[asyncio.Task[None]] = set()
        self._users: weakref.WeakKeyDictionary[BackendRoute, set[asyncio.Task[None]]] = weakref.WeakKeyDictionary()
        self._renewal: tuple[ListenerFiles, ssl.SSLContext] | None = None
        # A replica's entrance keeps few connections that are not authenticated yet (see `connections.py`).
        self._turns: weakref.WeakKeyDictionary[BackendRoute, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[int]:
        """Listen; yield the port. Open connections get ten seconds to end."""
        routing = self._routing
        if self._fault:
            log.error("no connection is admitted: %s", self._fault)
        tls = None
        if routing.tls is not None:
            tls = make_listener_context(routing.tls, ALPN[routing.protocol])
            self._renewal = ListenerFiles(routing.tls), tls
        server = await asyncio.get_running_loop().create_server(
            lambda: _Arrival(lambda transport: self._begin(transport, tls)), routing.host, routing.port, backlog=BACKLOG
        )
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
            if self._joined:
                await asyncio.wait(self._joined, timeout=CLOSE_S)
            for each in self._joined:
                each.cancel()
            await asyncio.gather(*self._joined, return_exceptions=True)

    def adopt(self, routing: Routing) -> None:
        """Act on another routing file; open connections stay, also at a replica that drains."""
        self._routing = routing
        self._queue.adopt(routing)

    def cut(self, gone: Sequence[BackendRoute]) -> None:
        """Reset the connections to them."""
        for route in gone:
            for each in self._users.pop(route, ()):
                self.counts.broken += 1
                each.cancel()

    def wake(self) -> None:
        """Make waiting connections look for a replica again."""
        self._queue.wake()

    async def probe(self, route: BackendRoute) -> str:
        """Open a connection and close it."""
        return await probe_connection(route, self._context, self._routing.find_probe(route.backend.version))

    async def refresh(self) -> None:
        """Use renewed certificates; the counts are this process's own."""
        if self._renewal is not None and self._renewal[0].are_renewed():
            files, context = self._renewal
            files.load_into(context)

    def describe(self) -> tuple[LoadWindow, Mapping[int, LoadWindow]]:
        """Return nothing: responses are not read."""
        return LoadWindow(), {}

    def describe_totals(self) -> LoadTotals:
        """Return nothing, for the same reason."""
        return LoadTotals()

    def find_expiry_s(self) -> float | None:
        """Return when the certificate that clients get expires; None without one."""
        return None if self._renewal is None else self._renewal[0].ends_s

    def _begin(self, transport: asyncio.Transport, tls: ssl.SSLContext | None) -> None:
        """Serve an accepted connection in a task of its own."""
        if self._fault or self.counts.in_flight >= CONNECTIONS_MAX:
            transport.abort()
            return
        self.counts.in_flight += 1
        task = asyncio.ensure_future(self._admit(transport, tls))
        self._joined.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self.counts.in_flight -= 1
        self._joined.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection failed", exc_info=error)

    async def _admit(self, transport: asyncio.Transport, tls: ssl.SSLContext | None) -> None:
        """Serve one client to its end."""
        try:
            client = await _Client.open(transport, tls)
        except OSError:  # it left, or speaks no TLS, or has no certificate
            transport.abort()
            return
        self.counts.arrivals += 1
        deadline_s = self._clock.now_s() + WAIT_S_MAX
        while not transport.is_closing():
            route = self._table.choose(balancing=self._routing.balancing)
            if route is None:
                if await self._queue.wait(deadline_s):
                    continue
                break
            with route.use():
                replica = await self._open(route)
                if replica is not None:
                    await self._join(route, client, replica)
                    return
        _cut(transport)

    async def _open(self, route: BackendRoute) -> Ends | None:
        """Return a connection to a replica; one that refuses it is taken out, and None is returned."""
        backend = route.backend
        async with self._turns.setdefault(route, asyncio.Semaphore(CONNECTING_MAX)):
            if not route.is_ready:  # it was taken out while this connection waited for its turn
                return None
            try:
                opened = await _connect(backend.host, backend.port, self._context if backend.is_encrypted else None)
            except (TimeoutError, OSError) as error:
                self._table.exclude(route, f"the connection failed: {str(error) or type(error).__name__}")
                return None
        if route.is_gone:  # since then, `cut` would not find the connection
            _cut(opened[1].transport)
            return None
        return opened

    async def _join(self, route: BackendRoute, client: _Client, replica: Ends) -> None:
        """Copy in both directions until both have ended; a reset of one end resets the other."""
        reader, writer = replica
        watch_client(client.transport)
        watch_peer(writer.transport)
        up, down = _Flow(client.reader, writer), _Flow(reader, client.writer)
        is_whole = False
        users, task = self._users.setdefault(route, set()), asyncio.current_task()
        assert task is not None
        users.add(task)
        try:
            has_ended = await _run(up, down)
            users.discard(task)  # the replica may go: what is left is for the client to take
            is_whole = has_ended and await client.close()
        finally:
            users.discard(task)
            if is_whole:
                writer.close()
            else:
                _cut(writer.transport)
                _cut(client.transport)
        if is_whole:
            self._table.record_whole(route)
        if down.is_cut:
            self.counts.broken += 1
            self._table.record_break(route, "a connection broke off")


async def _connect(host: str, port: int, context: ssl.SSLContext | None) -> Ends:
    """Open a connection. Raises OSError."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    async with limit_connecting(lambda: asyncio.StreamReaderProtocol(reader)) as make_protocol:
        transport, protocol = await loop.create_connection(make_protocol, host, port, ssl=context)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class _Arrival(asyncio.Protocol):
    """A connection that was just accepted; nothing is read until its protocol is set."""

    def __init__(self, begin: Callable[[asyncio.Transport], None]) -> None:
        self._begin = begin

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self._begin(transport)


class _Client:
    """A client's connection. `transport` is that of TCP, below TLS if there is any."""

    def __init__(
        self, transport: asyncio.Transport, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.transport, self.reader, self.writer = transport, reader, writer

    @classmethod
    async def open(cls, transport: asyncio.Transport, tls: ssl.SSLContext | None) -> _Client:
        """Begin to read, after the TLS handshake if one is required. Raises OSError."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        upper: asyncio.Transport | None = transport
        if tls is None:
            transport.set_protocol(protocol)
        else:
            upper = await loop.start_tls(transport, protocol, tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_S)
        if upper is None:
            raise ConnectionAbortedError("the connection was closed")
        protocol.connection_made(upper)
        transport.resume_reading()
        return cls(transport, reader, asyncio.StreamWriter(upper, protocol, reader, loop))

    async def close(self) -> bool:
        """Close after the last byte; return whether the client took all of them, however slowly.

        asyncio closes a TLS connection only once the client has answered its close_notify, or after half a minute;
        gRPC's clients answer it only when the connection is closed.
        """
        upper = self.writer.transport
        upper.set_write_buffer_limits(high=1)  # with 0, TLS would pause while nothing is left
        try:
            async with asyncio.timeout(HALF_OPEN_S_MAX):
                await self.writer.drain()
        except (OSError, TimeoutError):
            return False
        self.writer.close()
        self.transport.close()
        return True


class _Flow:
    """One direction of a connection. `is_cut`: its source broke off."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.chunks = 0
        self.is_cut = False

    async def copy(self) -> bool:
        """Copy to the end; return whether the other direction may continue: TLS has no half-open connections.

        Raises OSError if either end broke off.
        """
        while True:
            try:
                data = await self._reader.read(CHUNK_BYTES)
            except OSError:
                self.is_cut = True
                raise
            if not data:
                break
            self.chunks += 1
            self._writer.write(data)
            await self._writer.drain()
        if self._writer.can_write_eof():
            self._writer.write_eof()
            return True
        return False


async def _run(up: _Flow, down: _Flow) -> bool:
    """Copy until both directions have ended; return whether they ended well."""
    copies = [asyncio.ensure_future(each.copy()) for each in (up, down)]
    try:
        done, rest = await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        if not all(await asyncio.gather(*done)):
            return True
        while rest:
            moved = up.chunks + down.chunks
            done, rest = await asyncio.wait(rest, timeout=HALF_OPEN_S_MAX)
            await asyncio.gather(*done)
            if rest and up.chunks + down.chunks == moved:
                return False
        return True
    except OSError:
        return False
    finally:
        for each in copies:
            each.cancel()
        await asyncio.gather(*copies, return_exceptions=True)


def _cut(transport: asyncio.WriteTransport) -> None:
    """Close a connection with a reset; one that is closed already stays so."""
    connection = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if connection is not None:  # a TLS transport that was closed has none
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()
