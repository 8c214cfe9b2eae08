"""The agent's kept session as a real process, its broker played by the test."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import importlib
import json
import os
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.agent import FILES, FOLDER, agent_files

END_S = 300.0  # generous: only a broken program reaches it
START = """
import sys
sys.path.insert(0, sys.argv[1])
import agent_follow
for pair in sys.argv[2:]:
    name, _, value = pair.partition("=")
    assert hasattr(agent_follow, name)
    setattr(agent_follow, name, float(value))
import agent
agent.main("follow")
"""


class Session:
    """A session. `home` is the node's; constants of the session may be made smaller."""

    def __init__(self, home: Path, agent: Path, **constants: float) -> None:
        self.run = home / ".broker" / "runs" / "1"
        words = [f"{name}={value}" for name, value in constants.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, str(agent), *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "HOME": str(home)}, bufsize=0,
        )  # fmt: skip
        self._rest = b""

    def say(self, message: dict[str, Any] | None) -> None:
        assert self.process.stdin
        self.process.stdin.write(b"\n" if message is None else json.dumps(message).encode() + b"\n")

    def hear(self, matches: Callable[[dict[str, Any]], Any] = lambda message: message) -> dict[str, Any]:
        """Return the next message that matches; heartbeats are skipped."""
        give_up_s = time.monotonic() + END_S
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                message: dict[str, Any] = json.loads(line)
                if matches(message):
                    return message
            assert self.process.stdout and time.monotonic() < give_up_s
            if select.select([self.process.stdout], [], [], END_S)[0]:
                chunk = os.read(self.process.stdout.fileno(), 1 << 16)
                assert chunk, "the session ended"
                self._rest += chunk

    def open(self) -> dict[str, Any]:
        self.say({"run_id": 1, "pace_s": 0.0})
        return self.hear()

    def wait(self) -> int:
        return self.process.wait(END_S)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a node whose run 1 is in its setup: its runner holds the lock."""
    run = tmp_path / "home" / ".broker" / "runs" / "1"
    run.mkdir(parents=True)
    (run / "spec.json").write_text('{"name": "train"}')
    (run / "state.json").write_text('{"started_s": 1.0, "status": "SETTING_UP"}')
    return tmp_path / "home"


@pytest.fixture
def start(home: Path, tmp_path: Path) -> Iterator[Callable[..., Session]]:
    agent = tmp_path / "agent"
    agent.mkdir()
    for name in FILES:
        (agent / name).write_bytes((FOLDER / name).read_bytes())
    (agent / "digest").write_text("one")
    lock = agent_files.try_lock(home / ".broker/runs/1/runner.lock")
    assert lock is not None
    sessions: list[Session] = []

    def make(**constants: float) -> Session:
        sessions.append(Session(home, agent, **constants))
        return sessions[-1]

    yield make
    os.close(lock)
    for session in sessions:
        session.process.kill()
        session.process.wait()


def test_first_message_has_the_whole_state_and_later_ones_the_changes(start: Callable[..., Session]) -> None:
    session = start()
    first = session.open()
    assert first["status"]["runs"][0] | {"status": "SETTING_UP", "name": "train"} == first["status"]["runs"][0]
    assert first["log_bytes"] == 0 and first["status"]["idle_s"] == 0 and first["status"]["is_advised"] is False
    agent_files.write_json(session.run / "state.json", {"started_s": 1.0, "status": "RUNNING"})
    assert session.hear()["status"]["runs"][0]["status"] == "RUNNING"
    (session.run / "progress.jsonl").write_text('{"step": 3}\n')
    assert session.hear()["status"]["runs"][0]["progress"] == {"step": 3}
    (session.run / "log").write_bytes(b"12345")
    assert session.hear()["log_bytes"] == 5
    agent_files.write_json(session.run / agent_files.SETUP_REPORT, {"result": "kept"})  # the program may print nothing
    assert session.hear()["status"]["runs"][0]["setup"] == {"result": "kept"}
    (session.run.parent.parent / "rebalance").touch()
    assert session.hear()["status"]["is_advised"] is True
    (session.run.parent.parent / "preemption").touch()
    assert session.hear()["status"]["is_noticed"] is True
    agent_files.write_json(session.run / "outcome.json", {"status": "FAILED", "returncode": 3, "ended_s": 2.0})
    assert session.hear(lambda message: message["status"]["runs"][0]["returncode"] == 3)


def test_outcome_does_not_wait_for_the_pace_of_progress(start: Callable[..., Session]) -> None:
    session = start()
    session.say({"run_id": 1, "pace_s": 1e9})
    session.hear()
    (session.run / "progress.jsonl").write_text('{"step": 1}\n')
    assert session.hear()["status"]["runs"][0]["progress"] == {"step": 1}, "the first step is news: it ends a recovery"
    (session.run / "progress.jsonl").write_text('{"step": 22}\n')
    agent_files.write_json(session.run / "outcome.json", {"status": "SUCCEEDED", "returncode": 0, "ended_s": 2.0})
    assert session.hear()["status"]["runs"][0]["status"] == "SUCCEEDED"


def test_runner_that_vanishes_is_reported(start: Callable[..., Session], home: Path) -> None:
    (home / ".broker/runs/2").mkdir()
    (home / ".broker/runs/2/spec.json").write_text("{}")
    lock = agent_files.try_lock(home / ".broker/runs/2/runner.lock")
    assert lock is not None
    session = start()
    session.say({"run_id": 2})
    assert session.hear()["status"]["runs"][0]["status"] == "PENDING"
    os.close(lock)
    assert session.hear()["status"]["runs"][0]["status"] == "FAILED"


def test_requests_are_answered_by_their_number(start: Callable[..., Session]) -> None:
    session = start()
    session.open()
    (session.run / "log").write_bytes(bytes(range(256)))
    session.say({"id": 7, "verb": "log", "request": {"run_id": 1, "offset": 250}})
    session.say({"id": 8, "verb": "no such verb", "request": {}})
    session.say({"id": 9, "verb": "cancel", "request": {"run_id": 1}})
    seven = session.hear(lambda message: message.get("id") == 7)
    assert base64.b64decode(seven["answer"]["data"]) == bytes(range(250, 256))
    assert "KeyError" in session.hear(lambda message: message.get("id") == 8)["error"]
    assert session.hear(lambda message: message.get("id") == 9)["answer"] == {}
    assert (session.run / "cancel").exists()


def test_a_request_that_fails_with_an_os_error_is_answered_and_the_session_stays(start: Callable[..., Session]) -> None:
    session = start()
    session.open()
    (session.run / "cancel").symlink_to("missing/file")
    session.say({"id": 1, "verb": "cancel", "request": {"run_id": 1}})
    assert "Error: [Errno" in session.hear(lambda message: message.get("id") == 1)["error"]
    (session.run / "cancel").unlink()
    session.say({"id": 2, "verb": "cancel", "request": {"run_id": 1}})
    assert session.hear(lambda message: message.get("id") == 2)["answer"] == {}


def test_it_ends_with_its_input(start: Callable[..., Session]) -> None:
    session = start()
    session.open()
    assert session.process.stdin
    session.process.stdin.close()
    assert session.wait() == 0


def test_it_ends_when_a_request_never_ends(start: Callable[..., Session]) -> None:
    session = start(LINE_BYTES_MAX=1000)
    session.open()
    assert session.process.stdin
    with contextlib.suppress(BrokenPipeError):
        while session.process.poll() is None:
            session.process.stdin.write(b"x" * 600)
            select.select([], [], [], 0.01)
    assert session.wait() == 0


def test_it_ends_when_nothing_reads_it(start: Callable[..., Session]) -> None:
    session = start(BEAT_S=0.1)
    session.open()
    assert session.process.stdout
    session.process.stdout.close()
    assert session.wait() == 0


def test_it_ends_when_its_broker_is_silent(start: Callable[..., Session]) -> None:
    session = start(SILENCE_S=0.5, BEAT_S=0.1)
    with contextlib.suppress(BrokenPipeError):  # on a slow machine it may have ended already
        session.say({"run_id": 1, "pace_s": 0.0})
    assert session.wait() == 0


def test_it_stays_while_its_broker_answers_heartbeats(start: Callable[..., Session]) -> None:
    session = start(SILENCE_S=END_S, BEAT_S=0.1)
    session.open()
    for _ in range(5):
        assert session.hear(lambda message: True) == {}
        session.say(None)
    assert session.process.poll() is None


def test_the_first_heartbeat_comes_early(start: Callable[..., Session]) -> None:
    session = start(BEAT_S=10 * END_S, FIRST_BEAT_S=0.1)
    session.open()
    assert session.hear(lambda message: True) == {}


def test_heartbeats_are_requested_even_during_busy_sessions(start: Callable[..., Session]) -> None:
    session = start(BEAT_S=0.5)
    session.open()
    step, has_news = 0, False
    while True:
        step += 1
        (session.run / "progress.jsonl").write_text(json.dumps({"step": 10**9 + step}) + "\n" * step)
        if session.hear(lambda message: True):
            has_news = True
        elif has_news:  # on a slow machine, the first message may be a heartbeat
            break
        assert step < 100


def test_broker_that_keeps_a_session_is_not_away(start: Callable[..., Session], home: Path) -> None:
    session = start()
    session.open()
    heard = home / ".broker" / agent_files.HEARD
    heard.unlink()
    give_up_s = time.monotonic() + END_S
    while not heard.exists():
        session.say(None)
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def test_older_follower_ends_for_a_newer_agent(start: Callable[..., Session], tmp_path: Path) -> None:
    session = start(SILENCE_S=1e9)
    session.open()
    (tmp_path / "agent" / "digest").write_text("another")
    assert session.wait() == 0


def test_a_broker_that_only_answers_heartbeats_counts_as_in_contact(start: Callable[..., Session], home: Path) -> None:
    """Otherwise a node whose program has ended would switch itself off although a broker is there."""
    session = start()
    session.open()
    heard = home / ".broker" / agent_files.HEARD
    heard.unlink()
    session.say(None)
    session.say({"id": 1, "verb": "log", "request": {"run_id": 1, "offset": 0}})
    session.hear(lambda message: message.get("id") == 1)
    assert heard.exists()


@pytest.fixture
def follow(home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load the session's module in this process, on the node's files."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("agent_follow")
    monkeypatch.setattr(module.files, "STATE", home / ".broker")
    monkeypatch.setattr(module.files, "RUNS", home / ".broker" / "runs")
    return module


def test_heartbeat_after_a_long_absence_has_the_newest_samples(
    follow: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [{"time_s": float(number)} for number in range(100)]
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(follow.agent_ring, "read", lambda path, after_s: [x for x in samples if x["time_s"] > after_s])
    session = follow.Follower(lambda request: {}, {})
    monkeypatch.setattr(session, "_write", sent.append)
    session._beat()
    session._beat()
    assert sent == [{"samples": samples[-follow.SAMPLES_MAX :]}, {}]


def test_a_runner_that_vanishes_is_urgent_news_until_there_is_an_outcome(follow: Any, home: Path) -> None:
    lock = agent_files.try_lock(home / ".broker/runs/1/runner.lock")
    assert lock is not None
    marks = follow.FileStamps(1)
    running, _ = marks.read()
    os.close(lock)
    gone, usual = marks.read()
    assert gone != running
    assert marks.read() == (gone, usual), "nothing is new"
    (home / ".broker/runs/1/outcome.json").write_text("{}")
    assert marks.read()[0] != gone


@pytest.mark.parametrize("name", ["state.json", "outcome.json"])
def test_urgent_changes_are_sent_at_once(follow: Any, home: Path, name: str) -> None:
    marks = follow.FileStamps(1)
    before = marks.read()
    (home / ".broker/runs/1" / name).write_text('{"status": "a longer text than before it changed"}')
    assert marks.read()[0] != before[0]


def test_of_progress_only_the_first_step_is_urgent(follow: Any, home: Path) -> None:
    file = home / ".broker/runs/1/progress.jsonl"
    marks = follow.FileStamps(1)
    none, _ = marks.read()
    file.write_text('{"step": 1}\n')
    first, usual = marks.read()
    assert first != none
    file.write_text('{"step": 1}\n{"step": 2}\n')
    assert marks.read()[0] == first and marks.read()[1] != usual


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel what a pipe still holds")
def test_message_may_arrive_in_parts(start: Callable[..., Session]) -> None:
    session = start()
    session.open()
    assert session.process.stdin
    message = json.dumps({"id": 7, "verb": "log", "request": {"run_id": 1, "offset": 0}}).encode() + b"\n"
    for part in (message[:5], message[5:20], message[20:]):
        session.process.stdin.write(part)
        give_up_s = time.monotonic() + END_S
        while count_unread(session.process.stdin.fileno()):
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
    assert session.hear(lambda message: message.get("id") == 7)["answer"] == {"data": ""}


def count_unread(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"), sys.byteorder)


def test_changes_that_can_wait_are_pushed_at_the_brokers_pace_and_others_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("agent_follow")
    now_s, marks, pushed = [100.0], {"urgent": 0, "usual": 0}, list[float]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(module.files, "RUNS", tmp_path)
    follower = module.Follower(lambda request: {}, {})
    monkeypatch.setattr(follower, "_write", lambda message: pushed.append(now_s[0]) if "status" in message else None)

    class Changes:
        def read(self) -> tuple[object, object]:
            return marks["urgent"], marks["usual"]

    for tick in range(9):
        now_s[0] = 100.0 + 0.25 * tick
        marks["usual"] += 1
        marks["urgent"] = int(tick >= 6)
        follower._push(1, Changes())
    assert module.PACE_S == 1.0 and pushed == [100.0, 101.0, 101.5], "the last one is urgent"
