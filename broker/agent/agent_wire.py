"""Connect the nodes of one gang through TLS. Standard library only.

Both ends present the gang's certificate and trust no other. Host names are not checked: possession of the gang's
private key identifies a member at any address. Data from a peer without the key never reaches our parsers.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LINE_BYTES_MAX = 1 << 20
CHUNK_BYTES = 1 << 16
SILENT_POLLS = 8  # waits that make up the silence of a peer; a suspension of this process uses up only one of them


def make_context(pem: Path, *, is_server: bool) -> ssl.SSLContext:
    """Return the TLS settings of one end. `pem` holds the gang's certificate and key."""
    context = make_server_context() if is_server else _make_context(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(str(pem))
    context.load_verify_locations(str(pem))
    return context


def make_server_context() -> ssl.SSLContext:
    """Return the TLS settings of a server without its certificates; clients have to present one that it trusts."""
    context = _make_context(ssl.PROTOCOL_TLS_SERVER)
    if hasattr(context, "num_tickets"):
        context.num_tickets = 0  # sessions are never resumed
    return context


def _make_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # possession of the key is the identity
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # 1.3 if both ends support it
    context.options |= ssl.OP_NO_TICKET | getattr(ssl, "OP_NO_RENEGOTIATION", 0)
    return context


class Wire:
    """A TLS connection for one reading thread and any number of writing threads.

    Two threads must not use OpenSSL's objects at once, and a lock around blocking calls would make writers wait for the
    reader. So TLS runs in memory, under a lock that is never held while the socket blocks.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._lock = threading.Lock()  # guards the three above
        self._write_lock = threading.Lock()  # records are sent in the order of their creation
        self._received = bytearray()

    def shake_hands(self, give_up_s: float) -> None:
        """Authenticate both ends. Raises OSError, also once `time.monotonic()` passes `give_up_s`."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(give_up_s)
            except ssl.SSLError:
                self._flush(give_up_s)  # sends the peer the reason
                raise
            else:
                return self._flush(give_up_s)
            self._incoming.write(self._receive(give_up_s))

    def read_line(self, give_up_s: float | None = None) -> bytes:
        """Return a line without its newline. Raises OSError, even for a closed peer, and ValueError if it is too long.

        Without `give_up_s`, the peer must send something within the timeout.
        """
        while b"\n" not in self._received:
            if len(self._received) > LINE_BYTES_MAX:
                raise ValueError("the line is too long")
            self._received += self._read(give_up_s)
        line, _, self._received = self._received.partition(b"\n")
        return bytes(line)

    def write(self, data: bytes) -> None:
        """Send all data, from any thread. Raises OSError, after which the connection is closed."""
        with self._write_lock:
            with self._lock:
                left = memoryview(data)
                while left:
                    left = left[self._tls.write(left) :]
                records = self._outgoing.read()
            try:
                self._socket.sendall(records)
            except OSError:
                self.close()  # part of a record may have been sent
                raise

    def set_timeout(self, timeout_s: float) -> None:
        """Limit each wait for the peer to this many seconds."""
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """Shut down from any thread: a blocked read or write returns. The reader then calls `release`."""
        hang_up(self._socket)

    def release(self) -> None:
        """Close the descriptor once no writer uses it. Only the reader calls this."""
        self.close()
        with self._write_lock:
            self._socket.close()

    def _read(self, give_up_s: float | None) -> bytes:
        while True:
            with self._lock:
                try:
                    data = self._tls.read(CHUNK_BYTES)
                    if not data:
                        raise ConnectionError("closed")  # by TLS's own message, after which nothing arrives
                    return data
                except ssl.SSLWantReadError:
                    pass  # any TLS reply is sent with the next write: a reader must not wait for the socket
            data = self._receive(give_up_s)
            with self._lock:
                self._incoming.write(data)

    def _receive(self, give_up_s: float | None) -> bytes:
        if give_up_s is not None:
            self._limit(give_up_s)
        else:
            self._await_data()
        data = self._socket.recv(CHUNK_BYTES)
        if not data:
            raise ConnectionError("closed")
        return data

    def _await_data(self) -> None:
        """Wait until the peer has sent something. Raises OSError after the timeout.

        All nodes of a gang on one machine may be suspended together: then none has sent anything when they resume.
        """
        timeout_s = self._socket.gettimeout()
        if timeout_s is None:
            return
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        for _ in range(SILENT_POLLS):
            if waiting.poll(1000 * timeout_s / SILENT_POLLS):
                return
        raise socket.timeout("the peer is silent")  # not TimeoutError before 3.10

    def _flush(self, give_up_s: float) -> None:
        records = self._outgoing.read()
        if records:
            self._limit(give_up_s)
            self._socket.sendall(records)

    def _limit(self, give_up_s: float) -> None:
        left_s = give_up_s - time.monotonic()
        if left_s <= 0:
            raise socket.timeout("the peer is too slow")  # not TimeoutError before 3.10
        self._socket.settimeout(left_s)


def hang_up(connection: socket.socket) -> None:
    """Wake the thread that is blocked on the connection; that thread closes the descriptor."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
