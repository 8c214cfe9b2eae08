"""The HTTP side of the fake AWS: a thread on loopback that real boto3 talks to."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.testbed.ec2_wire import ApiError, read_request, write_answer, write_error

SCOPE = re.compile(r"Credential=(?P<key>[^/]+)/\d+/(?P<region>[^/]+)/(?P<service>[^/]+)/aws4_request")
Serve = Callable[[str, str, str, str, dict[str, Any]], dict[str, Any]]


class HangUp(Exception):
    """A request to close the connection with no answer."""


class AwsServer:
    """A server whose `serve(key, service, region, action, parameters)` answers or raises ApiError or HangUp."""

    def __init__(self, serve: Serve, *, address: str = "127.0.0.1", caller_address: str = "203.0.113.7") -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet an answer; without it and the next line each takes 40 ms
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._answer(200, "text/plain", f"{caller_address}\n".encode())

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(size)
                if len(body) < size:  # the client was killed
                    self.close_connection = True
                    return
                scope = SCOPE.search(self.headers.get("Authorization", ""))
                service = scope["service"] if scope else "ec2"
                try:
                    if scope is None:
                        raise ApiError("MissingAuthenticationToken", status=403)
                    action, parameters = read_request(service, body, self.headers.get("X-Amz-Target", ""))
                    answer = serve(scope["key"], service, scope["region"], action, parameters)
                    self._answer(200, *write_answer(service, action, answer))
                except HangUp:
                    self.close_connection = True
                except ApiError as error:
                    self._answer(error.status, *write_error(service, error))

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
