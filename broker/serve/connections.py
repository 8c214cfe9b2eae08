"""The balancer's connections to replicas, opened a few at a time for each replica."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
from yarl import URL

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.connector import Connection

T = TypeVar("T")
# Below the five seconds after which uvicorn, and so vLLM and SGLang, close an idle connection: a request that is sent
# at that moment is lost.
KEEPALIVE_S = 4.0
# Detects a machine without power after 25 s, even without a controller. The kernel of a running machine answers
# these probes, however busy its programs are.
PEER_IDLE_S, PEER_EVERY_S, PEER_TRIES = 10, 5, 3
# A client that is silent for minutes may return; after ten minutes, it is given up. Linux's default is two hours.
CLIENT_IDLE_S, CLIENT_EVERY_S, CLIENT_TRIES = 120, 60, 8
UNANSWERED_MS = 1000 * (PEER_IDLE_S + PEER_EVERY_S * PEER_TRIES)
# The kernel of a replica's machine accepts connections however busy its programs are; handshakes need their turn.
CONNECT_S = 5.0
HANDSHAKE_S = 15.0  # as long as the entrance of a replica waits for it
SHORT_BYTES_MAX = 32 << 10  # fits the window of a new connection, 64 KiB on Linux, and headers beside it
CONNECTING_MAX = 32  # to one replica: half of the connections that its entrance keeps before they are authenticated


class ReplicaConnector(aiohttp.TCPConnector):
    """Opens at most 32 connections to one replica at the same time; further requests wait.

    A burst of handshakes would be cut off by the replica's entrance, and the memory that hundreds of them need at once
    stays with the process.
    """

    def __init__(self, context: ssl.SSLContext | None) -> None:
        # Without a context no replica is encrypted.
        super().__init__(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=context or True)
        self._turns: weakref.WeakValueDictionary[tuple[str | None, int | None], asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )
        self._opened: dict[tuple[str | None, int | None], weakref.WeakSet[ResponseHandler]] = {}

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[aiohttp.tracing.Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """Return a connection for a request, with the limit that fits its body."""
        connection = await super().connect(req, traces, timeout)
        if connection.transport is not None:
            limit_unanswered(connection.transport, UNANSWERED_MS if is_short(req.headers) else 0)
        return connection

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[aiohttp.tracing.Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        address = req.url.host, req.url.port
        async with self._turns.setdefault(address, asyncio.Semaphore(CONNECTING_MAX)):
            opened = await super()._create_connection(req, traces, timeout)
        if opened.transport is not None:
            watch_peer(opened.transport)
        self._opened.setdefault(address, weakref.WeakSet()).add(opened)
        return opened

    async def _wrap_create_connection(self, *args: Any, **kwargs: Any) -> tuple[asyncio.Transport, ResponseHandler]:
        """Limit connecting and the handshake one by one: `sock_connect` of aiohttp covers both together."""
        async with limit_connecting(args[0]) as make_protocol:
            return await super()._wrap_create_connection(make_protocol, *args[1:], **kwargs)

    def cut(self, base_url: str) -> None:
        """Cut off all connections to a replica that is gone: requests on them end at once, as if it had reset them."""
        url = URL(base_url)
        for each in self._opened.pop((url.host, url.port), ()):
            if each.transport is not None:
                each.transport.abort()


@contextlib.asynccontextmanager
async def limit_connecting(make_protocol: Callable[[], T]) -> AsyncIterator[Callable[[], T]]:
    """Limit the time to connect, and from then on that of the handshake. Raises TimeoutError.

    The block opens one connection with the function that it gets: the loop calls it between the two.
    """
    async with asyncio.timeout(CONNECT_S) as limit:

        def begin_handshake() -> T:
            limit.reschedule(asyncio.get_running_loop().time() + HANDSHAKE_S)
            return make_protocol()

        yield begin_handshake


def watch_peer(transport: asyncio.BaseTransport) -> None:
    """Have the kernel end a silent connection to a replica whose machine vanished without closing it.

    No probes are sent while data is not acknowledged; see `limit_unanswered`.
    """
    keep_alive(transport)
    _set(transport, TCP_KEEPIDLE=PEER_IDLE_S, TCP_KEEPINTVL=PEER_EVERY_S, TCP_KEEPCNT=PEER_TRIES)


def watch_client(transport: asyncio.BaseTransport) -> None:
    """Have the kernel end the connection to a client that has vanished; until then, its request counts as load."""
    keep_alive(transport)
    _set(transport, TCP_KEEPIDLE=CLIENT_IDLE_S, TCP_KEEPINTVL=CLIENT_EVERY_S, TCP_KEEPCNT=CLIENT_TRIES)


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Have the kernel probe the peer of a silent connection, at the system's default intervals."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def limit_unanswered(transport: asyncio.BaseTransport, limit_ms: int) -> None:
    """Have the kernel end a connection whose peer does not acknowledge data for this time; 0: the system's limit.

    Linux counts the time in which data waits for a program to read as well, so it is for data that fits its buffer.
    """
    _set(transport, TCP_USER_TIMEOUT=limit_ms)


def is_short(headers: Mapping[str, str]) -> bool:
    """Return whether a request with these headers is sent at once, even if its replica reads nothing."""
    if "transfer-encoding" in headers or "upgrade" in headers:
        return False
    return int(headers.get("content-length", "0")) <= SHORT_BYTES_MAX


def _set(transport: asyncio.BaseTransport, **options: int) -> None:
    """Set those of the TCP options that this system supports."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return
    with contextlib.suppress(OSError):  # it was closed meanwhile
        for name, value in options.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
