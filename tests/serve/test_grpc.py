"""gRPC through the balancer, with Google's own library at both ends and replicas killed with SIGKILL."""

from __future__ import annotations

import asyncio
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from broker.clock import SystemClock
from broker.runtime.credentials import make_credential
from broker.serve.balancer import Balancer
from broker.serve.files import Backend, Load, Routing, ServiceFolder, read_file
from broker.serve.replicas import draw_free_port
from broker.types import BalancerType, ReadinessProbe, ServiceProtocol, TlsFiles
from tests.serve.stands import needs_haproxy

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: `pip install grpcio`")
from tests.serve.grpc_stand_in import COUNT, SAY  # noqa: E402

PROBE = ReadinessProbe(path="", interval_s=0.05)


class GrpcBed:
    """Two servers as processes of their own behind a balancer."""

    def __init__(self, folder: Path, balancer_type: BalancerType, tls: TlsFiles | None) -> None:
        self.folder = ServiceFolder(path=folder)
        self.tls, self.type = tls, balancer_type
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        self.address = ""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        ports = [draw_free_port(), draw_free_port()]
        try:
            for port in ports:
                argv = [sys.executable, "-m", "tests.serve.grpc_stand_in", "--port", str(port)]
                self.servers[port] = subprocess.Popen(argv, stdout=subprocess.PIPE)
            for each in self.servers.values():
                assert each.stdout is not None and each.stdout.readline() == b"listening\n"
            backends = tuple(Backend(number=n, version=1, host="127.0.0.1", port=p) for n, p in enumerate(ports, 1))
            routing = Routing(
                generation=1, host="127.0.0.1", port=draw_free_port(), probe=PROBE, backends=backends, tls=self.tls,
                protocol=ServiceProtocol.GRPC, balancer=self.type,
            )  # fmt: skip
            self.balancer = Balancer(self.folder, routing, clock=SystemClock())
            async with self.balancer.listen() as port:
                self.address = f"127.0.0.1:{port}"
                await self.until_ready(2)
                yield
                await self.balancer.path.refresh()
                self.balancer.write_load()
        finally:
            for each in self.servers.values():
                each.kill()
                each.communicate()

    async def until_ready(self, count: int) -> None:
        while sum(each.is_ready for each in self.balancer.table.routes.values()) != count:
            await asyncio.sleep(0.005)

    def open_channel(self) -> Any:
        """Open a channel with a connection of its own: by default, gRPC shares one between channels."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        roots = (
            ssl.PEM_HEADER.encode() + Path(self.tls.certificate_path).read_bytes().partition(ssl.PEM_HEADER.encode())[2]
        )
        options.append(("grpc.ssl_target_name_override", "bed"))
        return grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(roots), options=options)

    def kill(self, port: int) -> None:
        self.servers[port].send_signal(signal.SIGKILL)
        self.servers[port].wait()


async def say(channel: Any, text: bytes) -> tuple[int, bytes]:
    """Make a unary call; return the port of the server and what it echoed. A refused connection fails it."""
    port, _, echoed = (await channel.unary_unary(SAY)(text)).partition(b" ")
    return int(port), echoed


async def say_until_served(bed: GrpcBed, text: bytes) -> tuple[int, bytes]:
    """Make a call on a channel of its own, as clients of HAProxy do: again while it is unavailable.

    HAProxy learns of replicas a moment after the table. It refuses a call, unprocessed, if a connection that it kept
    to a replica turns out to be dead; gRPC's clients repeat such a call once by themselves.
    """
    while True:
        try:
            async with bed.open_channel() as channel:
                return await say(channel, text)
        except grpc.aio.AioRpcError as error:
            assert bed.type is BalancerType.HAPROXY and error.code() is grpc.StatusCode.UNAVAILABLE
            await asyncio.sleep(0.005)


async def count(channel: Any, number: int) -> list[bytes]:
    return [each async for each in channel.unary_stream(COUNT)(str(number).encode())]


def play(folder: Path, balancer_type: BalancerType, *, is_https: bool) -> Load:
    tls = None
    if is_https:
        (path := folder / "tls.pem").write_text(make_credential("bed", valid=timedelta(days=1)).value)
        tls = TlsFiles(key_path=str(path), certificate_path=str(path))

    async def run() -> None:
        bed = GrpcBed(folder, balancer_type, tls)
        async with bed.run():
            if balancer_type is BalancerType.HAPROXY:
                await say_until_served(bed, b"first")
            seen = set()
            for turn in range(40):
                async with bed.open_channel() as channel:
                    port, echoed = await say(channel, b"%d" % turn)
                    assert echoed == b"%d" % turn
                    seen.add(port)
            assert seen == set(bed.servers)
            async with bed.open_channel() as channel:
                port, _ = await say(channel, b"x")
                streamed = await count(channel, 1000)
                assert [int(each.partition(b" ")[2]) for each in streamed] == list(range(1000))
                bed.kill(port)
                for turn in range(10):  # new calls on new connections: none meets the dead replica
                    assert (await say_until_served(bed, b"%d" % turn))[0] != port
                # HAProxy passes each call on by itself, so that the channel is not lost with the replica.
                while (
                    bed.type is BalancerType.BROKER and channel.get_state() is grpc.ChannelConnectivity.READY
                ):  # calls begun before may fail
                    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
                await channel.unary_unary(SAY)(b"again", wait_for_ready=True)  # it connects again

    asyncio.run(run())
    load = read_file(ServiceFolder(path=folder).load, Load)
    assert load is not None
    return load


@pytest.mark.parametrize("is_https", [False, True], ids=["plain", "tls"])
def test_unary_and_streaming_calls_survive_a_killed_replica(tmp_path: Path, *, is_https: bool) -> None:
    load = play(tmp_path, BalancerType.BROKER, is_https=is_https)
    assert load.arrivals >= 51
    assert sum(each.is_ready for each in load.replicas.values()) == 1


@needs_haproxy
@pytest.mark.parametrize("is_https", [False, True], ids=["plain", "tls"])
def test_haproxy_balances_calls_and_survives_a_killed_replica(tmp_path: Path, *, is_https: bool) -> None:
    load = play(tmp_path, BalancerType.HAPROXY, is_https=is_https)
    assert load.arrivals >= 51
