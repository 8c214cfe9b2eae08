"""moto's S3 on the loopback, and a connection to it that can be cut."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

BUCKET = "testbed"
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]  # of WSGI
LOGIN = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """The address of the server."""

    port: int
    address: str = "127.0.0.1"
    # Called with the method and the path of each request after its effect, before its answer leaves.
    on_answer: list[Callable[[str, str], None]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Return the URL for AWS_ENDPOINT_URL."""
        return f"http://{self.address}:{self.port}"

    def list_keys(self, prefix: str) -> list[str]:
        """List the bucket's keys below a prefix, whatever login this process has."""
        import obstore
        from obstore.store import from_url

        login = {name.lower(): value for name, value in LOGIN.items()}
        store = from_url(f"s3://{BUCKET}", endpoint=self.url, client_options={"allow_http": True}, **login)
        return [each["path"] for page in obstore.list(store, prefix) for each in page]

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment in which a program finds it."""
        return LOGIN | {"AWS_ENDPOINT_URL": self.url}


def put_marker(server: S3Server, key: str) -> None:
    """Put an empty object whose key ends with `/`, as consoles do for a folder; obstore cannot."""
    with socket.create_connection((server.address, server.port), timeout=30) as wire:
        wire.sendall(f"PUT /{BUCKET}/{key} HTTP/1.0\r\nHost: {server.address}\r\nContent-Length: 0\r\n\r\n".encode())
        assert b" 200 " in wire.recv(4096)


@contextlib.contextmanager
def serve_s3(address: str = "127.0.0.1") -> Iterator[S3Server]:
    """Serve one empty bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    on_answer: list[Callable[[str, str], None]] = []
    server._server.app = call_after(make_conditions_atomic(server._server.app), on_answer)
    try:
        port = server.get_host_and_port()[1]
        with socket.create_connection((address, port), timeout=30) as wire:
            wire.sendall(f"PUT /{BUCKET} HTTP/1.0\r\nHost: {address}:{port}\r\nContent-Length: 0\r\n\r\n".encode())
            assert b" 200 " in wire.recv(4096)
        yield S3Server(port=port, address=address, on_answer=on_answer)
    finally:
        server.stop()


def call_after(application: Application, hooks: list[Callable[[str, str], None]]) -> Application:
    """Call the hooks once a request has had its effect."""

    def handle(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        answer = application(environ, start_response)
        for hook in hooks:
            hook(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        return answer

    return handle


class LateAnswer:
    """Holds back the answer to the first PUT of a key, after its effect, until `release`."""

    def __init__(self, server: S3Server, key: str) -> None:
        self._path, self._over = f"/{BUCKET}/{key}", threading.Event()
        self.held = 0
        server.on_answer.append(self._hold)

    def open_store(self, server: S3Server) -> Any:
        """Open a store that does not wait long for an answer."""
        from obstore.store import from_url

        login = {name.lower(): value for name, value in LOGIN.items()}
        options = {"allow_http": True, "timeout": "1s"}
        return from_url(f"s3://{BUCKET}", endpoint=server.url, client_options=options, **login)

    def release(self) -> None:
        """Let all answers leave."""
        self._over.set()

    def _hold(self, method: str, path: str) -> None:
        if (method, path) == ("PUT", self._path) and not self.held:
            self.held += 1
            self._over.wait(60)


def make_conditions_atomic(application: Application) -> Application:
    """Let one conditional request at a time through: moto looks for the object, and writes it without a lock."""
    lock = threading.Lock()

    def handle(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        is_conditional = "HTTP_IF_NONE_MATCH" in environ or "HTTP_IF_MATCH" in environ
        with lock if is_conditional else contextlib.nullcontext():
            return application(environ, start_response)

    return handle


@dataclass(kw_only=True)
class Wire:
    """A proxy to a port that breaks connections carrying too many bytes, as often as requested."""

    target: int
    cuts_left: int = 0
    cut_after_bytes: int = 100_000
    cuts_made: int = 0
    _listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def port(self) -> int:
        """Return the port to connect to."""
        port: int = self._listener.getsockname()[1]
        return port

    def open(self) -> None:
        """Begin to listen."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            threading.Thread(target=self._pass_on, args=(client, server), kwargs={"may_cut": True}, daemon=True).start()
            threading.Thread(
                target=self._pass_on, args=(server, client), kwargs={"may_cut": False}, daemon=True
            ).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, *, may_cut: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                passed += len(data)
                if may_cut and passed > self.cut_after_bytes and self._take_cut():
                    break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _take_cut(self) -> bool:
        with self._lock:
            if not self.cuts_left:
                return False
            self.cuts_left -= 1
            self.cuts_made += 1
            return True
