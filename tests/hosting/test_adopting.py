"""A server takes over a laptop's state only while it has no work of its own, and only once."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from broker.app.backups import pack_state, unpack
from broker.app.container import Context
from broker.app.moving import MoveDestination, read_moved, write_moved
from broker.clock import SystemClock
from broker.errors import StateError, UsageError
from broker.hosting import importing
from broker.hosting.machines import PROGRAMS
from broker.hosting.record import HostedServer, HostedStatus
from broker.state.copies import list_copies
from broker.state.schema import MIGRATIONS
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, JobStatus, Placement, ScheduleSpec, Task
from tests.simulation.world import make_offer

REQUEST: Mapping[str, Any] = {"word": "w1", "links": {}}


class HostProgram:
    """The program that runs on a server's machine, with a folder in which a server was set up."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.names: dict[str, Any] = {"__name__": "host_program"}
        for path in PROGRAMS:
            exec(compile(path.read_text(), path.name, "exec"), self.names)  # noqa: S102 - as the machine does
        self.stops = 0
        self.names["stop"] = self._stop
        self.state.mkdir()
        self.open().close()

    def _stop(self, folder: str) -> None:
        self.stops += 1

    def open(self) -> Store:
        return Store(self.state / "state.db", clock=SystemClock())

    def adopt(self, word: str = "w1") -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.names["adopt"](str(self.folder), {**REQUEST, "word": word}, pack())
        return found


def pack() -> bytes:
    """Pack the state of a laptop, as the host program receives it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        content = b"the laptop's installation"
        entry = tarfile.TarInfo("owner")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture
def host(tmp_path: Path) -> HostProgram:
    return HostProgram(tmp_path)


def add_job(store: Store) -> None:
    store.jobs.add("theirs", Task(run="true"))


def add_cluster(store: Store) -> None:
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=1)
    store.clusters.put(Cluster(name="dev", placement=placement, status=ClusterStatus.UP, attempt=1))


def add_service(store: Store) -> None:
    store.services.add("web", Task(run="true"), host="127.0.0.1", port=30001, wanted=1)


def add_schedule(store: Store) -> None:
    store.schedules.add("nightly", Task(run="true"), ScheduleSpec(cron="0 2 * * *"), next_s=1e10)


@pytest.mark.parametrize("add", [add_job, add_cluster, add_service, add_schedule])
def test_state_that_has_got_work_meanwhile_is_kept(host: HostProgram, add: Any) -> None:
    store = host.open()
    add(store)
    store.close()
    before = (host.state / "state.db").read_bytes()
    assert host.adopt() == {"is_new": False, "has_work": True} and host.stops == 1
    assert (host.state / "state.db").read_bytes() == before and not (host.state / "owner").exists()


def test_empty_state_is_replaced_once(host: HostProgram) -> None:
    assert host.adopt() == {"is_new": True}
    assert (host.state / "owner").read_text() == "the laptop's installation"
    add_job(store := host.open())
    store.close()
    assert host.adopt() == {"is_new": False}, "the laptop repeats a move whose answer it did not receive"
    assert host.adopt("w2") == {"is_new": False, "has_work": True}, "another move"


@pytest.mark.parametrize("add", [add_job, add_cluster, add_service, add_schedule])
def test_server_that_has_got_work_meanwhile_is_not_removed(host: HostProgram, add: Any) -> None:
    """The sender looked before it was stopped, and a colleague's job would have been deleted with the server."""
    starts: list[str] = []
    host.names["run"] = starts.append
    store = host.open()
    ended = store.jobs.add("ended", Task(run="true"))
    store.jobs.set_status(ended.id, JobStatus.CANCELLED)
    add(store)
    store.close()
    remove = host.names["remove"]
    assert remove(str(host.folder), is_idle_only=True) == {"is_installed": True, "has_work": True}
    assert starts == [str(host.folder)] and host.stops == 1
    assert remove(str(host.folder)) == {"is_installed": False}, "by force"
    assert not host.folder.exists()


def test_server_with_ended_jobs_only_is_removed(host: HostProgram) -> None:
    store = host.open()
    store.jobs.set_status(store.jobs.add("ended", Task(run="true")).id, JobStatus.CANCELLED)
    store.close()
    assert host.names["remove"](str(host.folder), is_idle_only=True) == {"is_installed": False}
    assert not host.folder.exists()


@pytest.mark.parametrize("killed_at", ["before", "after"])
def test_adoption_killed_at_its_last_rename_is_completed(
    host: HostProgram, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    """If the second call took the laptop's own jobs for work of the server, both would continue them."""
    rename = os.rename

    def die(source: str, target: str) -> None:
        if target == str(host.state):
            if killed_at == "after":
                rename(source, target)
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        host.adopt()
    monkeypatch.undo()
    aside = host.state if killed_at == "after" else host.folder / "state.new"
    add_job(store := Store(aside / "state.db", clock=SystemClock()))  # the laptop's database has jobs
    store.close()
    assert "has_work" not in host.adopt()
    assert (host.state / "owner").read_text() == "the laptop's installation"


def test_restored_server_knows_the_move_that_its_backup_includes(host: HostProgram, tmp_path: Path) -> None:
    """The laptop did not receive the answer. If it took its own jobs for work of the server, both would run them."""
    host.adopt()
    add_job(store := host.open())
    store.close()
    archive = pack_state(host.state)
    shutil.rmtree(host.state)
    unpack(archive, host.state)
    assert host.adopt() == {"is_new": False}


def test_only_adopting_needs_sqlite_on_the_machine(host: HostProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """The minimal Python of some systems has none, and broker itself runs under another Python there."""
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    for path in PROGRAMS:
        exec(compile(path.read_text(), path.name, "exec"), host.names)  # noqa: S102 - as the machine does
    host.names["stop"] = lambda folder: None
    assert host.names["read_status"](str(host.folder))["is_running"] is False
    with pytest.raises(host.names["RequestError"], match="has no `sqlite3`"):
        host.adopt()


def install(host: HostProgram, config: str, **more: Any) -> str:
    (host.folder / "releases/d").mkdir(parents=True, exist_ok=True)
    host.names["find_python"] = lambda folder, release, request: "python3"
    host.names["install"](str(host.folder), {"digest": "d", "config": config, **more}, b"")
    return (host.state / "config.toml").read_text()


def test_upgrade_keeps_the_operators_settings_and_adds_a_backup_once(host: HostProgram) -> None:
    """The policy and the logins of a server are in this file; without it, every task would be allowed."""
    own = 'admin_policy = "p:f"\n[oidc]\nissuer = "https://i"\n'
    (host.state / "config.toml").write_text(own)
    backup = 'backup = "s3://b"\n'
    assert install(host, "") == own and host.stops == 0
    assert install(host, backup) == backup + own and host.stops == 1, "the server reads it when it starts"
    assert install(host, backup) == backup + own and host.stops == 1
    assert install(host, 'backup = "s3://other"\n') == backup + own and host.stops == 1


def test_restored_server_has_the_settings_of_its_backup(host: HostProgram) -> None:
    def restore(folder: str, release: str, python: str, url: str) -> None:
        assert not (host.state / "config.toml").exists(), "a file that exists is not restored"
        (host.state / "config.toml").write_text('backup = "s3://old"\nadmin_policy = "p:f"\n')

    host.names["restore"] = restore
    (host.state / "state.db").unlink()
    found = install(host, 'backup = "s3://new"\n', restore_from="s3://new")
    assert found == 'backup = "s3://new"\nadmin_policy = "p:f"\n'


class HostingInMemory:
    """A server that was set up, and refuses to take over because it has work."""

    def __init__(self, home: Path) -> None:
        self.server = HostedServer(
            infra="ssh://host", folder="~/server", port=8471, status=HostedStatus.UP, url="https://host:8471"
        )
        self.verbs: list[str] = []

    def get(self) -> HostedServer:
        return self.server

    def find_machine(self, server: HostedServer) -> HostingInMemory:
        return self

    def make_request(self, server: HostedServer) -> Mapping[str, object]:
        return {}

    def bring_up(self, server: HostedServer) -> HostedServer:
        self.verbs.append("bring_up")
        return server

    async def call(self, machine: object, request: Mapping[str, object], content: bytes = b"") -> object:
        self.verbs.append(str(request["verb"]))
        return {"is_new": False, "has_work": True} if request["verb"] == "adopt" else {"key": "", "state": "/s"}


def test_interrupted_move_to_a_server_that_got_work_leaves_the_jobs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context(tmp_path)
    context.store.jobs.add("ours", Task(run="true"))
    hosting = HostingInMemory(tmp_path)
    monkeypatch.setattr(importing, "call", hosting.call)
    monkeypatch.setattr(Context, "restart_daemon_if_needed", lambda self: hosting.verbs.append("daemon"))
    write_moved(tmp_path, MoveDestination(url="https://host:8471", word="w1"))
    with pytest.raises(UsageError, match="only an empty one can take over"):
        importing.move(context, hosting)  # type: ignore[arg-type]
    assert hosting.verbs == ["status", "adopt", "bring_up", "daemon"], "the server and the daemon run again"
    assert read_moved(tmp_path) is None
    assert context.store.jobs.request_cancel(1), "this folder may write again"
    context.close()


def test_adopted_state_is_on_the_disk_before_it_is_in_place(host: HostProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut, a rename may survive without the bytes, and the laptop has given up its own state by then."""
    flushed: set[str] = set()
    unflushed: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record(descriptor: int) -> None:
        flushed.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def check(source: str, target: str) -> None:
        if target == str(host.state):
            found = [source, *(str(path) for path in Path(source).rglob("*") if not path.is_symlink())]
            unflushed.extend(path for path in found if path not in flushed)
            flushed.discard(str(host.folder))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", check)
    (host.state / "config.toml").write_text("")
    (host.state / "uploads/digest").mkdir(parents=True)
    (host.state / "uploads/digest/train.py").write_text("print()")
    assert host.adopt() == {"is_new": True}
    assert unflushed == [] and str(host.folder) in flushed, "the rename itself is flushed before the answer"


def test_fence_of_a_moved_state_is_on_the_disk_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, a power cut would let this machine drive the jobs that the server drives."""
    names: list[list[str]] = []  # in the folder, whenever it is flushed
    fsync = os.fsync

    def record(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path:
            names.append(sorted(path.name for path in tmp_path.iterdir()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_moved(tmp_path, MoveDestination(url="https://server", word="w1"))
    assert names == [["moved.json"]]


@pytest.mark.parametrize("is_second_broken", [False, True])
def test_failed_upgrade_tells_why_and_whether_the_version_before_runs(
    host: HostProgram, monkeypatch: pytest.MonkeyPatch, *, is_second_broken: bool
) -> None:
    """After a migration, the version before cannot read the state; the first reason must not be lost in that."""
    request_error = host.names["RequestError"]
    for name in ("old", "new"):
        (host.folder / "releases" / name).mkdir(parents=True)
    host.names["switch"](str(host.folder), "old")
    ran: list[str] = []

    def run(folder: str) -> None:
        ran.append((host.folder / "current").resolve().name)
        if ran[-1] == "new" or is_second_broken:
            raise request_error(f"{ran[-1]} is broken", "see server.log")

    monkeypatch.setitem(host.names, "run", run)
    with pytest.raises(request_error) as failed:
        host.names["start"](str(host.folder), {"digest": "new", "arguments": []})
    told = "; and the version before: old is broken" if is_second_broken else ""
    assert str(failed.value) == f"new is broken{told}" and ran == ["new", "old"]


def test_failed_upgrade_that_has_migrated_the_state_keeps_the_new_version(
    host: HostProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version before could only fail, and be restarted for ever."""
    request_error = host.names["RequestError"]
    for name in ("old", "new"):
        (host.folder / "releases" / name).mkdir(parents=True)
    host.names["switch"](str(host.folder), "old")
    add_job(store := host.open())
    newer = len(MIGRATIONS) + 1
    ran: list[str] = []

    def run(folder: str) -> None:
        ran.append((host.folder / "current").resolve().name)
        store.copy()
        store.execute(f"PRAGMA user_version={newer}")
        raise request_error("new is broken", "see server.log")

    monkeypatch.setitem(host.names, "run", run)
    with pytest.raises(request_error) as failed:
        host.names["start"](str(host.folder), {"digest": "new", "arguments": []})
    store.close()
    assert ran == ["new"] and (host.folder / "current").resolve().name == "new"
    assert f"schema {newer}, which the version before cannot read" in str(failed.value)
    told = failed.value.hint
    assert "see server.log; then repeat `broker server upgrade`" in told and str(host.state / "backups") in told
    with pytest.raises(StateError, match=f"newer broker \\(schema {newer}"):
        host.open()
    (copy,) = list_copies(host.state / "state.db")
    with contextlib.closing(Store(copy.path, clock=SystemClock())) as kept:
        assert kept.jobs.count() == 1
