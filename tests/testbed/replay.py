"""A cloud that answers from a recording (`broker check CLOUD --live --record FILE`), over HTTP on loopback.

Reads are answered in their order between two changes, the last of them as often as requested; a change advances the
recording. Names that are drawn at random, such as tokens, differ from run to run: where a request now has another name
than in the recording, later answers have it, too.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote_plus

from broker.clouds.tape import Exchange, cut_bodies
from tests.testbed.ec2_server import SCOPE

READS = re.compile(r"Describe|Get|List|GET |POST \S+/wait\b")
WORD = re.compile(r"[\w-]{8,}")


class NotRecorded(Exception):
    """A request to the cloud that is not in the recording."""


def read_tape(path: Path) -> list[Exchange]:
    return [Exchange(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


class Replay:
    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._exchanges = exchanges
        self._place = 0  # of the newest change that was requested
        self._used: set[int] = set()
        self._words: dict[str, str] = {}  # in the recording -> now
        self._lock = threading.Lock()

    def answer(self, key: tuple[str, str, str], request: str) -> Exchange:
        """Answer a request; `key` is service, region, operation. Raise NotRecorded."""
        with self._lock:
            mine = [index for index, each in enumerate(self._exchanges) if self._read_key(each) == key]
            found = self._choose(mine, is_read=bool(READS.match(key[2])))
            if found is None:
                raise NotRecorded(f"{key}: {request[:200]}")
            self._used.add(found)
            exchange = self._exchanges[found]
            self._learn(exchange.request, cut_bodies(request))
            return exchange

    def translate(self, text: str) -> str:
        for then, now in self._words.items():
            text = text.replace(then, now)
        return text

    def _read_key(self, exchange: Exchange) -> tuple[str, str, str]:
        return exchange.service, exchange.region, self.translate(exchange.operation)

    def _choose(self, mine: Sequence[int], *, is_read: bool) -> int | None:
        if not is_read:
            found = next((index for index in mine if index not in self._used), None)
            self._place = max(self._place, found or 0)
            return found
        changes = (index for index, each in enumerate(self._exchanges) if not READS.match(each.operation))
        end = next((index for index in changes if index > self._place and index not in self._used), None)
        known = [index for index in mine if end is None or index < end]
        fresh = next((index for index in known if index not in self._used and index >= self._place), None)
        return fresh if fresh is not None else known[-1] if known else mine[0] if mine else None

    def _learn(self, then: str, now: str) -> None:
        old, new = WORD.findall(unquote_plus(then)), WORD.findall(unquote_plus(now))
        if len(old) == len(new):
            self._words.update((before, after) for before, after in zip(old, new, strict=True) if before != after)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    replay: Replay
    missing: list[str]

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if self.command == "GET" and self.path == "/":  # the request for the caller's own address
            self._send(200, "text/plain", "203.0.113.7\n")
            return
        try:
            exchange = self.replay.answer(self._read_key(body), body)
        except NotRecorded as error:
            self.missing.append(str(error))
            self._send(501, "text/plain", str(error))
            return
        is_xml = exchange.answer.startswith("<")
        self._send(
            exchange.status, "text/xml" if is_xml else "application/json", self.replay.translate(exchange.answer)
        )

    do_GET = do_POST = do_DELETE = do_PATCH = _answer

    def _read_key(self, body: str) -> tuple[str, str, str]:
        scope = SCOPE.search(self.headers.get("Authorization", ""))
        if scope is None:
            return "127.0.0.1", "", f"{self.command} {self.path}"
        target = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
        service = {"servicequotas": "service-quotas"}.get(scope["service"], scope["service"])
        return service, scope["region"], target or dict(parse_qsl(body))["Action"]

    def _send(self, status: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serve(exchanges: Sequence[Exchange]) -> Iterator[tuple[str, list[str]]]:
    """Serve, and yield the URL and a list that collects requests that are not in the recording."""
    missing: list[str] = []
    handler = type("BoundHandler", (Handler,), {"replay": Replay(exchanges), "missing": missing})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", missing
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
