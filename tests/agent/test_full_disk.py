"""On a full disk, a program keeps running, its outcome is recorded, and its node still ends when its lease does."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.agent import FOLDER, agent
from tests.agent.test_agent_lease import Bucket, Node

files, lease, delivery = agent.files, agent.agent_lease, agent.agent_lease.delivery
access = importlib.import_module("agent_access")
RUN = 1


class Disk:
    """A disk on which no file can be created while `is_full` says so; existing ones can be opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full: Callable[[], bool] = lambda: False
        self.refusals = 0
        create = os.open

        def open_(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
            if flags & os.O_CREAT and self.is_full() and not Path(path).exists():
                self.refusals += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return create(path, flags, *arguments, **named)

        monkeypatch.setattr(os, "open", open_)

    def fill(self) -> None:
        self.is_full = lambda: True


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path / "home" / ".broker", monkeypatch)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


# -- the watcher ---------------------------------------------------------------------------------------------------


@pytest.fixture
def shutdowns(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the shutdown commands, of which each works."""
    calls: list[list[str]] = []
    (node.state / "node.json").write_text('{"power_off": ["shutdown", "-h", "now"]}')

    def run(words: list[str]) -> int:
        calls.append(words)
        return 0

    monkeypatch.setattr(agent, "run_command", run)
    monkeypatch.setattr(agent, "POWER_OFF_S", 0.0)
    return calls


def test_node_with_a_full_disk_and_a_dead_runner_ends_when_its_lease_does(
    node: Node, disk: Disk, shutdowns: list[list[str]]
) -> None:
    """Only its watcher can end it: the broker may be gone for good."""
    lease.renew(900.0)
    folder = node.begin()
    assert node.runner is not None
    os.close(node.runner)
    disk.fill()
    assert agent.watch_once(None) is None and not shutdowns
    assert disk.refusals, "the outcome could not be written"
    assert not files.is_locked(folder / "runner.lock"), "the run must not count as live"
    node.uptime_s += 900
    agent.watch_once(None)
    assert len(shutdowns) == 1
    disk.is_full = lambda: False
    agent.watch_once(None)
    assert files.read_json(folder / "outcome.json")["reason"] == "the runner died"  # type: ignore[index]


def test_lease_is_renewed_though_the_disk_is_full(node: Node, disk: Disk) -> None:
    """A node whose broker is there must not end for want of a few bytes."""
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        lease.renew(900.0)
    disk.is_full = lambda: False
    lease.renew(900.123456789)
    disk.fill()
    for lease_s in (900.0, 12345.678901234, 1.0):
        node.uptime_s += 800
        lease.renew(lease_s)
        assert lease.measure_left_s() == pytest.approx(lease_s)


def test_access_is_renewed_though_the_disk_is_full(node: Node, disk: Disk) -> None:
    """Checkpoints go to a bucket, and its session would expire."""
    node.begin()
    request = {"run_id": RUN, "scope": "s", "envs": {"AWS": "{access}/aws.json"}, "files": {"aws.json": "a long key"}}
    access.receive(request)
    disk.fill()
    access.receive({**request, "files": {"aws.json": "short"}})
    folder = access.find_folder(RUN)
    assert (folder / "aws.json").read_text() == "short"
    assert access.read_envs(RUN)["AWS"] == str(folder / "aws.json")


def test_outcome_of_a_dead_runner_gets_the_space_that_it_had_reserved(node: Node, disk: Disk) -> None:
    folder = node.begin()
    (folder / "reserve").touch()
    disk.is_full = (folder / "reserve").exists
    assert node.runner is not None
    os.close(node.runner)
    agent.clean_up()
    assert files.read_json(folder / "outcome.json")


@pytest.mark.parametrize("part", ["clean_up", "decide_power_off"])
def test_fault_of_one_part_of_the_watcher_does_not_stop_the_others(
    node: Node, shutdowns: list[list[str]], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    lease.renew(-1.0)
    works = getattr(agent, part)

    def fail() -> str | None:
        monkeypatch.setattr(agent, part, works)
        raise PermissionError("no access")

    monkeypatch.setattr(agent, part, fail)
    for _ in range(2):
        agent.watch_once(None)
    assert shutdowns


def test_autostop_that_fails_is_tried_again(
    node: Node, shutdowns: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [1, 0]
    monkeypatch.setattr(agent, "run_command", lambda words: codes.pop(0))
    rule = {"idle_minutes": 0.0, "is_down": True, "set_s": time.time() - 100, "boot": files.read_boot()}
    files.write_json(node.state / "autostop.json", rule)
    (node.state / "boot").touch()
    os.utime(node.state / "boot", (time.time() - 100, time.time() - 100))
    for left in (1, 0):
        agent.watch_once(None)
        assert len(codes) == left
    agent.watch_once(None)
    assert not (node.state / "autostop.json").exists()


def test_log_reaches_the_bucket_though_its_node_cannot_record_that(
    node: Node, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(monkeypatch)
    folder = node.begin()
    (folder / "log").write_bytes(b"OSError: No space left on device\n")
    node.finish(folder)
    (folder / "delivery.lock").touch()
    disk.fill()
    assert delivery.deliver(RUN), "it is tried again later"
    assert bucket.objects["s3://b/me-job-1/logs/1.log"].startswith(b"OSError")
    disk.is_full = lambda: False
    assert delivery.deliver(RUN) == "" and delivery.is_delivered(RUN)


# -- submission ----------------------------------------------------------------------------------------------------


def make_spec(**fields: Any) -> dict[str, Any]:
    head = {"credential": "pem", "address": "127.0.0.1", "epoch": 1, "coordinator_port": 1, "master_port": 2}
    spec = {"run_id": RUN, "rank": 0, "num_nodes": 1, "node_ips": ["127.0.0.1"], "lease_s": 900.0, "head": head}
    return {**spec, "envs": {}, "secrets": {}, **fields}


@pytest.fixture
def started(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the agent has started, in order."""
    calls: list[str] = []
    monkeypatch.setattr(agent, "start_detached", lambda verb, arguments, inherited: calls.append(verb))
    return calls


def test_no_run_begins_before_its_node_has_a_lease_and_a_watcher(
    node: Node, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that is killed in between must not leave a program without an end."""
    begin = agent.begin
    seen: list[Any] = []

    def begin_(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
        seen.append((lease.measure_left_s(), list(started)))
        return begin(folder, spec)

    monkeypatch.setattr(agent, "begin", begin_)
    agent.submit(make_spec())
    assert seen == [(pytest.approx(900.0), ["_watch"])] and started == ["_watch", "_run"]
    node.uptime_s += 10
    (files.run_folder(RUN) / "state.json").write_text("{}")
    agent.submit(make_spec(lease_s=5000.0))
    assert lease.measure_left_s() == pytest.approx(890.0), "a repeated call sets no lease"


def test_run_begins_though_a_report_looks_at_its_lock(node: Node, started: list[str]) -> None:
    folder = files.make_private(files.run_folder(RUN))
    looking = files.try_lock(folder / "runner.lock")
    assert looking is not None
    waits: list[float] = []

    def end_look(seconds: float) -> None:
        waits.append(seconds)
        os.close(looking)

    sleep, files.time.sleep = files.time.sleep, end_look
    try:
        agent.begin(folder, make_spec())
    finally:
        files.time.sleep = sleep
    assert len(waits) == 1 and started == ["_run"]


# -- the runner ----------------------------------------------------------------------------------------------------


class Gang:
    """The link to the head; the head names the ends."""

    is_headless = False

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, kind: str, **fields: Any) -> bool:
        self.sent.append(kind)
        return True

    def join(self, is_cancelled: Callable[[], bool]) -> bool:
        return True

    def end(self) -> None: ...

    def mark_started(self) -> None: ...


class Rank:
    """The runner of one rank without a network, on a node of its own."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
        monkeypatch.syspath_prepend(str(FOLDER))
        self.module = importlib.import_module("agent_run")
        own = self.module.agent_files
        for name, path in (("HOME", home), ("STATE", home / ".broker"), ("RUNS", home / ".broker" / "runs")):
            monkeypatch.setattr(own, name, path)
        self.gang = Gang()
        monkeypatch.setattr(self.module.agent_member, "Membership", lambda *arguments: self.gang)
        self.folder = own.make_private(own.run_folder(RUN))
        base = {"run_id": RUN, "rank": 0, "num_nodes": 1, "node_ips": ["127.0.0.1"], "gpus_per_node": 0, "envs": {}}
        head = {"master_port": 1, "address": "127.0.0.1"}
        own.write_json(self.folder / "spec.json", {**base, "secrets": {}, "head": head, **spec})
        self.runner = self.module.Runner(RUN, None)
        self.runner._is_go = True

    def end(self, status: str = "SUCCEEDED") -> None:
        self.runner._handle({"type": "end", "status": status, "returncode": 0, "reason": ""})

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


@pytest.mark.skipif(sys.platform == "darwin", reason="processes are found by their environment on Linux only")
def test_runner_that_fails_ends_its_program_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path, monkeypatch, run="echo $$ >pid; exec sleep 1000")
    pid = tmp_path / "sky_workdir" / "pid"
    signal_end = rank.runner._signal_end

    def fail(*arguments: Any) -> Any:
        if pid.exists() and pid.read_text().endswith("\n"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return signal_end(*arguments)

    rank.runner._signal_end = fail
    rank.runner.run()
    outcome = rank.read("outcome.json")
    assert (outcome["status"], outcome["returncode"]) == ("FAILED", None)
    assert "No space left on device" in outcome["reason"]
    with contextlib.suppress(ChildProcessError):  # collected already
        assert os.WTERMSIG(os.waitpid(int(pid.read_text()), 0)[1]) == signal.SIGKILL


def test_full_disk_ends_no_program_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path, monkeypatch, run="exit 3")
    disk = Disk(monkeypatch)
    note = rank.module.agent_record.note_state
    noted: list[str] = []

    def fill(folder: Path, status: str, **fields: Any) -> None:
        disk.is_full = (folder / "reserve").exists  # what the outcome needs is reserved
        noted.append(status)
        note(folder, status, **fields)

    monkeypatch.setattr(rank.module.agent_record, "note_state", fill)
    rank.end("FAILED")
    rank.runner._verdict = None  # the program's own end decides
    send = rank.gang.send

    def answer(kind: str, **fields: Any) -> bool:
        if kind == "exit":
            rank.end("FAILED")
        return send(kind, **fields)

    monkeypatch.setattr(rank.gang, "send", answer)
    rank.runner.run()
    assert noted == ["RUNNING"] and disk.refusals
    assert rank.read("state.json")["status"] == "SETTING_UP"
    assert rank.read("outcome.json")["own_returncode"] == 3
    assert not (rank.folder / "reserve").exists()


def test_notice_reaches_the_program_though_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path, monkeypatch)
    Disk(monkeypatch).fill()
    signals: list[int] = []
    rank.runner._signal = lambda pid, phase, number: signals.append(number)
    rank.runner._handle({"type": "notice", "notice_s": 1000.0})
    kill_s = rank.runner._signal_end(1, "run", None)
    assert kill_s is not None and rank.runner._signal_end(1, "run", kill_s) == kill_s
    assert signals == [signal.SIGTERM], "once"


@pytest.mark.parametrize("script", ["true #" + "x" * (1 << 18), "true \0"])
def test_program_that_cannot_be_started_is_a_failure_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    rank = Rank(tmp_path, monkeypatch)
    assert rank.runner._run_phase("run", script) == 126
    assert "`run` cannot be started" in (rank.folder / "rank.log").read_text()


def test_outcome_waits_for_space_if_even_the_reserved_one_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    record = importlib.import_module("agent_record")
    disk = Disk(monkeypatch)
    disk.fill()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        disk.is_full = lambda: len(pauses) < 3

    monkeypatch.setattr(record, "time", SimpleNamespace(sleep=pause))
    record.write_outcome(tmp_path, {"status": "FAILED"})
    assert json.loads((tmp_path / "outcome.json").read_text()) == {"status": "FAILED"} and len(pauses) == 3
    disk.fill()
    (tmp_path / "outcome.json").unlink()
    monkeypatch.setattr(record, "time", SimpleNamespace(sleep=lambda seconds: None))
    with pytest.raises(OSError, match="No space left"):
        record.write_outcome(tmp_path, {"status": "FAILED"})


def test_failed_write_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node records each contact: a thousand tries would leave a thousand files."""

    def refuse(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    files.write_text(tmp_path / "a", "old")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        files.write_text(tmp_path / "a", "new")
    assert not files.note_json(tmp_path / "b", {})
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a", "old")]


def test_notice_that_cannot_be_recorded_is_recorded_as_soon_as_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    own, notice = map(importlib.import_module, ("agent_files", "agent_notice"))
    monkeypatch.setattr(own, "STATE", tmp_path)
    disk = Disk(monkeypatch)
    disk.fill()
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        disk.is_full = lambda: now_s < 20.0

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now_s, time=time.time)
    monkeypatch.setattr(notice, "time", clock)
    notice.record(120.0)
    assert json.loads((tmp_path / "preemption").read_text())["notice_s"] == pytest.approx(100.0)
    disk.fill()
    (tmp_path / "preemption").unlink()
    sleeps = sleep
    clock.sleep = lambda seconds: (sleeps(seconds), disk.fill())
    notice.record(5.0)
    assert now_s == 25.0, "after its time nothing is left to do"
