"""The HTTP API as any client sees it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import socket
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import jsonschema
import pytest

from broker.app.verbs.clusters import show_status
from broker.app.verbs.jobs import explain_job, show_job
from broker.app.verbs.launching import exec_task
from broker.client.files import upload_files, write_archive
from broker.client.login import ServerLogin, check_login
from broker.client.remote import RemoteSession, check_handshake
from broker.client.wire import HEADER, PROTOCOL, VERBS, read_signature
from broker.errors import AuthError, TransientError, UsageError
from broker.server.context import Policy
from broker.server.files import FileStore
from broker.server.http import OPEN_BODY_MAX, Server
from broker.server.openapi import describe_api
from broker.server.serving import choose_certificate, ensure_certificate, repeat
from broker.types import Repository, Secret, Task
from tests.contents import read_all
from tests.server.conftest import Hosted

CANARY = "swordfish-in-the-canary"


def test_api_document_describes_every_verb_and_its_answers(hosted: Hosted) -> None:
    _, document = hosted.ask("/openapi.json")
    assert {f"/v1/{verb}" for verb in VERBS} <= set(document["paths"])
    summaries = {verb: document["paths"][f"/v1/{verb}"]["post"]["summary"] for verb in VERBS}
    assert not [verb for verb, text in summaries.items() if not text.endswith(".")], "a summary is a whole sentence"
    for verb, body in (("show_status", {}), ("list_queue", {"newest": 5}), ("show_cost", {"by": "day"})):
        status, answer = hosted.ask(f"/v1/{verb}", body, token=hosted.tokens["viewer"])
        schema = document["paths"][f"/v1/{verb}"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert status == 200
        jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(answer)


def test_api_document_describes_every_route_and_how_to_accept_a_price(tmp_path: Path) -> None:
    server = Server(tmp_path, Policy())
    routes = {
        (str(route.resource.canonical), route.method.lower())
        for route in server.make_app().router.routes()
        if route.resource is not None and route.resource not in server._pages._resources and route.method != "HEAD"
    }
    server.leave()
    paths = describe_api()["paths"]
    described = {(path, method) for path, item in paths.items() for method in item if method != "parameters"}
    assert routes - {("/v1/{verb}", "post")} <= described
    queried = {name for name in VERBS for each in paths[f"/v1/{name}"]["post"]["parameters"] if each["in"] == "query"}
    assert queried == {name for name, verb in VERBS.items() if "confirm" in read_signature(verb.function).callbacks}


@pytest.mark.parametrize(
    ("verb", "body", "status", "words"),
    [
        ("show_job", {"job": "99"}, 422, "unknown managed job"),
        ("show_job", {}, 400, "requires the argument `job`"),
        ("show_job", {"job": "1", "more": 1}, 400, "no argument `more`"),
        ("list_queue", {"newest": "many"}, 400, "invalid data"),
        ("list_queue", {"newest": 2**63}, 400, "integers of 64 bits"),
        ("show_job", {"job": "9" * 20}, 422, "unknown managed job"),
        ("show_job", {"job": "\u00b2"}, 422, "unknown managed job"),
        ("wait_for_job", {"job": "1", "status": "NEVER"}, 400, "invalid data"),
        ("no_such_verb", {}, 422, "unknown verb"),
    ],
)
def test_errors_have_a_status_and_a_message(
    hosted: Hosted, verb: str, body: dict[str, object], status: int, words: str
) -> None:
    found, answer = hosted.ask(f"/v1/{verb}", body, token=hosted.tokens["admin"])
    assert found == status and words in answer["error"]["message"]


def test_body_that_is_not_an_object_is_refused(hosted: Hosted) -> None:
    for body in ([], "text", 7):
        status, answer = hosted.ask("/v1/show_status", body, token=hosted.tokens["viewer"])
        assert status == 400 and "JSON object" in answer["error"]["message"]


def test_client_of_another_protocol_gets_a_hint_about_what_to_upgrade(hosted: Hosted) -> None:
    for given, older in ((PROTOCOL - 1, "client"), (PROTOCOL + 1, "server")):
        status, answer = hosted.ask("/v1/handshake", token=hosted.tokens["viewer"], headers={HEADER: str(given)})
        assert status == 422 and f"upgrade the {older}" in answer["error"]["hints"][0]


def test_task_with_a_field_of_a_newer_client_is_refused(hosted: Hosted) -> None:
    body = {"tasks": [{"run": "true", "is_from_the_future": True}]}
    status, answer = hosted.ask("/v1/launch_jobs", body, token=hosted.tokens["admin"])
    assert status == 400 and "does not support" in answer["error"]["message"]
    assert not hosted.context.store.jobs.list()


def test_metrics_are_those_of_the_dashboard(hosted: Hosted) -> None:
    status, text = hosted.ask("/metrics", token=hosted.tokens["viewer"])
    assert status == 200 and "# TYPE broker_spend_usd_total counter" in text


def test_secret_of_a_task_is_in_no_answer_and_no_file_but_its_own(hosted: Hosted) -> None:
    task = Task(run="true", secrets={"TOKEN": Secret(value=CANARY)})
    job = hosted.context.store.jobs.add("secretive", task)
    for verb in ("show_job", "explain_job"):
        status, answer = hosted.ask(f"/v1/{verb}", {"job": str(job.id)}, token=hosted.tokens["admin"])
        assert status == 200 and CANARY not in str(answer) and "***" in str(answer)
    remote = hosted.open("viewer")
    assert remote.call(show_job, job=str(job.id)).job.task.secrets["TOKEN"].value == "***"
    assert remote.call(explain_job, job=str(job.id)).job.name == "secretive"
    with pytest.raises(UsageError, match="unknown cluster"):
        hosted.open("user").call(exec_task, cluster="nope", task=task)
    found = {path.parent.name for path, content in read_all(hosted.home) if CANARY.encode() in content}
    assert found == {"secrets"}, "the store's own files of mode 0600"


def test_task_cannot_name_files_of_the_server(hosted: Hosted) -> None:
    for path in (
        "/etc/passwd",
        "file:///etc/passwd",
        "~/.ssh/id_rsa",
        str(hosted.home / "state.db"),
        f"upload:{'0' * 64}/x",
        f"upload:{'0' * 64}/..",
    ):
        task = {"run": "true", "file_mounts": {"/tmp/x": path}}
        status, answer = hosted.ask("/v1/launch_jobs", _submit(task), token=hosted.tokens["user"])
        assert status == 422 and "was not uploaded" in answer["error"]["message"]


def _submit(task: dict[str, object]) -> dict[str, object]:
    return {"tasks": [task], "name": None, "request_id": None, "hedge": 1, "is_dryrun": True}


@pytest.mark.parametrize("body", [b"[" * 100_000, b"{", b"[1]", b'{"job": "\\ud800"}', b"\xff"])
def test_body_that_is_not_an_object_of_valid_text_is_refused_in_one_sentence(hosted: Hosted, body: bytes) -> None:
    headers = {"Authorization": f"Bearer {hosted.tokens['admin']}"}
    request = Request(f"{hosted.listening.url}/v1/list_queue", data=body, headers=headers)
    with pytest.raises(HTTPError) as caught:
        urlopen(request, timeout=300)
    assert caught.value.code == 400
    assert "the body must be a JSON object of valid Unicode text" in caught.value.read().decode()


def test_folder_is_sent_once_and_unpacked_unchanged(hosted: Hosted, tmp_path: Path) -> None:
    (tmp_path / "code" / "inner").mkdir(parents=True)
    (tmp_path / "code" / "train.py").write_text("print(1)")
    (tmp_path / "code" / "inner" / "data").write_bytes(b"\0" * 5000)
    (tmp_path / "code" / "link").symlink_to("train.py")
    (tmp_path / "code" / "left-out").write_text("big")
    (tmp_path / "code" / ".skyignore").write_text("left-out\n")
    remote = hosted.open("user")
    sent: list[str] = []

    def send(digest: str, archive: object) -> None:
        assert isinstance(archive, io.IOBase) or hasattr(archive, "read")
        if not remote.request("GET", f"/v1/files/{digest}")["is_known"]:
            sent.append(digest)
            remote.request("PUT", f"/v1/files/{digest}", archive)  # type: ignore[arg-type]

    task = Task(run="true", workdir=str(tmp_path / "code"))
    first, again = upload_files(task, send), upload_files(task, send)
    assert first == again and len(sent) == 1
    folder = Path(FileStore(hosted.home / "uploads").localize(first).workdir or "")
    assert (folder / "train.py").read_text() == "print(1)" and (folder / "link").is_symlink()
    assert (folder / "inner" / "data").stat().st_size == 5000 and not (folder / "left-out").exists()


def test_repository_that_no_client_cloned_is_not_fetched_by_the_server(hosted: Hosted) -> None:
    task = Task(run="true", repository=Repository(url="file:///etc"))
    with pytest.raises(UsageError, match="cloned on the machine of the user"):
        FileStore(hosted.home / "uploads").localize(task)


def test_archive_of_another_digest_is_refused(hosted: Hosted, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    archive = io.BytesIO()
    write_archive(tmp_path / "file", archive)
    with pytest.raises(Exception, match="SHA-256 digest differs"):
        hosted.open("user").request("PUT", f"/v1/files/{hashlib.sha256(b'other').hexdigest()}", archive.getvalue())
    assert not list((hosted.home / "uploads").glob(".*")), "nothing is left of it"


def test_viewer_cannot_send_files(hosted: Hosted) -> None:
    request = Request(
        f"{hosted.listening.url}/v1/files/{'0' * 64}", data=b"x", method="PUT",
        headers={"Authorization": f"Bearer {hosted.tokens['viewer']}"},
    )  # fmt: skip
    with pytest.raises(OSError, match="403"):
        urlopen(request, timeout=300)


def test_certificate_is_pinned(tmp_path: Path) -> None:
    hosted = Hosted(tmp_path / "home", ensure_certificate(tmp_path / "home"))
    try:
        good = hosted.login("viewer")
        assert good.url.startswith("https://") and good.fingerprint
        assert check_handshake(RemoteSession(good)).user == "viewer"
        assert hosted.open("viewer").call(show_status).clusters == ()
        for fingerprint, words in (("sha256:" + "0" * 64, "a different certificate"), (None, "cannot be verified")):
            with pytest.raises(AuthError, match=words):
                check_handshake(RemoteSession(ServerLogin(url=good.url, token=good.token, fingerprint=fingerprint)))
    finally:
        hosted.stop()


def test_only_the_loopback_is_served_without_tls(tmp_path: Path) -> None:
    assert choose_certificate(tmp_path, "127.0.0.1", None) is None
    own = choose_certificate(tmp_path, "0.0.0.0", None)
    assert own is not None and own == choose_certificate(tmp_path, "server.example", None)
    assert own.key.stat().st_mode & 0o777 == 0o600


def test_token_is_not_sent_to_another_host_in_clear() -> None:
    token = Secret(value="x")
    check_login(ServerLogin(url="http://127.0.0.1:1", token=token))
    with pytest.raises(UsageError, match="not encrypted"):
        check_login(ServerLogin(url="http://server.example:1", token=token))


def test_server_that_does_not_respond_is_named(tmp_path: Path) -> None:
    hosted = Hosted(tmp_path / "home")
    session = hosted.open("viewer")
    hosted.stop()
    with pytest.raises(TransientError, match="does not respond"):
        session.call(show_status)


@pytest.mark.parametrize("path", ["/v1/handshake", "/metrics"])
def test_header_that_is_not_text_is_no_bug_of_the_server(
    hosted: Hosted, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each bug is logged with a traceback, so strangers could fill the disk."""
    status, answer = hosted.ask(path, headers={"Authorization": "Bearer \xff"})
    assert (status, answer["error"]["kind"]) == (401, "AuthError")
    status, _ = hosted.ask("/v1/handshake", token=hosted.tokens["viewer"], headers={HEADER: "9" * 5000})
    assert status == 422 and not caplog.records


@pytest.mark.parametrize("path", ["/v1/login", "/login"])
def test_long_login_is_refused_before_it_is_read(hosted: Hosted, path: str) -> None:
    """Up to 64 MiB of each stranger would be kept."""
    status, answer = hosted.ask(path, {"code": "x" * OPEN_BODY_MAX})
    assert status == 400 and "body of a login" in answer["error"]["message"]
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(hosted.listening.url + path, data=iter([b"{}"]), method="POST"), timeout=300)  # chunked
    assert refused.value.code == 400


def test_connection_that_sends_no_request_in_time_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.server.serving.IDLE_S_MAX", 0.05)
    hosted = Hosted(tmp_path)
    try:
        address = ("127.0.0.1", int(hosted.listening.url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=60) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: ")
            assert connection.recv(100) == b""
    finally:
        hosted.stop()


@pytest.mark.parametrize("error", [OSError("disk full"), UsageError("no")])
def test_an_error_in_periodic_work_does_not_end_the_server(error: Exception, tmp_path: Path) -> None:
    class Twice(Exception):
        """Raised by the second call."""

    calls = []

    def act(context: object) -> None:
        calls.append(context)
        raise error if len(calls) == 1 else Twice

    with pytest.raises(Twice):
        asyncio.run(repeat(tmp_path, Policy(), act, every_s=0.0))
