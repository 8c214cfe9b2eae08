"""Receivers of notifications on the loopback interface: an HTTP server, and a minimal SMTP server."""

from __future__ import annotations

import base64
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpReceiver(ThreadingHTTPServer):
    """Keeps the JSON bodies of what it accepts, and answers with `status`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class _Answer(BaseHTTPRequestHandler):
    server: HttpReceiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.headers.append(dict(self.headers))
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.bodies.append({"redirected": True})
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class SmtpReceiver(socketserver.ThreadingTCPServer):
    """Keeps mails and logins, without TLS; `refusal` is its answer to the content instead."""

    daemon_threads = True

    def __init__(self) -> None:
        self.mails: list[str] = []
        self.logins: list[tuple[str, str]] = []
        self.refusal = ""
        super().__init__(("127.0.0.1", 0), _Session)

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Session(socketserver.StreamRequestHandler):
    server: SmtpReceiver

    def handle(self) -> None:
        self._say("220 ready")
        while line := self.rfile.readline().decode(errors="replace").strip():
            verb = line.split()[0].upper()
            if verb == "EHLO":
                self._say("250-receiver\r\n250 AUTH PLAIN")
            elif verb == "AUTH":
                _, user, password = base64.b64decode(line.split()[2]).decode().split("\0")
                self.server.logins.append((user, password))
                self._say("235 welcome")
            elif verb == "DATA":
                self._say("354 go")
                lines = iter(self.rfile.readline, b".\r\n")
                mail = b"".join(lines).decode()
                if not self.server.refusal:
                    self.server.mails.append(mail)
                self._say(self.server.refusal or "250 taken")
            elif verb == "QUIT":
                self._say("221 bye")
                return
            else:
                self._say("250 ok")

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


@contextmanager
def run_receiver(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
