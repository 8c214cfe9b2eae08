"""Authentication between a worker and the rendezvous of an elastic run, and the worker's end of their connection.

Under broker, `BROKER_GANG_PEM` names a file with a certificate and its key on every node of the run: both ends present
it over TLS and trust no other. Without it, all workers are on one machine and present a secret that their launcher
created. Broker's agent has a copy of `Wire`, because neither side may import the other.
"""

import json
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainers.errors import TrainerError

PEM_VARIABLE = "BROKER_GANG_PEM"
SECRET_VARIABLE = "BROKER_ELASTIC_SECRET"
HANDSHAKE_S = 15.0  # limit until a connection is authenticated
LINE_BYTES_MAX = 1 << 20
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Credential:
    """A certificate with its key, or a secret for workers on one machine."""

    pem: Path | None = None
    secret: str = field(default="", repr=False)

    def make_context(self, *, is_server: bool) -> ssl.SSLContext | None:
        """Return the TLS context of one end, or None for a secret. Raises TrainerError for an invalid PEM."""
        if self.pem is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # a member is identified by its key, not by its address
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        if is_server:
            context.num_tickets = 0  # sessions are not resumed
        try:
            context.load_cert_chain(self.pem)
            context.load_verify_locations(self.pem)
        except OSError as error:  # includes SSLError
            raise TrainerError(f"`{PEM_VARIABLE}`: {self.pem} is not a certificate with its key: {error}") from None
        return context

    @property
    def greeting(self) -> bytes:
        """The first line that a worker sends without TLS."""
        return b"" if self.pem else f"secret {self.secret}\n".encode()


def read_credential(variables: Mapping[str, str]) -> Credential | None:
    """Return the credential in the environment, or None."""
    if pem := variables.get(PEM_VARIABLE):
        return Credential(pem=Path(pem))
    secret = variables.get(SECRET_VARIABLE)
    return Credential(secret=secret) if secret else None


class Wire:
    """JSON lines to the rendezvous, for one reading thread and any number of writing ones.

    OpenSSL's objects are not thread-safe, and a lock around blocking calls would make writers wait for the reader. So
    TLS runs on memory buffers, under a lock that is never held while the socket blocks.
    """

    def __init__(self, connection: socket.socket, credential: Credential) -> None:
        """Authenticate both ends. Raises OSError, and ValueError if the other end does not speak our protocol."""
        self._socket = connection
        self._lock = threading.Lock()  # guards the TLS objects
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = credential.make_context(is_server=False)
        self._tls = context and context.wrap_bio(self._incoming, self._outgoing)
        self._send_lock = threading.Lock()  # records are sent in the order of their encryption
        self._received = bytearray()
        self._give_up_s: float | None = time.monotonic() + HANDSHAKE_S
        if self._tls:
            self._shake_hands(self._tls)
        else:
            self._write(credential.greeting)
        # With TLS 1.3 our handshake completes before the other end has verified our certificate.
        if self.read() != {"kind": "welcome"}:
            raise ValueError("not welcome")
        self._give_up_s = None
        connection.settimeout(None)

    def send(self, **message: Any) -> None:
        """Send one line, from any thread. Raises OSError, after which the connection is unusable."""
        self._write(json.dumps(message).encode() + b"\n")

    def read(self) -> dict[str, Any]:
        """Wait for the next message. Raises OSError at the end of the connection, ValueError for an invalid message."""
        while b"\n" not in self._received:
            if len(self._received) > LINE_BYTES_MAX:
                raise ValueError("the line is too long")
            self._received += self._read()
        line, _, self._received = self._received.partition(b"\n")
        return parse_line(bytes(line))

    def limit(self, timeout_s: float | None) -> None:
        """Limit each wait of `read` for data (None: no limit). Beyond it, `read` raises TimeoutError, an OSError."""
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """Close the connection; a blocked `read` raises OSError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _shake_hands(self, tls: ssl.SSLObject) -> None:
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # so that the other end receives the reason
                raise
            else:
                return self._flush()
            self._incoming.write(self._receive())

    def _write(self, data: bytes) -> None:
        with self._send_lock:
            if self._tls:
                with self._lock:
                    left = memoryview(data)
                    while left:
                        left = left[self._tls.write(left) :]
                    data = self._outgoing.read()
            try:
                self._socket.sendall(data)
            except OSError:
                with suppress(OSError):  # part of a record may have been sent: nothing more can follow
                    self._socket.shutdown(socket.SHUT_RDWR)
                raise

    def _flush(self) -> None:
        if records := self._outgoing.read():
            self._limit()
            self._socket.sendall(records)

    def _read(self) -> bytes:
        while self._tls:
            with self._lock, suppress(ssl.SSLWantReadError):
                data = self._tls.read(CHUNK_BYTES)
                if not data:
                    raise ConnectionError("closed")  # by TLS's own message, after which nothing arrives
                return data
            data = self._receive()
            with self._lock:
                self._incoming.write(data)
        return self._receive()

    def _receive(self) -> bytes:
        self._limit()
        data = self._socket.recv(CHUNK_BYTES)
        if not data:
            raise ConnectionError("closed")
        return data

    def _limit(self) -> None:
        if self._give_up_s is not None:
            left_s = self._give_up_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the rendezvous is too slow")
            self._socket.settimeout(left_s)


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse a message. Raises ValueError if it is invalid."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("not a message")
    return message
