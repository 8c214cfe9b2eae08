"""The session of a user on a server: output that continues after a lost connection, and the Python API."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import NotConnected
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import broker
from broker.app.clusters import LogChunk
from broker.app.verbs.jobs import cancel_jobs, follow_log, wait_for_job
from broker.app.verbs.launching import launch_jobs
from broker.client.login import connect, read_login, save_login
from broker.client.remote import RETRIES_MAX, RemoteSession
from broker.config import LOGIN
from broker.errors import DeniedError, StateError, TransientError, UsageError
from broker.server.serving import ensure_certificate
from broker.types import Job, JobStatus, Plan, Resources, Task
from tests.server.conftest import Hosted, hosted

__all__ = ["hosted"]


@contextmanager
def cut_connections(url: str, *, after: bytes, times: int) -> Iterator[tuple[str, list[bytes]]]:
    """Forward to the server, but drop the first `times` connections once they carried `after`; list the requests."""
    parts = urlsplit(url)
    listener = socket.create_server(("127.0.0.1", 0))
    requests: list[bytes] = []

    def forward(client: socket.socket, upstream: socket.socket, number: int) -> None:
        seen = b""
        while chunk := upstream.recv(65536):
            client.sendall(chunk)
            seen += chunk
            if number < times and after in seen:
                break
        for each in (client, upstream):
            each.close()

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            upstream = socket.create_connection((parts.hostname or "", parts.port or 0))
            number = len(requests)
            request = client.recv(65536)
            while (length := re.search(rb"Content-Length: (\d+)", request)) and (
                len(request.partition(b"\r\n\r\n")[2]) < int(length[1])
            ):
                request += client.recv(65536)
            requests.append(request)
            upstream.sendall(request)
            threading.Thread(target=forward, args=(client, upstream, number), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_output_continues_at_its_offset_after_a_lost_connection(hosted: Hosted) -> None:
    store = hosted.context.store
    job = store.jobs.add("cut", Task(run="true"))
    path = hosted.home / "logs" / "jobs" / f"{job.id}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("first\nsecond\n")
    lines: list[str] = []

    def note(chunk: LogChunk) -> None:
        lines.extend(chunk.lines)
        if "second" in chunk.lines:  # grows while the connection is away
            with path.open("a") as file:
                file.write("third\n")
            store.jobs.set_status(job.id, JobStatus.FAILED, failure="the end")

    with cut_connections(hosted.listening.url, after=b"second", times=1) as (url, requests):
        session = RemoteSession(replace(hosted.login("viewer"), url=url))
        session.call(follow_log, job=str(job.id), on_chunk=note)
    assert lines == ["first", "second", "third"], "no line twice, none lost"
    assert len(requests) == 2 and b'"offset": 13' in requests[1]


def test_wait_goes_on_when_the_server_comes_back(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade of the server takes longer than a few tries; a job is waited for over days."""
    job = hosted.context.store.jobs.add("long", Task(run="true"))
    pauses = []

    def pause(session: RemoteSession) -> None:
        pauses.append(1)
        if len(pauses) == 2 * RETRIES_MAX:
            hosted.context.store.jobs.set_status(job.id, JobStatus.SUCCEEDED)

    monkeypatch.setattr(RemoteSession, "_wait", pause)
    with cut_connections(hosted.listening.url, after=b'"id"', times=2 * RETRIES_MAX) as (url, _):
        session = RemoteSession(replace(hosted.login("viewer"), url=url))
        view = session.call(wait_for_job, job=str(job.id), status=JobStatus.SUCCEEDED)
    assert view.job.status is JobStatus.SUCCEEDED and len(pauses) == 2 * RETRIES_MAX


def test_server_that_never_answered_is_given_up_soon(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = []
    monkeypatch.setattr(RemoteSession, "_wait", lambda session: pauses.append(1))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    session = RemoteSession(replace(hosted.login("viewer"), url=url))
    with pytest.raises(TransientError, match="does not respond"):
        session.call(wait_for_job, job="1", status=JobStatus.SUCCEEDED)
    assert len(pauses) == RETRIES_MAX


def test_refused_price_starts_nothing(hosted: Hosted) -> None:
    def refuse(plans: object) -> None:
        raise UsageError("too dear")

    shown: list[Plan] = []
    with pytest.raises(UsageError, match="too dear"):
        _submit(hosted, "refused", shown.extend, refuse)
    assert shown[0].choice.placement.offer.cloud == "local"
    assert not [each for each in hosted.context.store.jobs.list() if each.name == "refused"]


def test_accepted_price_submits_a_job_of_the_user(hosted: Hosted) -> None:
    told: list[Job] = []
    (job,) = _submit(hosted, "accepted", lambda plans: None, lambda plans: None, told.extend)
    assert told[0].id == job.id and hosted.context.store.jobs.get(job.id) is not None
    with pytest.raises(DeniedError, match="belongs to user"):
        hosted.open("other").call(cancel_jobs, names=(str(job.id),))


def _submit(
    hosted: Hosted,
    name: str,
    show: Callable[..., None],
    confirm: Callable[..., None],
    tell: Callable[..., None] = lambda jobs: None,
) -> tuple[Job, ...]:
    task = Task(run="true", resources=(Resources(cloud="local"),))
    return hosted.open("user").call(
        launch_jobs, tasks=(task,), name=name, request_id=None, hedge=1, is_dryrun=False, show=show, confirm=confirm,
        on_submitted=tell,
    )  # fmt: skip


def test_python_api_speaks_to_the_server_of_the_login(hosted: Hosted, tmp_path: Path) -> None:
    home = tmp_path / "laptop"
    save_login(home / LOGIN, hosted.login("user"))
    job = broker.jobs.launch({"run": "true", "resources": {"infra": "local"}}, name="from-python", home=home)
    assert [each.name for each in broker.jobs.queue(home=home)][-1] == "from-python"
    assert broker.jobs.cancel(job.id, home=home)[0].id == job.id
    assert broker.jobs.why(job.id, home=home).job.cancel_requested
    assert broker.status(home=home).total_usd == 0.0
    with pytest.raises(UsageError, match="unknown managed job `nope`"):
        broker.jobs.why("nope", home=home)
    assert sorted(path.name for path in home.iterdir()) == [LOGIN], "no state folder is made beside the login"


def test_login_is_private_and_a_damaged_one_is_explained(hosted: Hosted, tmp_path: Path) -> None:
    path = tmp_path / "home" / LOGIN
    save_login(path, hosted.login("viewer"))
    assert path.stat().st_mode & 0o777 == 0o600 and read_login(path) == hosted.login("viewer")
    path.write_text("{")
    with pytest.raises(StateError, match="cannot read the login"):
        read_login(path)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_closed_connection_is_not_reopened_without_checking_its_certificate(
    hosted: Hosted, tmp_path: Path, is_encrypted: bool
) -> None:
    """By itself, `http.client` connects again, and would send the token to whoever answers there now."""
    server = Hosted(tmp_path, ensure_certificate(tmp_path)) if is_encrypted else hosted
    try:
        connection = connect(server.login("user"))
        connection.close()
        with pytest.raises(NotConnected):
            connection.request("GET", "/v1/handshake")
        path, session = f"/v1/cancel/{'0' * 32}", server.open("user")
        connection, answer = session.post(path, b"{}", None)
        connection.close()  # as after a response with `Connection: close`
        other, answer = session.post(path, b"{}", connection)
        assert answer == {"is_running": False} and other is not connection
        other.close()
    finally:
        if is_encrypted:
            server.stop()
