"""The fake Compute Engine over HTTP, on loopback, in threads of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from tests.testbed.gce import FakeGce, LostAnswer
from tests.testbed.gce_rules import GceError


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: otherwise Nagle's algorithm holds the second back for 40 ms
    disable_nagle_algorithm = True
    gce: ClassVar[FakeGce]

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self) -> None:
        split = urlsplit(self.path)
        size = int(self.headers.get("Content-Length") or 0)
        text = self.rfile.read(size)
        if len(text) < size:  # the client was killed
            self.close_connection = True
            return
        status: int
        try:
            body = json.loads(text) if text else {}
            status, reply = 200, self.gce.answer(self.command, split.path, dict(parse_qsl(split.query)), body)
        except GceError as error:
            status, reply = error.status, error.body()
        except LostAnswer:
            self.close_connection = True
            return
        content = json.dumps(_strip(reply)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer


def _strip(value: Any) -> Any:
    """Remove our own notes, whose names begin with `_`."""
    if isinstance(value, dict):
        return {key: _strip(each) for key, each in value.items() if not key.startswith("_")}
    return [_strip(each) for each in value] if isinstance(value, list) else value


@contextmanager
def serve(gce: FakeGce, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve, and yield the URL for BROKER_GCP_ENDPOINT."""
    handler = type("BoundHandler", (Handler,), {"gce": gce})
    server = ThreadingHTTPServer((host, port), handler)
    server.daemon_threads = True
    gce.base = f"http://{host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield gce.base
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
