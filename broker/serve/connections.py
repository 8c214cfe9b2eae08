"""The balancer's connections to replicas, opened a few at a time for each replica."""

from __future__ import annotations

import asyncio
import ssl
import weakref
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler

KEEPALIVE_S = 15.0
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

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[aiohttp.tracing.Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        turns = self._turns.setdefault((req.url.host, req.url.port), asyncio.Semaphore(CONNECTING_MAX))
        async with turns:
            return await super()._create_connection(req, traces, timeout)
