"""Serve a `Rendezvous` on a port. Peers that cannot authenticate are ignored, and cannot block others.

The protocol is JSON lines. A worker sends hello {id, port, order, holding, unit}, then vote {is_leaving}, failed,
done and beat; after the loss of its rendezvous, hello also has {generation, former, lost}. It receives welcome, then
the messages of `Rendezvous`. Before hello, `where` asks for the state of the rendezvous. Where broker names the leader,
hello also has the `epoch` in which this node leads; a worker that knows another one is refused.
"""

import asyncio
import errno
import hmac
import json
import socket
import threading
from contextlib import suppress
from typing import Any

from trainers.errors import TrainerError
from trainers.rendezvous import RETURN_S_MAX, SILENCE_S_MAX, SILENT_POLLS, WAIT_S_MAX, WHOLE_MAX, Member, Rendezvous
from trainers.wire import HANDSHAKE_S, LINE_BYTES_MAX, Credential, parse_line

STRANGERS_MAX = 512  # unauthenticated connections; beyond this the oldest one is closed
UNSENT_BYTES_MAX = 1 << 20  # a worker that leaves more unread is treated as lost
UNIT_MAX = 2**20
FORMER_MAX = 2**16
DEPARTURES_S = 0.05


class RendezvousServer:
    """Listens in a separate thread from its creation on."""

    def __init__(self, rendezvous: Rendezvous, host: str, port: int, credential: Credential) -> None:
        """Listen on `port`.

        Raises: OSError if the port is taken, TrainerError if the credential cannot be read.
        """
        self._rendezvous = rendezvous
        self._context = credential.make_context(is_server=True)
        self._greeting = credential.greeting
        if self._context is None and not (credential.secret and host == "127.0.0.1"):
            raise TrainerError("without a certificate, workers can meet on one machine only")
        self._listener = listen(host, port)
        self.address, self.port = self._listener.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._strangers: dict[asyncio.Task[None], socket.socket] = {}  # oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_empty = threading.Event()  # set, after a request, when no member of the world is connected
        rendezvous.on_gather = self._set_timers
        self._loop.call_soon(self._set_timers)
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections and end the thread. Used by tests."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def await_departures(self, timeout_s: float) -> None:
        """Wait until all members have disconnected: one that loses this server first would search for another."""
        self._loop.call_soon_threadsafe(self._check_departures)
        self._is_empty.wait(timeout_s)

    def _check_departures(self) -> None:
        if not self._rendezvous.current:
            self._is_empty.set()
        else:
            self._loop.call_later(DEPARTURES_S, self._check_departures)

    def _run(self) -> None:
        accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()
        for task in (accepting, *self._tasks):
            task.cancel()
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(asyncio.gather(accepting, *self._tasks, return_exceptions=True))
        self._listener.close()
        self._loop.close()

    def _set_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        # Nodes of a new gang may arrive minutes apart; only returning members are known to be quick.
        return_s = RETURN_S_MAX if self._rendezvous.generation else WAIT_S_MAX
        self._timers = [
            self._loop.call_later(return_s, self._mark_late),
            self._loop.call_later(return_s + WAIT_S_MAX, self._give_up),
        ]

    def _mark_late(self) -> None:
        if self._rendezvous.is_gathering:
            self._rendezvous.is_late = True
            self._rendezvous.consider()

    def _give_up(self) -> None:
        if self._rendezvous.is_gathering:
            self._rendezvous.give_up()

    async def _accept(self) -> None:
        while True:
            try:
                connection, place = await self._loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(0.1)  # out of descriptors, or the connection was reset before it was accepted
                continue
            task = self._loop.create_task(self._greet(connection, place[0]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._strangers[task] = connection
            task.add_done_callback(lambda task: self._strangers.pop(task, None))
            if len(self._strangers) > STRANGERS_MAX:
                hang_up(self._strangers.pop(next(iter(self._strangers))))

    async def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            reader, writer = await asyncio.wait_for(self._authenticate(connection), HANDSHAKE_S)
        except (OSError, asyncio.TimeoutError, ValueError):  # not TimeoutError before Python 3.11
            return hang_up(connection)
        task = asyncio.current_task()
        assert task is not None
        self._strangers.pop(task, None)
        await self._serve(reader, writer, address)

    async def _authenticate(self, connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Authenticate a peer. Raises OSError or ValueError if that fails; the caller then closes the connection.

        asyncio does not expose the transport of an unfinished handshake: only an end of file closes it.
        """
        transport: asyncio.BaseTransport | None = None
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_s = HANDSHAKE_S if self._context else None
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=limit_s
            )
            assert isinstance(transport, asyncio.WriteTransport)
            if self._context is None and not hmac.compare_digest(await reader.readline(), self._greeting):
                raise ValueError("stranger")
            writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
            writer.write(b'{"kind": "welcome"}\n')
            return reader, writer
        except BaseException:
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
            elif transport is None and self._context is None:
                connection.close()
            raise

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        member: Member | None = None
        try:
            while line := await read_line(reader):
                message = parse_line(line)
                if message["kind"] == "where" and not member:
                    writer.write(json.dumps(self._describe()).encode() + b"\n")
                elif message["kind"] == "hello" and member:
                    raise ValueError("a worker says hello once")
                elif message["kind"] == "hello":
                    member = self._admit(read_member(message, address, writer))
                elif member:
                    self._handle(message, member)
                if writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
                    raise ValueError("does not read")
        except (OSError, TimeoutError, ValueError):
            pass  # regardless of the cause, this worker is treated as lost
        finally:
            if member:
                self._rendezvous.depart(member)
            writer.close()

    def _describe(self) -> dict[str, object]:
        rendezvous = self._rendezvous
        about = {"generation": rendezvous.generation, "is_gathering": rendezvous.is_gathering}
        epoch = rendezvous.find_epoch() if rendezvous.find_epoch else None
        return {"kind": "where", "is_over": rendezvous.is_over, "epoch": epoch, **about}

    def _admit(self, member: Member) -> Member:
        """Admit a worker. Raises ValueError if it cannot join the same world as the others."""
        rendezvous = self._rendezvous
        if rendezvous.find_epoch is not None and member.epoch != rendezvous.find_epoch():
            raise ValueError("it looks for another leader")
        if rendezvous.unit != member.unit and (rendezvous.waiting or rendezvous.current):
            units = f"this worker joins in units of {member.unit}, the others in units of {rendezvous.unit}"
            words = f"{units}: are their flags equal?"
            member.send(kind="end", reason=words)
            raise ValueError(words)
        rendezvous.arrive(member)
        return member

    def _handle(self, message: dict[str, Any], member: Member) -> None:
        """Handle a message. Raises ValueError if it is invalid; unknown kinds are from another version and ignored."""
        if message["kind"] == "vote":
            if not isinstance(message.get("is_leaving"), bool):
                raise ValueError("invalid vote")
            self._rendezvous.vote(member, is_leaving=message["is_leaving"])
        elif message["kind"] == "failed":
            self._rendezvous.fail(member)
        elif message["kind"] == "done" and self._rendezvous.current.get(member.id) is member:
            self._rendezvous.finish()


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line; empty at the end. Raises TimeoutError after a silence of `SILENCE_S_MAX`."""
    for _ in range(SILENT_POLLS):
        with suppress(asyncio.TimeoutError):  # not TimeoutError before Python 3.11
            return await asyncio.wait_for(reader.readline(), SILENCE_S_MAX / SILENT_POLLS)
    raise TimeoutError("the worker is silent")


def read_member(message: dict[str, Any], address: str, writer: asyncio.StreamWriter) -> Member:
    """Parse a hello message into a member. Raises ValueError for an invalid field."""
    id, port, unit = message.get("id"), message.get("port"), message.get("unit")
    order, holding = read_wholes(message.get("order"), 2), read_wholes(message.get("holding"), 4)
    step, world, index, count = holding
    if not isinstance(id, str) or not 0 < len(id) <= 64:
        raise ValueError("invalid id")
    if not is_whole(port, 1, 65535) or not is_whole(unit, 1, UNIT_MAX):
        raise ValueError("invalid port or unit")
    if step < -1 or not 0 <= index < count:
        raise ValueError("invalid holding")
    return Member(
        id=id,
        address=address,
        port=message["port"],
        order=(order[0], order[1]),
        holding=(step, world, index, count),
        unit=message["unit"],
        writer=writer,
        **read_past(message),
    )


def read_past(message: dict[str, Any]) -> dict[str, Any]:
    """Parse the optional fields of a worker, on its last world. Raises ValueError for an invalid field."""
    generation, former, lost = message.get("generation", 0), message.get("former", []), message.get("lost", "")
    if not is_whole(generation, 0, WHOLE_MAX) or not isinstance(lost, str):
        raise ValueError("invalid generation or node")
    epoch = message.get("epoch", 0)
    if not is_whole(epoch, 0, WHOLE_MAX):
        raise ValueError("invalid epoch")
    if not isinstance(former, list) or len(former) > FORMER_MAX or not all(isinstance(each, str) for each in former):
        raise ValueError("invalid former world")
    return {"generation": generation, "former": tuple(former), "lost": lost, "epoch": epoch}


def is_whole(value: object, least: int, most: int) -> bool:
    """Return whether a JSON value is an integer within bounds; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def read_wholes(values: object, count: int) -> list[int]:
    """Return a list of `count` integers. Raises ValueError for anything else."""
    if not isinstance(values, list) or len(values) != count:
        raise ValueError("not a list of that length")
    if not all(is_whole(number, -WHOLE_MAX, WHOLE_MAX) for number in values):
        raise ValueError("not whole numbers")
    return values


def hang_up(connection: socket.socket) -> None:
    """Shut a connection down: its transport reads an end of file and closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def listen(host: str, port: int) -> socket.socket:
    """Listen at this address, or on all interfaces if it is a name or not an address of this machine (behind NAT).

    A name may resolve to the loopback here (Debian's /etc/hosts) and to the network on other nodes.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][0]
    except OSError:
        family, host = socket.AF_INET, ""
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        listener = socket.create_server(("", port), family=family, backlog=1024)
    listener.setblocking(False)
    return listener
