"""Connections through the balancer: bytes pass as they are, a refused connection goes elsewhere, none is doubled."""

from __future__ import annotations

import asyncio
import resource
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from broker.clock import SystemClock
from broker.runtime.credentials import make_credential
from broker.serve import tcp_path
from broker.serve.balancer import Balancer
from broker.serve.data_path import find_exposure
from broker.serve.files import Backend, Load, Routing, ServiceFolder, read_file
from broker.types import BalancerType, ReadinessProbe, ServiceProtocol, ServiceSpec, TlsFiles

PROBE = ReadinessProbe(path="", interval_s=0.02)
CONNECTIONS = 1_000


class Echo:
    """A program that sends its port and then echoes; at the end of input it sends `bye`."""

    def __init__(self) -> None:
        self.port = 0
        self.received = 0
        self.answer = b""  # written to each client before its connection is closed; without one, it echoes
        self.writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=CONNECTIONS)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def kill(self) -> None:
        """Close the port, and reset all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for each in list(self.writers):
            tcp_path._cut(each.transport)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.answer:
            writer.write(b"%d\n" % self.port + self.answer)
            writer.close()
            return
        self.writers.add(writer)
        with suppress(OSError):
            writer.write(b"%d\n" % self.port)
            while data := await reader.read(1 << 16):
                self.received += len(data)
                writer.write(data)
                await writer.drain()
            writer.write(b"bye")
        writer.close()
        self.writers.discard(writer)


class Bed:
    def __init__(self, balancer: Balancer, echoes: list[Echo], port: int) -> None:
        self.balancer, self.echoes, self.port = balancer, echoes, port

    async def until_ready(self, count: int) -> None:
        await until(lambda: sum(route.is_ready for route in self.balancer.table.routes.values()) == count)

    async def open(self, **options: Any) -> Client:
        """Connect; return the connection once a replica has answered."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **options)
        client = Client(reader, writer)
        line = await reader.readline()
        if not line:
            raise ConnectionError("no replica answered")
        client.replica = next(each for each in self.echoes if each.port == int(line))
        return client


class Client:
    replica: Echo

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, text: bytes) -> bytes:
        self.writer.write(text)
        return await self.reader.readexactly(len(text))

    def close(self) -> None:
        self.writer.close()


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.005)


def play(folder: Path, scene: Callable[[Bed], Awaitable[None]], *, count: int = 2, **settings: Any) -> Load:
    async def run() -> None:
        echoes = [Echo() for _ in range(count)]
        for each in echoes:
            await each.start()
        backends = tuple(Backend(number=n, version=1, host="127.0.0.1", port=e.port) for n, e in enumerate(echoes, 1))
        routing = Routing(
            generation=1, host="127.0.0.1", port=0, probe=PROBE, backends=backends,
            **{"protocol": ServiceProtocol.TCP, **settings},
        )  # fmt: skip
        balancer = Balancer(ServiceFolder(path=folder), routing, clock=SystemClock())
        try:
            async with balancer.listen() as port:
                bed = Bed(balancer, echoes, port)
                await bed.until_ready(count)
                await scene(bed)
                balancer.write_load()
                for each in echoes:
                    await each.kill()
        finally:
            for each in echoes:
                await each.kill()

    asyncio.run(run())
    load = read_file(ServiceFolder(path=folder).load, Load)
    assert load is not None
    return load


def make_tls(folder: Path, name: str = "tls.pem", **more: Any) -> TlsFiles:
    (path := folder / name).write_text(make_credential("bed", valid=timedelta(days=1)).value)
    return TlsFiles(key_path=str(path), certificate_path=str(path), **more)


def trust(tls: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.certificate_path)
    context.check_hostname = False
    return context


def test_bytes_pass_in_both_directions_and_so_does_the_end_of_one(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        client = await bed.open()
        blob = bytes(range(256)) * 4096

        async def send() -> None:
            client.writer.write(blob)
            await client.writer.drain()
            client.writer.write_eof()

        _, echoed = await asyncio.gather(send(), client.reader.read(-1))
        assert echoed == blob + b"bye"
        client.close()
        await until(lambda: bed.balancer.path.counts.in_flight == 0)

    load = play(tmp_path, scene)
    assert (load.arrivals, load.in_flight, load.broken) == (1, 0, 0)


def test_refused_connection_takes_the_replica_out_and_the_next_one_gets_the_client(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        dead, alive = bed.echoes
        await dead.kill()
        for turn in range(20):
            client = await bed.open()
            assert client.replica is alive
            assert await client.say(b"%d" % turn) == b"%d" % turn
            client.close()
        assert not bed.balancer.table.routes[1].is_ready
        await dead.start()
        await bed.until_ready(2)

    assert play(tmp_path, scene).broken == 0


def test_connections_go_to_the_less_busy_replica_and_are_the_load(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        clients = [await bed.open() for _ in range(20)]
        bed.balancer.write_load()
        load = read_file(bed.balancer._folder.load, Load)
        assert load is not None and load.in_flight == 20
        assert sorted(each.in_flight for each in load.replicas.values()) == [10, 10]
        for each in clients:
            each.close()
        await until(lambda: bed.balancer.path.counts.in_flight == 0)

    assert play(tmp_path, scene).arrivals == 20


def test_draining_replica_keeps_its_connections_and_gets_no_new_one(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        old = await bed.open()
        routing = bed.balancer._routing
        drained = tuple(replace(each, is_draining=each.port == old.replica.port) for each in routing.backends)
        bed.balancer.adopt(replace(routing, generation=2, backends=drained))
        for _ in range(10):
            client = await bed.open()
            assert client.replica is not old.replica
            client.close()
        assert await old.say(b"still here") == b"still here"
        old.close()

    assert play(tmp_path, scene).generation == 2


def test_connection_waits_until_a_replica_is_ready(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        await bed.echoes[0].kill()
        await bed.until_ready(0)
        opening = asyncio.ensure_future(bed.open())
        await until(lambda: bed.balancer.path.counts.waiting == 1)
        await bed.echoes[0].start()
        assert await (await opening).say(b"x") == b"x"

    play(tmp_path, scene, count=1)


def test_connections_do_not_wait_for_a_service_that_was_given_up(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        await bed.echoes[0].kill()
        await bed.until_ready(0)
        opening = asyncio.ensure_future(bed.open())
        await until(lambda: bed.balancer.path.counts.waiting == 1)
        routing = bed.balancer._routing
        bed.balancer.adopt(replace(routing, generation=routing.generation + 1, failure="out of memory"))
        with pytest.raises(ConnectionError):
            await opening

    play(tmp_path, scene, count=1)


def test_replica_that_breaks_off_resets_the_client_and_is_counted_each_time(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        for _ in range(3):
            client = await bed.open()
            for each in list(bed.echoes[0].writers):
                tcp_path._cut(each.transport)
            with pytest.raises(ConnectionResetError):
                await client.reader.read()
        await until(lambda: bed.balancer.path.counts.broken == 3)

    assert play(tmp_path, scene, count=1).broken == 3


def test_client_that_breaks_off_resets_the_replica_and_is_not_its_fault(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        client = await bed.open()
        tcp_path._cut(client.writer.transport)
        await until(lambda: not client.replica.writers)

    assert play(tmp_path, scene).broken == 0


def test_connection_to_a_vanished_machine_is_reset_and_others_stay(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        clients = [await bed.open() for _ in range(2)]
        lost, kept = clients if clients[0].replica is bed.echoes[0] else clients[::-1]
        routing = bed.balancer._routing
        left = tuple(each for each in routing.backends if each.port == kept.replica.port)
        bed.balancer.adopt(replace(routing, generation=2, backends=left))
        with pytest.raises(ConnectionResetError):
            await lost.reader.read()
        assert await kept.say(b"x") == b"x"
        kept.close()

    assert play(tmp_path, scene).broken == 1


def test_client_takes_the_rest_at_its_pace_when_the_replica_that_sent_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_closing, is_gone = asyncio.Event(), asyncio.Event()
    close = tcp_path._Client.close

    async def close_late(client: tcp_path._Client) -> bool:
        is_closing.set()
        await is_gone.wait()
        return await close(client)

    monkeypatch.setattr(tcp_path._Client, "close", close_late)

    async def scene(bed: Bed) -> None:
        bed.echoes[0].answer = b"all of it"
        client = await bed.open()
        client.writer.write_eof()
        await is_closing.wait()
        bed.balancer.adopt(replace(bed.balancer._routing, generation=2, backends=()))
        is_gone.set()
        assert await client.reader.read() == b"all of it"

    assert play(tmp_path, scene, count=1).broken == 0


def test_connection_that_is_opened_while_its_replica_goes_is_given_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(bed: Bed) -> None:
        balancer = bed.balancer
        opens: list[int] = []
        is_open = asyncio.Event()
        connect = tcp_path._connect

        async def open_slowly(host: str, port: int, context: ssl.SSLContext | None) -> Any:
            opened = await connect(host, port, context)
            opens.append(port)
            if len(opens) == 1:
                routing = balancer._routing
                left = tuple(each for each in routing.backends if each.port != port)
                balancer.adopt(replace(routing, generation=2, backends=left))
                is_open.set()
            return opened

        monkeypatch.setattr(tcp_path, "_connect", open_slowly)
        reader, writer = await asyncio.open_connection("127.0.0.1", bed.port)
        await is_open.wait()
        assert int(await reader.readline()) in {each.port for each in bed.echoes} - {opens[0]}
        writer.close()

    play(tmp_path, scene)


def test_silent_half_of_a_connection_is_closed_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_path, "HALF_OPEN_S_MAX", 0.05)

    async def scene(bed: Bed) -> None:
        client = await bed.open()
        for each in client.replica.writers:
            each.write_eof()  # and it keeps reading
        assert await client.reader.read() == b""
        await until(lambda: bed.balancer.path.counts.in_flight == 0)

    play(tmp_path, scene, count=1)


def test_a_thousand_connections_at_once_all_echo(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 6 * CONNECTIONS:
        pytest.skip(f"this process may have only {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 6 * CONNECTIONS), hard))

    async def scene(bed: Bed) -> None:
        clients = await asyncio.gather(*(bed.open() for _ in range(CONNECTIONS)))
        assert bed.balancer.path.counts.in_flight == CONNECTIONS
        answers = await asyncio.gather(*(each.say(b"%d" % n) for n, each in enumerate(clients)))
        assert answers == [b"%d" % n for n in range(CONNECTIONS)]
        assert all(route.is_ready for route in bed.balancer.table.routes.values())
        for each in clients:
            each.close()
        await until(lambda: bed.balancer.path.counts.in_flight == 0)

    try:
        load = play(tmp_path, scene)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (load.arrivals, load.broken) == (CONNECTIONS, 0)


@pytest.mark.parametrize(("protocol", "chosen"), [(ServiceProtocol.GRPC, "h2"), (ServiceProtocol.TCP, None)])
def test_tls_of_clients_is_terminated_and_grpc_negotiates_http_2(
    tmp_path: Path, protocol: ServiceProtocol, chosen: str | None
) -> None:
    tls = make_tls(tmp_path)
    context = trust(tls)
    context.set_alpn_protocols(["h2", "http/1.1"])

    async def scene(bed: Bed) -> None:
        client = await bed.open(ssl=context)
        assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == chosen
        assert await client.say(b"x" * 100_000) == b"x" * 100_000
        client.close()

    play(tmp_path, scene, tls=tls, protocol=protocol)


def test_client_without_a_certificate_is_refused_where_an_authority_is_named(tmp_path: Path) -> None:
    known = make_tls(tmp_path, "client.pem")
    tls = make_tls(tmp_path, client_ca_path=known.certificate_path)
    stranger, friend = trust(tls), trust(tls)
    friend.load_cert_chain(known.certificate_path)

    async def scene(bed: Bed) -> None:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await bed.open(ssl=stranger)
        assert await (await bed.open(ssl=friend)).say(b"x") == b"x"

    assert play(tmp_path, scene, tls=tls).arrivals == 1


def test_slow_client_gets_the_last_byte_over_tls_and_the_end_at_once(tmp_path: Path) -> None:
    """asyncio would wait half a minute for the client's farewell, and a shorter wait would cut a slow client off."""
    tls = make_tls(tmp_path)
    blob = b"x" * (4 << 20)

    async def scene(bed: Bed) -> None:
        bed.echoes[0].answer = blob
        client = await bed.open(ssl=trust(tls), limit=1 << 10)
        received = 0
        while data := await client.reader.read(1 << 14):
            received += len(data)
            await asyncio.sleep(0)
        assert received == len(blob)
        await until(lambda: bed.balancer.path.counts.in_flight == 0)

    play(tmp_path, scene, count=1, tls=tls)


CLIENTS_KNOWN = TlsFiles(key_path="k", certificate_path="c", client_ca_path="a")


@pytest.mark.parametrize(
    ("host", "settings", "is_closed"),
    [
        ("127.0.0.1", {"protocol": ServiceProtocol.GRPC}, False),
        ("0.0.0.0", {"protocol": ServiceProtocol.GRPC}, True),
        ("0.0.0.0", {"protocol": ServiceProtocol.TCP, "tls": replace(CLIENTS_KNOWN, client_ca_path=None)}, True),
        ("0.0.0.0", {"protocol": ServiceProtocol.TCP, "tls": CLIENTS_KNOWN}, False),
        ("0.0.0.0", {"protocol": ServiceProtocol.TCP, "is_tls_passed": True}, False),
        ("0.0.0.0", {"balancer": BalancerType.HAPROXY}, True),
        ("0.0.0.0", {}, False),  # its API keys are checked
    ],
)
def test_service_without_api_keys_is_open_only_where_clients_are_known(
    host: str, settings: dict[str, Any], is_closed: bool
) -> None:
    assert bool(find_exposure(ServiceSpec(**settings), host)) is is_closed


def test_exposed_service_admits_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_path, "find_exposure", lambda routing, host: "exposed")

    async def scene(bed: Bed) -> None:
        with pytest.raises(ConnectionError):
            await bed.open()

    play(tmp_path, scene)
