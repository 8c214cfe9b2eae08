"""Sessions of browsers and uploads of clients, without a server around them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.errors import InvalidRequestError, UsageError
from broker.server import files
from broker.server.authorisation import has_role
from broker.server.files import FileStore
from broker.server.sessions import COOKIE, SESSION_S, SESSIONS_MAX, Sessions
from broker.server.tokens import DAY_S, create_token, find_token
from broker.state.people import Role, Token
from broker.state.store import Store
from broker.types import JobStatus, ScheduleSpec, Task


class SteppedClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.time_s = 1e9

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        raise AssertionError("nothing waits here")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "home" / "state.db", clock=SteppedClock())
    yield opened
    opened.close()


def advance(store: Store, duration_s: float) -> None:
    assert isinstance(store.clock, SteppedClock)
    store.clock.time_s += duration_s


def make_sessions(store: Store, proxied: Token | None = None) -> Sessions:
    context: Any = SimpleNamespace(store=store, clock=store.clock)
    return Sessions(context, lambda request: proxied)


def ask(cookie: str | None = None, **headers: str) -> Any:
    cookies = {} if cookie is None else {COOKIE: cookie}
    return SimpleNamespace(cookies=cookies, headers=headers, scheme="http", host="broker.example")


def make_token(store: Store, user: str = "ann", days: float | None = 9.0) -> tuple[int, str]:
    made = create_token(store, user=user, role=Role.USER, days=days)
    return made.id, made.value.value


def test_a_session_is_its_tokens_until_it_ends_or_the_token_is_revoked(store: Store) -> None:
    sessions, (token_id, value) = make_sessions(store), make_token(store)
    cookie = sessions.begin(value)
    assert cookie and value not in cookie
    found = sessions.find(ask(cookie))
    assert found is not None and (found.user, found.role) == ("ann", Role.USER)
    assert sessions.find(ask()) is None and sessions.find(ask("")) is None and sessions.find(ask(cookie[1:])) is None
    assert sessions.find(ask(cookie, Authorization="Bearer wrong")) is None, "a header is not replaced by a cookie"
    advance(store, SESSION_S - 1)
    assert sessions.find(ask(cookie)) is not None
    advance(store, 1)
    assert sessions.find(ask(cookie)) is None
    again = sessions.begin(value)
    store.tokens.revoke(token_id)
    assert sessions.find(ask(again)) is None and sessions.begin(value) is None
    assert sessions.begin("broker_guess") is None


def test_an_ended_session_gives_no_access_and_the_others_remain(store: Store) -> None:
    sessions, (_, value) = make_sessions(store), make_token(store)
    one, two = sessions.begin(value), sessions.begin(value)
    assert one != two
    sessions.end(ask(one))
    sessions.end(ask(one))
    assert sessions.find(ask(one)) is None and sessions.find(ask(two)) is not None


def test_the_oldest_session_ends_where_there_are_too_many(store: Store) -> None:
    sessions, (_, value) = make_sessions(store), make_token(store)
    made = [sessions.begin(value) for _ in range(SESSIONS_MAX + 1)]
    assert [sessions.find(ask(made[index])) is None for index in (0, 1, SESSIONS_MAX)] == [True, False, False]


def test_a_token_is_valid_until_its_last_second_and_one_without_expiry_remains_valid(store: Store) -> None:
    (_, short), (_, endless) = make_token(store, days=2.0), make_token(store, days=None)
    advance(store, 2 * DAY_S - 1)
    assert find_token(store, short) is not None
    advance(store, 1)
    assert find_token(store, short) is None
    advance(store, 1e9)
    assert find_token(store, endless) is not None and find_token(store, endless[:-1]) is None


@pytest.mark.parametrize(
    ("user", "project", "is_valid"),
    [
        ("ann", "", True), ("a", "p", True), ("ann@example.org", "team-1.x", True), ("a" * 64, "b" * 64, True),
        ("", "", False), ("a" * 65, "", False), ("-ann", "", False), ("a b", "", False), ("ann\n", "", False),
        ("ann", "-p", False), ("ann", "p" * 65, False), ("ann", "a/b", False),
    ],
)  # fmt: skip
def test_names_of_users_and_projects_are_checked(store: Store, user: str, project: str, *, is_valid: bool) -> None:
    def create() -> None:
        create_token(store, user=user, role=Role.VIEWER, days=1.0, project=project)

    if is_valid:
        create()
        return
    with pytest.raises(UsageError, match=r"invalid (user|project) name"):
        create()


def test_a_role_includes_those_below_it(store: Store) -> None:
    def hold(role: Role) -> Token:
        return Token(id=1, user="a", role=role, created_s=0.0, expires_s=None, revoked_s=None)

    found = {(mine, needed) for mine in Role for needed in Role if has_role(hold(mine), needed)}
    order = [Role.VIEWER, Role.USER, Role.ADMIN]
    assert found == {(mine, needed) for mine in Role for needed in Role if order.index(mine) >= order.index(needed)}


def test_tickets_of_forms_are_of_one_token_and_one_server(store: Store) -> None:
    (_, one), (_, two) = make_token(store), make_token(store)
    tokens = [find_token(store, value) for value in (one, two)]
    assert tokens[0] and tokens[1]
    sessions = make_sessions(store)
    assert sessions.make_ticket(tokens[0]) == sessions.make_ticket(tokens[0]) != sessions.make_ticket(tokens[1])
    assert make_sessions(store).make_ticket(tokens[0]) != sessions.make_ticket(tokens[0])


def test_only_pages_of_this_server_submit_forms_and_a_proxy_may_have_ended_tls(store: Store) -> None:
    _, value = make_token(store)
    direct, proxied = make_sessions(store), make_sessions(store, find_token(store, value))
    own, secure, other = "http://broker.example", "https://broker.example", "http://evil.example"
    assert [direct.is_own_origin(ask(Origin=each)) for each in (own, secure, other)] == [True, False, False]
    assert [proxied.is_own_origin(ask(Origin=each)) for each in (own, secure, other)] == [True, True, False]
    assert not direct.is_own_origin(ask()) and not proxied.is_own_origin(ask())
    assert not proxied.is_own_origin(ask(Origin=secure, Authorization="Bearer x"))


def receive(store: FileStore, content: bytes, digest: str | None = None) -> str:
    async def send() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 100):
            yield content[start : start + 100]

    digest = digest or hashlib.sha256(content).hexdigest()
    asyncio.run(store.receive(digest, send(), name="n"))
    return digest


def pack(**members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name.replace("_", "/"))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def test_an_upload_is_kept_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "uploads"
    uploads, content = FileStore(folder), pack(a=b"one", deep_b=b"two")
    digest = receive(uploads, content)
    assert uploads.has(digest) and (folder / digest / "deep/b").read_bytes() == b"two"
    (folder / digest / "mark").touch()
    assert receive(uploads, content) == digest and (folder / digest / "mark").exists(), "the first one stays"
    outside = pack(**{"..": b"", ".._x": b"no"})
    for broken in (b"no archive", content[:700], outside):
        with pytest.raises(InvalidRequestError, match="cannot unpack the files"):
            receive(uploads, broken)
        assert not uploads.has(hashlib.sha256(broken).hexdigest())
    monkeypatch.setattr(files, "ARCHIVE_MAX", len(content))
    receive(uploads, content)
    larger = content + b"\0"
    with pytest.raises(InvalidRequestError, match="the files exceed"):
        receive(uploads, larger)
    assert [each.name for each in folder.iterdir()] == [digest] and not (tmp_path / "x").exists()


def test_uploads_that_no_task_names_are_deleted_a_week_after_their_last_use(tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "uploads"
    uploads = FileStore(folder)
    names = ["job", "schedule", "service", "asked", "unused"]
    digests = {name: receive(uploads, pack(**{f"code_{name}": b"1"})) for name in names}
    tasks = {name: Task(run="true", workdir=str(folder / digest / "code")) for name, digest in digests.items()}
    job = store.jobs.add("j", tasks["job"])
    store.jobs.set_status(job.id, JobStatus.FAILED)  # it may be retried
    store.schedules.add("nightly", tasks["schedule"], ScheduleSpec(cron="0 2 * * *"), next_s=1e10)
    store.services.add("web", tasks["service"], host="127.0.0.1", port=1, wanted=1)
    (folder / ".0-killed.tar").write_bytes(b"part of an archive")
    (folder / ".0-killed").mkdir()
    now_s = (folder / digests["job"]).stat().st_mtime + files.KEPT_S - 500.0
    assert uploads.forget_unused(store.retention.is_named, now_s=now_s) == 0
    assert not list(folder.glob(".*")), "a day is enough for an upload"
    for digest in digests.values():
        os.utime(folder / digest, (now_s - files.KEPT_S - 500.0,) * 2)
    assert uploads.has(digests["asked"]), "its launch follows"
    assert uploads.forget_unused(store.retention.is_named, now_s=now_s) == 1
    assert {each.name for each in folder.iterdir()} == {digests[name] for name in names if name != "unused"}


def make_link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


def test_links_of_a_usual_folder_are_unpacked() -> None:
    files.check_links(
        [
            *map(tarfile.TarInfo, ("code", "code/lib", "code/lib/f", "code/bin")),
            make_link("code/lib64", "lib"), make_link("code/bin/f", "../lib/f"), make_link("code/g", "lib64/f"),
            make_link("code/here", "./"), make_link("code/lib/up", "../../code/lib/f"),
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    "members",
    [
        [make_link("a", "b"), tarfile.TarInfo("a/f")],
        [tarfile.TarInfo("a/f"), make_link("./a", "b")],
        [make_link("a", "b"), make_link("c", "a/../../etc")],
        [make_link("a", "b/../../etc")],
        [make_link("d/a", "../../etc")],
        [tarfile.TarInfo("a"), make_link("b", "a", tarfile.LNKTYPE)],
    ],
)
def test_archive_whose_paths_lead_through_links_is_refused(members: list[tarfile.TarInfo], tmp_path: Path) -> None:
    """Older Pythons resolve such paths to another place than the kernel, which could be any file of the server."""
    with pytest.raises(InvalidRequestError, match=r"leads (back )?through a link"):
        files.check_links(members)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for each in members:
            archive.addfile(each)
    with pytest.raises(InvalidRequestError, match="cannot unpack"):
        receive(FileStore(tmp_path / "uploads"), out.getvalue())
    assert not list((tmp_path / "uploads").iterdir())
