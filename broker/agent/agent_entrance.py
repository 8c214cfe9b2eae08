"""Let the balancer of a service, and no other client, reach the program of a replica. Standard library only.

A port of the node speaks TLS: each end presents a certificate that broker made for the service, and trusts only the
other's. Data is copied to and from the program, which listens on the loopback and needs no TLS of its own.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from broker.agent import agent_files, agent_link, agent_wire
else:
    import agent_files
    import agent_link
    import agent_wire

KEY, CLIENT = "BROKER_REPLICA_PEM", "BROKER_BALANCER_PEM"  # secrets of the task that programs do not get
PORT, PROGRAM_PORT = "BROKER_ENTRANCE_PORT", "BROKER_REPLICA_PORT"
FILE = "entrance.pem"  # in a run's folder: key and certificate of this end
HANDSHAKE_S = 15.0
STRANGERS_MAX = 64  # connections that are not authenticated yet; beyond it the oldest is closed
BIND_EVERY_S = 0.5  # while an earlier run of this node still has the port
LOOPBACK = "127.0.0.1"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


def take_secrets(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec without the secrets of an entrance, with the certificate of its client; write its key."""
    secrets = dict(spec.get("secrets") or {})
    key, client = secrets.pop(KEY, ""), secrets.pop(CLIENT, "")
    if not key or int(spec["rank"]):
        return {**spec, "secrets": secrets}
    agent_files.write_text(folder / FILE, key)
    return {**spec, "secrets": secrets, "entrance": {"client": client, "port": int(spec["envs"][PORT])}}


def open_entrance(folder: Path, spec: dict[str, Any]) -> None:
    """Listen in a daemon thread, for as long as this process lives, if the run is the head of a replica."""
    entrance = spec.get("entrance")
    if entrance:
        context = make_context(folder / FILE, str(entrance["client"]))
        arguments = (str(spec["node_ips"][0]), int(entrance["port"]), int(spec["envs"][PROGRAM_PORT]), context)
        threading.Thread(target=serve, args=arguments, name="entrance", daemon=True).start()


def make_context(pem: Path, client: str) -> ssl.SSLContext:
    """Return the TLS settings of the node's end, which trusts only the client's certificate."""
    context = agent_wire.make_server_context()
    context.load_cert_chain(str(pem))
    context.load_verify_locations(cadata=client)
    return context


def serve(address: str, port: int, program_port: int, context: ssl.SSLContext) -> None:
    """Listen at the address until the process ends."""
    listener = _listen(LOOPBACK if address.startswith("127.") else address, port)
    asyncio.run(Entrance(listener, context, program_port).accept_forever())


def _listen(address: str, port: int) -> socket.socket:
    reported = ""
    while True:
        try:
            return agent_link.listen_at(address, port)
        except OSError as error:
            if str(error) != reported:
                reported = str(error)
                print(f"cannot listen for the balancer on port {port}: {error}", file=sys.stderr, flush=True)
            time.sleep(BIND_EVERY_S)


class Entrance:
    """Accept the balancer's connections, and join each with one to the program."""

    def __init__(self, listener: socket.socket, context: ssl.SSLContext, program_port: int) -> None:
        self._listener, self._context, self._program_port = listener, context, program_port
        self._strangers: dict[int, socket.socket] = {}  # the oldest first
        self._joining: set[asyncio.Task[None]] = set()
        self._count = 0

    async def accept_forever(self) -> None:
        """Accept connections; each is authenticated in a task of its own."""
        loop = asyncio.get_event_loop()
        self._listener.settimeout(0)
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # out of descriptors, or reset before it was accepted
                await asyncio.sleep(0.1)
                continue
            self._count += 1
            self._strangers[self._count] = connection
            if len(self._strangers) > STRANGERS_MAX:
                agent_wire.hang_up(self._strangers.pop(next(iter(self._strangers))))
            task = loop.create_task(self._join(self._count, connection))
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)

    async def _join(self, number: int, connection: socket.socket) -> None:
        """Connect to the program first: if it refuses, the balancer sees a refused connection, too.

        It may then repeat any request elsewhere. After a handshake it could not know whether the program got one.
        """
        loop = asyncio.get_event_loop()
        program, balancer = _Side(), _Side()
        program.other, balancer.other = balancer, program
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.create_connection(lambda: program, LOOPBACK, self._program_port)
        except OSError:
            self._strangers.pop(number, None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()
            return
        try:
            await loop.connect_accepted_socket(
                lambda: balancer, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except (OSError, asyncio.TimeoutError):  # a stranger
            program.end()
            connection.close()
        finally:
            self._strangers.pop(number, None)


class _Side(asyncio.Protocol):
    """One end of a joined pair: its data goes to the other, no faster than the other takes it."""

    other: _Side

    def __init__(self) -> None:
        self._transport: Any = None
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self.other._transport is None:  # the first end waits for the second
            self.pause_reading()
        elif self.other._is_over:
            self.end()
        else:
            self.other.resume_reading()

    def data_received(self, data: bytes) -> None:
        if not self.other._is_over:
            self.other._transport.write(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Close the other end after its last byte; after an error, cut it off: a part must not pass for the whole."""
        self._is_over = True
        self.other.end(is_cut=exc is not None)

    def end(self, *, is_cut: bool = False) -> None:
        """Close this end, with a reset if `is_cut`."""
        if self._transport is None or self._is_over:
            return
        if is_cut:  # with a reset: the end of TLS without its last message looks like a normal one to many clients
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._transport.abort()
        else:
            self._transport.close()

    def pause_reading(self) -> None:
        """Stop reading from this end for now."""
        if not self._is_over and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading from this end."""
        if not self._is_over and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.other.pause_reading()

    def resume_writing(self) -> None:
        self.other.resume_reading()
