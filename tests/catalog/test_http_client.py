"""HTTP against a server on the loopback that misbehaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from broker.catalog.http_client import TRIES_MAX, HttpGet
from broker.errors import AuthError, SourceError


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        server.paths.append(self.path)
        status, headers, body = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    answers: list[tuple[int, dict[str, str], bytes]]
    paths: list[str]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.answers, server.paths = [(200, {}, b"prices")], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/list"


def test_a_throttled_request_is_retried_after_the_requested_delay(server: Server, url: str) -> None:
    server.answers = [(429, {"Retry-After": "7"}, b""), (503, {}, b""), (200, {}, b"prices")]
    waits: list[float] = []
    assert HttpGet(waits.append)(url, query={"key": "a b"}) == b"prices"
    assert waits == [7.0, 2.0]
    assert server.paths == ["/list?key=a+b"] * 3


def test_requests_to_a_server_that_stays_down_end_with_an_error(server: Server, url: str) -> None:
    server.answers = [(500, {}, b"oops")]
    waits: list[float] = []
    with pytest.raises(SourceError, match="500"):
        HttpGet(waits.append)(url)
    assert len(server.paths) == TRIES_MAX and len(waits) == TRIES_MAX - 1


@pytest.mark.parametrize(("status", "error"), [(403, AuthError), (401, AuthError), (404, SourceError)])
def test_a_client_error_is_not_retried(server: Server, url: str, status: int, error: type[Exception]) -> None:
    server.answers = [(status, {}, b"")]
    with pytest.raises(error):
        HttpGet(lambda wait_s: None)(url)
    assert len(server.paths) == 1


def test_a_truncated_body_is_requested_again(server: Server, url: str) -> None:
    server.answers = [(200, {"Content-Length": "100"}, b"half"), (200, {}, b"whole")]
    assert HttpGet(lambda wait_s: None)(url) == b"whole"


def test_keys_in_query_strings_do_not_appear_in_messages(server: Server, url: str) -> None:
    server.answers = [(404, {}, b"")]
    with pytest.raises(SourceError) as caught:
        HttpGet(lambda wait_s: None)(url, query={"key": "secret"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://prices.example/list", "http://127.0.0.1.example/list", "ftp://127.0.0.1/list", "file:///etc/passwd"]
)
def test_prices_are_not_fetched_over_insecure_schemes(url: str) -> None:
    with pytest.raises(SourceError, match="https"):
        HttpGet(lambda wait_s: None)(url)
