"""The entrance of a replica: the balancer's certificate opens it, no other does, and bytes pass unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from local_gang import Rig, make_task, wait_for

from broker.agent import FOLDER
from broker.runtime.credentials import make_credential
from broker.serve.credentials import make_client_context, make_secrets
from broker.serve.files import ServiceFolder
from broker.serve.replicas import draw_free_port

sys.path.insert(0, str(FOLDER))  # the nodes' files import each other by bare names
import agent_entrance
import agent_link

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
MEBIBYTE = bytes(range(256)) * 4096


class Bed:
    """A program on the loopback behind an entrance, both in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = ServiceFolder(path=folder / "service")
        secrets = make_secrets(self.folder, "web")
        (folder / "entrance.pem").write_text(secrets["BROKER_REPLICA_PEM"].value)
        self._context = agent_entrance.make_context(folder / "entrance.pem", secrets["BROKER_BALANCER_PEM"].value)
        self.accepted = 0
        self.received = b""
        self.port = self.program_port = 0

    @contextlib.asynccontextmanager
    async def run(self, handle: Handle | None = None) -> AsyncIterator[None]:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.accepted += 1
            with contextlib.suppress(ConnectionError):
                await (handle or self._echo)(reader, writer)
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.program_port = server.sockets[0].getsockname()[1]
        listener = agent_link.listen_at("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        entrance = agent_entrance.Entrance(listener, self._context, self.program_port)
        accepting = asyncio.ensure_future(entrance.accept_forever())
        try:
            yield
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            listener.close()
            server.close()

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.received += data
            writer.write(data)
            await writer.drain()

    async def connect(self, context: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=context, server_hostname="" if context else None
        )


def make_stranger(folder: Path, pem: str | None) -> ssl.SSLContext:
    """Make the context of a client that trusts anything and presents this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if pem is not None:
        path = folder / "stranger.pem"
        path.write_text(pem)
        context.load_cert_chain(path)
    return context


def test_balancer_reaches_the_program_and_large_bodies_pass_unchanged(tmp_path: Path) -> None:
    async def run() -> None:
        bed = Bed(tmp_path)
        async with bed.run():
            reader, writer = await bed.connect(make_client_context(bed.folder))

            async def send() -> None:
                for _ in range(8):
                    writer.write(MEBIBYTE)
                    await writer.drain()

            sending = asyncio.ensure_future(send())
            assert await reader.readexactly(8 << 20) == MEBIBYTE * 8
            await sending
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["without a certificate", "another service's", "the replica's own", "without TLS"])
def test_stranger_gets_no_byte_to_the_program(tmp_path: Path, kind: str) -> None:
    async def run() -> None:
        bed = Bed(tmp_path)
        pems = {
            "another service's": make_credential("broker balancer web").value,
            "the replica's own": bed.folder.replica_pem.read_text(),
        }
        context = None if kind == "without TLS" else make_stranger(tmp_path, pems.get(kind))
        async with bed.run():
            answer = b""
            with contextlib.suppress(OSError):
                reader, writer = await bed.connect(context)
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
                answer = await reader.read(1 << 16)  # with TLS 1.3 the refusal comes after the client's handshake
            assert b"GET" not in answer and bed.received == b""
            reader, writer = await bed.connect(make_client_context(bed.folder))
            writer.write(b"still open")
            assert await reader.readexactly(10) == b"still open"

    asyncio.run(run())


def test_balancer_does_not_send_to_a_server_with_another_certificate(tmp_path: Path) -> None:
    async def run() -> None:
        bed = Bed(tmp_path)
        (tmp_path / "other").mkdir()
        other = Bed(tmp_path / "other")
        async with bed.run():
            with pytest.raises(ssl.SSLCertVerificationError):
                await bed.connect(make_client_context(other.folder))

    asyncio.run(run())


def test_refusing_program_refuses_before_the_handshake_so_that_a_post_may_be_repeated(tmp_path: Path) -> None:
    async def run() -> None:
        bed = Bed(tmp_path)
        async with bed.run():
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                listener = agent_link.listen_at("127.0.0.1", 0)
                entrance = agent_entrance.Entrance(listener, bed._context, free.getsockname()[1])
                accepting = asyncio.ensure_future(entrance.accept_forever())
                url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
                async with aiohttp.ClientSession() as client:
                    with pytest.raises(aiohttp.ClientConnectorError):
                        await client.post(url, data=b"x", ssl=make_client_context(bed.folder) or True)
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
                listener.close()

    asyncio.run(run())


def test_response_that_the_program_cuts_off_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")  # without a length: its end is the connection's
        await writer.drain()
        await reader.read(10)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def run() -> None:
        bed = Bed(tmp_path)
        async with bed.run(cut):
            reader, writer = await bed.connect(make_client_context(bed.folder))
            writer.write(b"x")
            assert (await reader.readuntil(b"half")).endswith(b"half")
            writer.write(b"x")
            with pytest.raises(ConnectionError):
                await reader.read(10)

    asyncio.run(run())


def test_many_silent_strangers_do_not_keep_the_balancer_out(tmp_path: Path) -> None:
    async def run() -> None:
        bed = Bed(tmp_path)
        async with bed.run():
            strangers = [await bed.connect(None) for _ in range(2 * agent_entrance.STRANGERS_MAX)]
            reader, writer = await bed.connect(make_client_context(bed.folder))
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            for _, each in strangers:
                each.close()

    asyncio.run(run())


PROGRAM = """\
import http.server, json, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(dict(os.environ)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
place = os.environ["BROKER_REPLICA_HOST"], int(os.environ["BROKER_REPLICA_PORT"])
http.server.HTTPServer(place, Handler).serve_forever()
"""


def test_node_opens_the_entrance_of_its_run_and_its_program_does_not_see_the_key(rig: Rig, tmp_path: Path) -> None:
    folder = ServiceFolder(path=tmp_path / "service")
    (tmp_path / "program.py").write_text(PROGRAM)
    port, envs = draw_free_port(), {"BROKER_REPLICA_HOST": "127.0.0.1", "BROKER_REPLICA_PORT": str(draw_free_port())}
    task = make_task(
        f"exec {sys.executable} {tmp_path / 'program.py'}",
        envs={**envs, "BROKER_ENTRANCE_PORT": str(port)}, secrets=make_secrets(folder, "web"),
    )  # fmt: skip

    async def run() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, task)
        async with aiohttp.ClientSession() as client:

            async def ask() -> Any:
                with contextlib.suppress(aiohttp.ClientConnectorError):
                    async with client.get(f"https://127.0.0.1:{port}/", ssl=make_client_context(folder) or True) as got:
                        return await got.json(content_type=None)

            seen = await wait_for(ask)
        assert seen["BROKER_REPLICA_PORT"] == envs["BROKER_REPLICA_PORT"]
        assert "PRIVATE KEY" not in json.dumps(seen) and not {"BROKER_REPLICA_PEM", "BROKER_BALANCER_PEM"} & set(seen)
        await rig.gang.cancel(cluster, 1)
        await rig.finish(cluster)

    asyncio.run(run())
    pems = list((tmp_path / "nodes").rglob("entrance.pem"))
    assert [each.stat().st_mode & 0o777 for each in pems] == [0o600]
    specs = [each.read_text() for each in (tmp_path / "nodes").rglob("spec.json")]
    assert specs and not any("PRIVATE KEY" in each for each in specs)
