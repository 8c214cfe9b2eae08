"""Connections to replicas are opened a few at a time, so that no entrance cuts a burst off."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from broker.serve import connections
from broker.serve.connections import CONNECTING_MAX, ReplicaConnector
from tests.serve.stand_in import StandIn


def test_burst_opens_no_more_connections_to_one_replica_than_its_entrance_admits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening: dict[int, int] = {1: 0, 2: 0}
    most: dict[int, int] = {1: 0, 2: 0}

    async def connect(self: object, req: aiohttp.ClientRequest, traces: object, timeout: object) -> None:
        port = req.url.port or 0
        opening[port] += 1
        most[port] = max(most[port], opening[port])
        await asyncio.sleep(0)
        opening[port] -= 1
        raise aiohttp.ClientOSError("refused")

    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", connect)

    async def run() -> None:
        async with aiohttp.ClientSession(connector=ReplicaConnector(None)) as session:

            async def ask(port: int) -> None:
                with pytest.raises(aiohttp.ClientOSError):
                    await session.get(f"http://127.0.0.1:{port}/")

            await asyncio.gather(*(ask(port) for port in (1, 2) for _ in range(200)))

    asyncio.run(run())
    assert most == {1: CONNECTING_MAX, 2: CONNECTING_MAX}


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no TCP_USER_TIMEOUT")
def test_kernel_ends_connections_to_a_machine_without_power(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    watch = connections.watch_peer

    def watch_and_read(transport: asyncio.BaseTransport) -> None:
        watch(transport)
        opened = transport.get_extra_info("socket")
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        found.extend(opened.getsockopt(socket.IPPROTO_TCP, name) for name in names)
        found.append(opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))

    monkeypatch.setattr(connections, "watch_peer", watch_and_read)

    async def run() -> None:
        stand = StandIn()
        await stand.start()
        url = f"http://127.0.0.1:{stand.port}/health"
        async with aiohttp.ClientSession(connector=ReplicaConnector(None)) as session, session.get(url) as response:
            assert response.status == 200
        await stand.kill()

    asyncio.run(run())
    assert found == [10, 5, 3, 25_000, 1]
