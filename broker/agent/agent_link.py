"""Connect the nodes of one gang: listener, handshake, and JSON lines over TLS. Standard library only."""

from __future__ import annotations

import errno
import json
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from broker.agent import agent_wire

    Message = dict[str, Any]  # not evaluated on the nodes, which may have Python 3.8
else:
    import agent_wire

BEAT_S = 2.0
# A peer that is silent for this long is lost. A process that ends closes its connection, and a machine that vanishes is
# listed as gone by its cloud, so this may be long: a busy machine may suspend a process for half a minute.
LOST_S = 40.0
HANDSHAKE_S = 15.0  # limit until a connection is authenticated and has sent `hello`
CONNECT_S = 5.0
STRANGERS_MAX = 256  # connections that are not yet authenticated, in addition to one per rank
SECONDS_MAX = 1e7
ANY = ("0.0.0.0", "::")
STATUSES = ("SUCCEEDED", "FAILED", "FAILED_SETUP", "CANCELLED")


def is_number(value: Any, low: float, high: float) -> bool:
    """Return whether a message's value is a finite number from `low` to `high`; booleans are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def is_whole(value: Any) -> bool:
    """Return whether a message's value is a 32-bit integer."""
    return isinstance(value, int) and is_number(value, -(2**31), 2**31)


def are_cards(value: Any) -> bool:
    """Return whether a message's value is a list of accelerator indices, or None."""
    return value is None or (isinstance(value, list) and all(is_whole(card) and card >= 0 for card in value))


def is_text(value: Any) -> bool:
    """Return whether the value of a message field is a string."""
    return isinstance(value, str)


ENDING: dict[str, Callable[[Any], bool]] = {
    "status": lambda value: value in STATUSES,
    "returncode": lambda value: value is None or is_whole(value),
    "reason": is_text,
}
# The fields of each kind and their checks. Other kinds belong to a later version and are ignored.
FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "hello": {"rank": lambda value: is_whole(value) and value >= 0},
    "setup": {"returncode": is_whole},
    "exit": {"returncode": is_whole},
    "measure": {"limit_s": lambda value: is_number(value, 0, SECONDS_MAX)},
    "network": {"answer": lambda value: isinstance(value, dict)},
    "log": {"text": is_text},
    "turn": {"cards": are_cards, "share": lambda value: is_number(value, 0, 1)},
    "notice": {"notice_s": lambda value: is_number(value, 0, SECONDS_MAX)},
    "kill": ENDING,
    "end": ENDING,
}


def parse_message(line: bytes) -> Message:
    """Raise ValueError for a line that no correct member sends."""
    try:
        message = json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError("not a message")
    for name, is_valid in FIELDS.get(message["type"], {}).items():
        if name not in message or not is_valid(message[name]):
            raise ValueError(f"invalid `{name}` in `{message['type']}`")
    return message


class Link:
    """One end of an authenticated connection. `on_message` gets {"type": "lost"} once, when the peer is gone.

    A peer that sends an invalid message counts as gone, too.
    """

    def __init__(self, wire: agent_wire.Wire, on_message: Callable[[Message], None]) -> None:
        self._wire = wire
        self._on_message = on_message
        self._is_over = threading.Event()
        wire.set_timeout(LOST_S)

    def start(self) -> None:
        """Start the threads that read messages and send a heartbeat every `BEAT_S` seconds."""
        threading.Thread(target=self._read, name="gang-read", daemon=True).start()
        threading.Thread(target=self._beat, name="gang-beat", daemon=True).start()

    def send(self, kind: str, **fields: Any) -> bool:
        """Send one message. Return False if the connection is lost."""
        try:
            self._wire.write(encode(kind, **fields))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the connection; the reading thread ends. Idempotent."""
        self._is_over.set()
        self._wire.close()

    def _beat(self) -> None:
        while self.send("beat") and not self._is_over.wait(BEAT_S):
            pass

    def _read(self) -> None:
        try:
            while True:
                message = parse_message(self._wire.read_line())
                if message["type"] not in ("beat", "lost"):  # only we create "lost"
                    self._on_message(message)
        except (OSError, ValueError):
            pass
        finally:  # also after a fault of ours: with the heartbeat alone, the peer would seem to be well forever
            self._is_over.set()
            self._wire.release()
            self._on_message({"type": "lost"})


def encode(kind: str, **fields: Any) -> bytes:
    """Return the message as one line of JSON."""
    return json.dumps({"type": kind, **fields}).encode() + b"\n"


def connect(
    address: str,
    port: int,
    context: ssl.SSLContext,
    rank: int,
    on_message: Callable[[Message], None],
    *,
    epoch: int = 0,
) -> Link:
    """Join the coordinator of this epoch as `rank`. Raises OSError while it does not listen or admit this rank."""
    connection = socket.create_connection((address, port), timeout=CONNECT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        give_up_s = time.monotonic() + HANDSHAKE_S
        wire = agent_wire.Wire(connection, context, is_server=False)
        wire.shake_hands(give_up_s)
        wire.write(encode("hello", rank=rank, epoch=epoch))
        # With TLS 1.3 our handshake completes before the peer has verified our certificate.
        welcome = parse_message(wire.read_line(give_up_s))
        if welcome["type"] != "welcome" or welcome.get("epoch", 0) != epoch:
            raise ConnectionError("not welcome")
    except (OSError, ValueError) as error:
        connection.close()
        raise ConnectionError(str(error)) from error
    link = Link(wire, on_message)
    link.start()
    return link


class MemberListener:
    """Accept connections, authenticate each in its own thread, and pass on those that send a valid `hello`.

    `on_member(wire, rank, epoch)` runs in that thread. If more unauthenticated connections wait than `STRANGERS_MAX`
    plus the gang's size, the oldest is closed: a member authenticates in milliseconds, and retries if it was closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        size: int,
        on_member: Callable[[agent_wire.Wire, int, int], None],
    ) -> None:
        self._listener = listener
        self._context = context
        self._strangers_max = STRANGERS_MAX + size
        self._size = size
        self._on_member = on_member
        self._lock = threading.Lock()
        self._strangers: dict[int, socket.socket] = {}  # the oldest first
        self._count = 0
        self._is_closed = False

    def start(self) -> None:
        """Accept connections in a daemon thread."""
        threading.Thread(target=self._accept, name="gang-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and close unauthenticated connections."""
        with self._lock:
            self._is_closed = True
            strangers = list(self._strangers.values())
        for connection in (self._listener, *strangers):
            agent_wire.hang_up(connection)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                time.sleep(0.0 if self._is_closed else 0.1)  # out of descriptors, or reset before it was accepted
                continue
            with self._lock:
                self._count += 1
                number = self._count
                self._strangers[number] = connection
                if len(self._strangers) > self._strangers_max:
                    agent_wire.hang_up(self._strangers.pop(next(iter(self._strangers))))
                if self._is_closed:
                    agent_wire.hang_up(connection)
            try:
                threading.Thread(target=self._greet, args=(number, connection), name="gang-greet", daemon=True).start()
            except RuntimeError:  # out of threads: the peer may retry
                self._forget(number)
                connection.close()
        self._listener.close()

    def _forget(self, number: int) -> None:
        with self._lock:
            self._strangers.pop(number, None)

    def _greet(self, number: int, connection: socket.socket) -> None:
        wire: agent_wire.Wire | None = None
        rank = epoch = -1
        try:
            give_up_s = time.monotonic() + HANDSHAKE_S
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            candidate = agent_wire.Wire(connection, self._context, is_server=True)
            candidate.shake_hands(give_up_s)
            hello = parse_message(candidate.read_line(give_up_s))
            if hello["type"] == "hello" and hello["rank"] < self._size:
                wire, rank, epoch = candidate, hello["rank"], read_epoch(hello)
        except (OSError, ValueError):
            pass  # not a member, or a faulty one
        self._forget(number)
        if wire is None or self._is_closed:
            connection.close()
        else:
            self._on_member(wire, rank, epoch)


def read_epoch(message: Message) -> int:
    """Return the epoch of a message, 0 if an older agent sent it. Raises ValueError if it is invalid."""
    epoch = message.get("epoch", 0)
    if not is_whole(epoch) or epoch < 0:
        raise ValueError("invalid `epoch`")
    return int(epoch)


def pick_port() -> int:
    """Return a free port below the ephemeral range (Linux: from 32768), so that no outgoing connection takes it."""
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    raise OSError("no free port between 20000 and 32000")


def listen(address: str, size: int) -> socket.socket:
    """Listen for a gang, on a port that the kernel chooses. A gang of one only needs the loopback."""
    return listen_at("127.0.0.1" if size == 1 else address, 0)


def listen_at(address: str, port: int) -> socket.socket:
    """Listen on the first node's address, or on all interfaces if this machine does not have it.

    Behind a NAT the address that others use is not ours. A name is not resolved because it may map to the loopback here
    (Debian's /etc/hosts). Raises OSError if the port is taken.
    """
    try:
        places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, _, _, _, place = places[0]
    except OSError:
        return _listen(socket.AF_INET, (ANY[0], port))
    try:
        return _listen(family, place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return _listen(family, (ANY[family == socket.AF_INET6], port))


def find_own(address: str) -> str:
    """Return the address at which this machine reaches its own listener."""
    return {ANY[0]: "127.0.0.1", ANY[1]: "::1"}.get(address, address)


def _listen(family: int, place: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if place[1]:  # a chosen port may still have connections of an earlier run
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener
