"""Requests to a metadata server on the wire: a real server on this machine answers."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from broker.agent import FOLDER


class Server:
    """A server that answers by path; a path without an answer is a 404."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append((self.command, self.path, dict(self.headers)))
                code, text = outer.answers.get(self.path, (404, "none"))
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def notice(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("agent_notice")
    monkeypatch.setattr(module, "SERVER", f"127.0.0.1:{server.server.server_port}")
    monkeypatch.setattr(module, "POLL_S", 0.0)
    monkeypatch.setitem(
        module.request_metadata.__kwdefaults__, "answer_s", 300.0
    )  # a machine that stalls is not a silent server
    monkeypatch.setattr(module.files, "STATE", tmp_path)
    return module


def test_a_request_gets_an_answer_or_none_or_raises_silence(notice: Any, server: Server) -> None:
    server.answers = {"/a": (200, "words"), "/b": (500, "words")}
    assert notice.request_metadata("GET", "/a", {"X": "y"}) == "words"
    assert notice.request_metadata("GET", "/c", {}) is None
    with pytest.raises(notice.NoValidAnswer):
        notice.request_metadata("GET", "/b", {})
    assert server.asked[0][2]["X"] == "y"


def test_ec2_metadata_is_queried_with_a_token_and_states_the_end(notice: Any, server: Server) -> None:
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 1000.0))
    server.answers = {
        "/latest/api/token": (200, "secret"),
        "/latest/meta-data/spot/instance-action": (200, f'{{"action": "terminate", "time": "{end}"}}'),
    }
    notice.watch_notices("aws")
    written = notice.files.read_json(notice.files.STATE / "preemption")
    assert 100.0 < written["notice_s"] <= 1000.0 and written["time_s"] <= time.time()
    assert [(verb, path) for verb, path, _ in server.asked] == [
        ("PUT", "/latest/api/token"), ("GET", "/latest/meta-data/spot/instance-action"),
    ]  # fmt: skip
    assert server.asked[0][2]["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
    assert server.asked[1][2]["X-aws-ec2-metadata-token"] == "secret"


def test_an_end_in_the_past_means_that_the_clock_is_wrong(notice: Any, server: Server) -> None:
    server.answers = {
        "/latest/api/token": (200, "secret"),
        "/latest/meta-data/spot/instance-action": (200, '{"time": "2020-01-01T00:00:00Z"}'),
    }
    notice.watch_notices("aws")
    assert notice.files.read_json(notice.files.STATE / "preemption")["notice_s"] == notice.AWS_NOTICE_S


def test_a_server_without_tokens_is_not_queried_again(notice: Any, server: Server) -> None:
    notice.watch_notices("aws")
    assert len(server.asked) == notice.TRIES_MAX == 60
    assert not (notice.files.STATE / "preemption").exists()


def test_compute_engine_operation_is_polled_once_before_waiting(notice: Any, server: Server) -> None:
    now = "/computeMetadata/v1/instance/preempted"
    wait = f"{now}?wait_for_change=true&timeout_sec=60"
    server.answers = {now: (200, "FALSE"), wait: (200, "TRUE\n")}
    notice.watch_notices("gcp")
    assert notice.files.read_json(notice.files.STATE / "preemption")["notice_s"] == 30.0
    assert [path for _, path, _ in server.asked] == [now, wait]
    assert {headers["Metadata-Flavor"] for *_, headers in server.asked} == {"Google"}


def test_a_valid_answer_resets_the_count_of_invalid_ones(notice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ([None] * 59 + ["FALSE"] * 2) * 3 + ["TRUE"]
    calls = iter(answers)

    def ask(*_: object, **__: object) -> str:
        answer = next(calls)
        if answer is None:
            raise notice.NoValidAnswer
        return answer

    monkeypatch.setattr(notice, "request_metadata", ask)
    notice.watch_notices("gcp")
    assert (notice.files.STATE / "preemption").exists() and not list(calls)


def test_a_cloud_without_notices_is_not_queried(notice: Any, server: Server) -> None:
    notice.watch_notices("local")
    assert server.asked == []
