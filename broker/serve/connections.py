"""The balancer's connections to replicas, opened a few at a time for each replica."""

from __future__ import annotations

import asyncio
import socket
import ssl
import weakref
from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler

# Below the five seconds after which uvicorn, and so vLLM and SGLang, close an idle connection: a request that is sent
# at that moment is lost.
KEEPALIVE_S = 4.0
# A machine without power is noticed after 25 s, also without a controller. However busy a program is, the kernel of a
# machine that runs answers.
PEER_IDLE_S, PEER_EVERY_S, PEER_TRIES = 10, 5, 3
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

    def cut(self, base_url: str) -> None:
        """Cut off all connections to a replica that is gone: requests on them end at once, as if it had reset them."""
        url = URL(base_url)
        for each in self._opened.pop((url.host, url.port), ()):
            if each.transport is not None:
                each.transport.abort()


def watch_peer(transport: asyncio.BaseTransport) -> None:
    """Have the kernel end a connection whose other machine vanished without closing it.

    The first three options are for silent connections, the last one is for data that is not acknowledged. Not all
    systems have all of them.
    """
    connection = transport.get_extra_info("socket")
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limit_ms = 1000 * (PEER_IDLE_S + PEER_EVERY_S * PEER_TRIES)
    for name, value in (
        ("TCP_KEEPIDLE", PEER_IDLE_S), ("TCP_KEEPINTVL", PEER_EVERY_S), ("TCP_KEEPCNT", PEER_TRIES),
        ("TCP_USER_TIMEOUT", limit_ms),
    ):  # fmt: skip
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
