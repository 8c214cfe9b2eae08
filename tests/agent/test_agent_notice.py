"""A notice is detected within a second of its announcement: there may be only two seconds."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.agent import FOLDER

HEARD_S_MAX = 2.0


class Cloud:
    """A metadata server on a clock of its own: only pauses take time."""

    def __init__(self, *, notice_at_s: float, advice_at_s: float = float("inf")) -> None:
        self.now_s, self._notice_at_s, self._advice_at_s = 0.0, notice_at_s, advice_at_s
        self.asked: list[str] = []
        self.advices = 0  # each with a time of its own

    def ask(self, verb: str, path: str, headers: dict[str, str], *, answer_s: float = 0.0) -> str | None:
        self.asked.append(path)
        if verb == "PUT":
            return "token"
        if path.endswith("spot/instance-action") and self.now_s >= self._notice_at_s:
            return json.dumps({"action": "terminate", "time": "2026-01-01T00:00:02Z"})
        if path.endswith("rebalance") and self.now_s >= self._advice_at_s:
            self.advices += 1
            return json.dumps({"noticeTime": f"2026-01-01T00:00:{self.advices:02}Z"})
        if "preempted" in path:
            if "wait_for_change" in path:
                # Held until there is a change, which a notice of before is not.
                self.now_s = self._notice_at_s if self.now_s < self._notice_at_s else self.now_s + 60.0
            return "TRUE" if self.now_s >= self._notice_at_s else "FALSE"
        return None

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Agent:
    """The agent's files, which import each other by their plain names as they do on a node."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(FOLDER))
        self.files, self.notice, self.run = map(importlib.import_module, ("agent_files", "agent_notice", "agent_run"))
        self._patch = monkeypatch
        monkeypatch.setattr(self.files, "STATE", state)

    def watch(self, cloud: Cloud, kind: str) -> None:
        self._patch.setattr(self.notice, "request_metadata", cloud.ask)
        self._patch.setattr(self.notice, "time", SimpleNamespace(**vars(time) | {"sleep": cloud.sleep}))
        self.notice.watch_notices(kind)

    def read(self, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.files.read_json(self.files.STATE / name)
        return found


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    return Agent(tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", ["aws", "gcp"])
@pytest.mark.parametrize("at_s", [0.0, 0.01, 0.99, 1.5, 7.25])
def test_notice_is_recorded_with_a_second_left(agent: Agent, kind: str, at_s: float) -> None:
    cloud = Cloud(notice_at_s=at_s)
    agent.watch(cloud, kind)
    assert agent.read("preemption")
    heard_s = cloud.now_s - at_s + agent.run.TICK_S  # the runner polls once a tick
    assert heard_s < HEARD_S_MAX - 0.5, "and half a second to act"


def test_advice_is_reported_and_is_not_a_notice(agent: Agent) -> None:
    cloud = Cloud(notice_at_s=10.0, advice_at_s=2.0)
    agent.watch(cloud, "aws")
    assert cloud.advices > 1, "the cloud announced it more than once"
    assert agent.read("rebalance") == {"time_s": agent.notice.parse_time_s("2026-01-01T00:00:01Z")}, "recorded once"
    assert cloud.now_s >= 10.0, "it kept listening"


def test_answers_that_a_busy_machine_misses_do_not_end_the_watch(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in ten fails: the watch ended after the sixtieth, within days, and later notices were not seen."""
    cloud = Cloud(notice_at_s=2000.0)
    answer, asked = cloud.ask, 0

    def ask(verb: str, path: str, headers: dict[str, str], *, answer_s: float = 0.0) -> str | None:
        nonlocal asked
        asked += 1
        if asked % 10 == 0:
            raise OSError
        return answer(verb, path, headers, answer_s=answer_s)

    monkeypatch.setattr(cloud, "ask", ask)
    agent.watch(cloud, "aws")
    assert agent.read("preemption") and cloud.now_s >= 2000.0


@pytest.mark.parametrize(
    ("now", "want_s"),
    [("01-01T00:00:30", 90.0), ("01-01T00:03:00", 120.0), ("01-01T23:00:00", 120.0), ("01-01T00:00:00", 120.0)],
)
def test_time_left_is_that_of_ec2_if_the_clock_is_wrong(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, now: str, want_s: float
) -> None:
    """Without time left, the program would be killed at once, and could not save."""
    monkeypatch.setattr(agent.notice, "request_metadata", lambda *words: '{"time": "2026-01-01T00:02:00Z"}')
    now_s = agent.notice.parse_time_s(f"2026-{now}Z")
    monkeypatch.setattr(agent.notice, "time", SimpleNamespace(**vars(time) | {"time": lambda: now_s}))
    agent.notice.watch_notices("aws")
    found = agent.read("preemption")
    assert found and found["notice_s"] == want_s


def test_clock_that_is_an_hour_slow_does_not_give_an_hour(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.notice, "request_metadata", lambda *words: '{"time": "2026-01-01T01:02:00Z"}')
    now_s = agent.notice.parse_time_s("2026-01-01T00:00:30Z")
    monkeypatch.setattr(agent.notice, "time", SimpleNamespace(**vars(time) | {"time": lambda: now_s}))
    agent.notice.watch_notices("aws")
    found = agent.read("preemption")
    assert found and found["notice_s"] == 120.0


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo"])
def test_times_of_the_cloud_are_utc_wherever_the_node_is(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        found_s = agent.notice.parse_time_s("2026-01-01T00:00:00Z")
    time.tzset()
    assert found_s == 1767225600.0


def test_token_is_renewed_before_it_ends(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request with an outdated token would be refused, and the notice not be seen."""
    cloud, ends_s = Cloud(notice_at_s=30_000.0), [0.0]
    answer = cloud.ask

    def ask(verb: str, path: str, headers: dict[str, str], *, answer_s: float = 0.0) -> str | None:
        if verb == "PUT":
            ends_s.append(cloud.now_s + float(headers["X-aws-ec2-metadata-token-ttl-seconds"]))
        assert cloud.now_s <= ends_s[-1]
        return answer(verb, path, headers, answer_s=answer_s)

    clock = SimpleNamespace(**vars(time) | {"sleep": cloud.sleep, "monotonic": lambda: cloud.now_s})
    monkeypatch.setattr(agent.notice, "request_metadata", ask)
    monkeypatch.setattr(agent.notice, "time", clock)
    assert agent.notice.read_aws(lambda: None) is None, "until the token is to be renewed"
    agent.notice.watch_notices("aws")
    assert agent.read("preemption") and len(ends_s) > 2


def test_machine_without_a_metadata_server_is_left_alone(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **options: object) -> str:
        raise OSError

    cloud = Cloud(notice_at_s=0.0)
    monkeypatch.setattr(cloud, "ask", refuse)
    agent.watch(cloud, "aws")
    assert agent.read("preemption") is None and cloud.now_s < 120
