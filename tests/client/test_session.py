"""A session with a server that answers by a script: what is sent, repeated, refused and interrupted."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from broker.app.clusters import LogChunk
from broker.app.verbs.jobs import cancel_jobs, follow_log, list_jobs, retry_job, wait_for_job
from broker.app.verbs.launching import launch_jobs
from broker.client.login import ServerLogin
from broker.client.remote import LOST_S_MAX, RETRIES_MAX, RemoteSession
from broker.client.wire import encode, encode_error
from broker.errors import AuthError, BrokerError, TransientError, UnknownOutcomeError, UsageError
from broker.types import JobStatus, Secret, Task

Answer = tuple[int, bytes]
END = {"error": encode_error(UsageError("the end"))}
FULL = {"error": encode_error(TransientError("the database is busy"))}


class ScriptedServer(ThreadingHTTPServer):
    """Gives one answer of the script to each request to `/v1/VERB`, the last one again and again, and 200 to others."""

    daemon_threads = True

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.other: dict[str, Any] = {"is_running": False, "is_known": False}
        super().__init__(("127.0.0.1", 0), _Script)

    def list_bodies(self, path: str) -> list[Any]:
        return [json.loads(body) for _, found, _, body in self.requests if found == path]


class _Script(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        while self.headers.get("Transfer-Encoding") == "chunked" and not body.endswith(b"0\r\n\r\n"):
            body += self.rfile.readline()
        self.server.requests.append((self.command, self.path, dict(self.headers), body))
        status, content = 200, json.dumps(self.server.other).encode()
        if self.path.count("/") == 2:
            status, content = self.server.script[0]
            if len(self.server.script) > 1:
                self.server.script.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


class QuickClock:
    """A clock on which every wait takes its time at once."""

    time_s = 1000.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    found = ScriptedServer()
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def session(server: ScriptedServer) -> RemoteSession:
    login = ServerLogin(url=f"http://127.0.0.1:{server.server_port}", token=Secret(value="TOKEN"))
    session = RemoteSession(login)
    session.clock = QuickClock()  # type: ignore[assignment]
    return session


def frames(*lines: object, id: str = "r1") -> Answer:
    """Write a stream that begins with the ID of the request, and ends without a result unless the last line is one."""
    return 200, b"".join(json.dumps(line).encode() + b"\n" for line in ({"id": id}, *lines))


def chunk(offset: int) -> dict[str, object]:
    return {"call": "on_chunk", "value": encode(LogChunk(lines=(f"line {offset}",), offset=offset))}


def follow(session: RemoteSession, on_chunk: Callable[[LogChunk], None] = lambda chunk: None) -> None:
    session.call(follow_log, job="1", is_following=True, on_chunk=on_chunk)


def wait(session: RemoteSession, *, timeout_s: float = 0.0) -> None:
    session.call(wait_for_job, job="1", status=JobStatus.SUCCEEDED, timeout_s=timeout_s)


def launch(
    session: RemoteSession, confirm: Callable[[Any], None] = lambda plans: None, task: Task | None = None
) -> None:
    session.call(
        launch_jobs, tasks=(task or Task(run="true"),), name=None, request_id=None, hedge=1, is_dryrun=False,
        show=lambda plans: None, confirm=confirm, on_submitted=lambda jobs: None,
    )  # fmt: skip


def test_request_has_the_token_and_the_protocol_and_blank_lines_are_skipped(
    server: ScriptedServer, session: RemoteSession
) -> None:
    status, content = frames({"result": []})
    server.script = [(status, b"\n\n" + content.replace(b"\n", b"\n\n"))]
    assert list(session.call(list_jobs)) == []
    ((method, path, headers, _),) = server.requests
    assert (method, path) == ("POST", "/v1/list_jobs")
    assert headers["Authorization"] == "Bearer TOKEN" and headers["Broker-Protocol"] == "2"


def test_output_is_followed_while_it_makes_progress_however_often_the_connection_breaks(
    server: ScriptedServer, session: RemoteSession
) -> None:
    breaks = 3 * RETRIES_MAX
    server.script = [*(frames(chunk(7 * number)) for number in range(1, breaks + 1)), frames(END)]
    lines: list[str] = []
    with pytest.raises(UsageError, match="the end"):
        follow(session, lambda chunk: lines.extend(chunk.lines))
    assert lines == [f"line {7 * number}" for number in range(1, breaks + 1)]
    offsets = [body.get("offset") for body in server.list_bodies("/v1/follow_log")]
    assert offsets[1:] == [7 * number for number in range(1, breaks + 1)], "each continues after the last lines"


def test_errors_of_the_verb_that_follows_end_it_after_a_few_repetitions(
    server: ScriptedServer, session: RemoteSession
) -> None:
    server.script = [frames(FULL)]
    with pytest.raises(TransientError, match="the database is busy"):
        follow(session)
    assert len(server.requests) == RETRIES_MAX + 1


def test_only_errors_in_a_row_count(server: ScriptedServer, session: RemoteSession) -> None:
    count = 3 * RETRIES_MAX
    server.script = [*(frames(chunk(7 * number), FULL) for number in range(1, count + 1)), frames(END)]
    with pytest.raises(UsageError, match="the end"):
        follow(session)
    assert len(server.requests) == count + 1


def test_wait_without_a_limit_is_repeated_for_a_lost_connection_only(
    server: ScriptedServer, session: RemoteSession
) -> None:
    server.script = [frames(), frames(), frames(END)]
    with pytest.raises(UsageError, match="the end"):
        wait(session)
    assert len(server.requests) == 3
    server.requests.clear()
    server.script = [frames(FULL)]
    with pytest.raises(TransientError, match="the database is busy"):
        wait(session)
    assert len(server.requests) == 1


def test_wait_with_a_limit_is_not_begun_again(server: ScriptedServer, session: RemoteSession) -> None:
    """A repeated one would wait for the whole time once more."""
    server.script = [frames(), frames(END)]
    with pytest.raises(UnknownOutcomeError):
        wait(session, timeout_s=60.0)
    assert len(server.requests) == 1


def test_server_that_does_not_come_back_is_given_up(server: ScriptedServer, session: RemoteSession) -> None:
    clock: Any = session.clock
    server.script = [frames(), (200, b"")]  # a proxy accepts connections for a server that is gone
    begin_s = clock.time_s
    with pytest.raises(UnknownOutcomeError):
        wait(session)
    assert LOST_S_MAX / 2 < clock.time_s - begin_s <= LOST_S_MAX


@pytest.mark.parametrize("answer", [frames(), (200, b""), (200, b'{"id": "r1"}\n{"resu')], ids=["cut", "empty", "torn"])
def test_verb_that_starts_something_is_never_repeated(
    server: ScriptedServer, session: RemoteSession, answer: Answer
) -> None:
    server.script = [answer]
    with pytest.raises(UnknownOutcomeError, match="was lost") as caught:
        launch(session)
    assert len(server.requests) == 1 and "continues" in caught.value.hints[0]
    with pytest.raises(UnknownOutcomeError):
        session.call(cancel_jobs, names=("1",), is_all=False)


@pytest.mark.parametrize("is_refused", [False, True])
def test_server_is_told_whether_a_price_is_accepted(
    server: ScriptedServer, session: RemoteSession, is_refused: bool
) -> None:
    server.script = [frames({"ask": "confirm", "id": "a7", "value": []}, END)]

    def confirm(plans: object) -> None:
        if is_refused:
            raise KeyError("declined")

    with pytest.raises(KeyError if is_refused else UsageError):
        launch(session, confirm)
    assert server.list_bodies("/v1/answers/a7") == [{"is_accepted": not is_refused}]


@pytest.mark.parametrize(("begin", "path"), [(launch, "/v1/cancel/r1"), (wait, None)], ids=["launch", "wait"])
def test_interruption_ends_what_the_verb_starts_on_the_server(
    server: ScriptedServer, session: RemoteSession, begin: Callable[[RemoteSession], None], path: str | None
) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    session._note = interrupt
    server.script = [frames({"note": "starting"}, END)]
    with pytest.raises(KeyboardInterrupt):
        begin(session)
    assert [found for _, found, _, _ in server.requests[1:]] == ([path] if path else [])


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (401, b"<html>", AuthError, "answered with status 401"),
        (502, b"<html>", BrokerError, "answered with status 502"),
        (403, b'{"error": "Forbidden"}', BrokerError, "answered with status 403"),
        (500, b"[]", BrokerError, "answered with status 500"),
        (400, json.dumps(END).encode(), UsageError, "the end"),
    ],
)
def test_refusal_is_the_servers_error_or_its_status(
    server: ScriptedServer, session: RemoteSession, status: int, body: bytes, kind: type[BrokerError], message: str
) -> None:
    server.script = [(status, body)]
    with pytest.raises(BrokerError, match=message) as caught:
        session.call(list_jobs)
    assert type(caught.value) is kind
    if status == 401:
        assert "broker login" in caught.value.hints[0]


@pytest.mark.parametrize("is_known", [False, True])
def test_archive_is_sent_only_if_the_server_lacks_it(
    server: ScriptedServer, session: RemoteSession, is_known: bool
) -> None:
    server.other = {"is_known": is_known}
    session.send_file("d1", io.BytesIO(b"content"))
    sent = [(method, body) for method, path, _, body in server.requests if path == "/v1/files/d1"]
    assert [method for method, _ in sent] == (["GET"] if is_known else ["GET", "PUT"])
    assert is_known or b"content" in sent[1][1]


def test_secrets_reach_the_server_as_they_are(server: ScriptedServer, session: RemoteSession) -> None:
    server.script = [frames(END)]
    with pytest.raises(UsageError):
        launch(session, task=Task(run="true", secrets={"KEY": Secret(value="hidden")}))
    with pytest.raises(UsageError):
        session.call(retry_job, job="1", secrets={"KEY": Secret(value="again")}, request_id=None)
    launched, retried = (json.loads(body) for *_, body in server.requests)
    assert launched["tasks"][0]["secrets"] == {"KEY": {"value": "hidden"}}
    assert retried["secrets"] == {"KEY": {"value": "again"}}


def test_note_of_the_server_is_shown(server: ScriptedServer, session: RemoteSession) -> None:
    notes: list[str] = []
    session._note = notes.append
    server.script = [frames({"note": "one"}, {"note": "two"}, {"result": []})]
    session.call(list_jobs)
    assert notes == ["one", "two"] and session.request_id == "r1"
