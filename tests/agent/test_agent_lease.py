"""A node ends itself when its lease does, or when its work is done and saved and its broker is away; never before."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.agent import agent, agent_link

files, lease, delivery = agent.files, agent.agent_lease, agent.agent_lease.delivery
BUCKET = {"BROKER_CHECKPOINT_DIR": "s3://b/me-job-1", "BROKER_ATTEMPT": "1"}
HOUR = 3600.0


class Node:
    """The agent's files of one node, and the clock since its boot."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = state
        self.uptime_s = 1000.0
        self.boot = "boot-1"
        for name, value in (("STATE", state), ("RUNS", state / "runs"), ("HOME", state.parent)):
            monkeypatch.setattr(files, name, value)
        monkeypatch.setattr(files, "read_uptime_s", lambda: self.uptime_s)
        monkeypatch.setattr(files, "read_boot", lambda: self.boot)
        (state / "runs").mkdir(parents=True)

    def begin(self, run_id: int = 1, *, rank: int = 0, envs: dict[str, str] = BUCKET, **more: Any) -> Path:
        folder = self.state / "runs" / str(run_id)
        folder.mkdir()
        spec = {"run_id": run_id, "rank": rank, "envs": envs, "secrets": {}, **more}
        (folder / "spec.json").write_text(json.dumps(spec))
        (folder / "state.json").write_text('{"status": "RUNNING"}')
        self.runner = files.try_lock(folder / "runner.lock")
        return folder

    def finish(self, folder: Path, status: str = "SUCCEEDED") -> None:
        outcome = {"status": status, "returncode": 0, "reason": "", "ended_s": time.time()}
        (folder / "outcome.json").write_text(json.dumps(outcome))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path / "home" / ".broker", monkeypatch)


def test_lease_ends_the_node_when_its_time_is_up_whatever_it_does(node: Node) -> None:
    assert agent.decide_power_off() == ""
    lease.renew(12 * HOUR)
    node.begin()
    node.uptime_s += 12 * HOUR - 1
    assert agent.decide_power_off() == ""
    assert agent.report_status({})["lease_left_s"] == pytest.approx(1.0)
    lease.renew(12 * HOUR)
    node.uptime_s += 12 * HOUR - 1
    assert agent.decide_power_off() == ""
    node.uptime_s += 1
    assert agent.decide_power_off() == "lease"


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_wall_clock_that_jumps_neither_ends_a_node_nor_keeps_it(
    node: Node, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    lease.renew(900.0)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + jump_s)
    node.uptime_s += 899
    assert agent.decide_power_off() == ""
    node.uptime_s += 2
    assert agent.decide_power_off() == "lease"


def test_lease_of_an_earlier_boot_is_ignored(node: Node) -> None:
    lease.renew(900.0)
    node.boot, node.uptime_s = "boot-2", 5000.0
    assert agent.decide_power_off() == "" and lease.measure_left_s() is None


def test_lease_that_an_older_agent_gave_still_holds(node: Node) -> None:
    path = node.state / "lease.json"
    path.write_text(json.dumps({"expires_s": time.time() + 500, "boot": "boot-1"}))
    assert agent.decide_power_off() == ""
    path.write_text(json.dumps({"expires_s": time.time() - 1, "boot": "boot-1"}))
    assert agent.decide_power_off() == "lease"
    lease.renew(900.0)
    assert json.loads(path.read_text())["expires_s"] > time.time() + 800, "an older watcher reads this one"


def test_head_is_done_when_its_run_has_ended_all_is_in_the_bucket_and_the_broker_is_away(node: Node) -> None:
    lease.renew(12 * HOUR)
    files.record_contact()
    folder = node.begin()
    node.uptime_s += HOUR
    assert agent.decide_power_off() == "", "the program is running"
    node.finish(folder)
    assert agent.decide_power_off() == "", "nothing is in the bucket"
    (folder / "delivery.json").write_text('{"outcome": true, "error": "the log: HTTP 503"}')
    assert agent.decide_power_off() == "", "the log exists here only"
    (folder / "delivery.json").write_text('{"outcome": true, "log": true, "error": ""}')
    assert agent.decide_power_off() == "done"
    files.record_contact()
    node.uptime_s += files.QUIET_S - 1
    assert agent.decide_power_off() == "", "a broker that is there takes the node down itself"
    node.uptime_s += 1
    assert agent.decide_power_off() == "done"


def test_node_is_not_done_before_its_first_run_or_while_a_later_one_works(node: Node) -> None:
    """The program of a next attempt, on the nodes of the last one, would be lost with all its steps."""
    lease.renew(12 * HOUR)
    files.record_contact()
    node.uptime_s += HOUR
    assert agent.decide_power_off() == "", "the broker may be away before it has started anything"
    first = node.begin()
    node.finish(first, "FAILED")
    (first / "delivery.json").write_text('{"outcome": true, "log": true}')
    assert agent.decide_power_off() == "done"
    second = node.begin(2)
    assert agent.decide_power_off() == ""
    node.finish(second)
    (second / "delivery.json").write_text('{"outcome": true, "log": true}')
    assert agent.decide_power_off() == "done"


def test_failed_run_is_done_as_well(node: Node) -> None:
    lease.renew(12 * HOUR)
    files.record_contact()
    folder = node.begin()
    node.finish(folder, "FAILED")
    (folder / "delivery.json").write_text('{"outcome": true, "log": true}')
    node.uptime_s += HOUR
    assert agent.decide_power_off() == "done"


@pytest.mark.parametrize(
    "envs", [{}, {**BUCKET, "BROKER_CHECKPOINT_DIR": "/shared"}, {"BROKER_CHECKPOINT_DIR": "s3://b"}]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_bucket_the_node_stays_until_its_lease_ends(node: Node, envs: dict[str, str], rank: int) -> None:
    lease.renew(12 * HOUR)
    files.record_contact()
    node.finish(node.begin(rank=rank, envs=envs))
    node.uptime_s += 11 * HOUR
    assert agent.decide_power_off() == ""
    node.uptime_s += HOUR
    assert agent.decide_power_off() == "lease"


@pytest.mark.parametrize(("ends_together", "reason"), [(False, "done"), (True, "")])
def test_other_ranks_leave_before_the_head_unless_that_ends_the_head(
    node: Node, ends_together: bool, reason: str
) -> None:
    lease.renew(12 * HOUR)
    files.record_contact()
    folder = node.begin(rank=1, ends_together=ends_together)
    node.uptime_s += HOUR
    assert agent.decide_power_off() == ""
    node.finish(folder)
    assert agent.decide_power_off() == reason


def test_node_of_a_cluster_has_no_lease_and_is_never_done(node: Node) -> None:
    files.record_contact()
    folder = node.begin()
    node.finish(folder)
    (folder / "delivery.json").write_text('{"outcome": true, "log": true}')
    node.uptime_s += 100 * HOUR
    assert agent.decide_power_off() == ""


def test_verbs_of_the_broker_count_as_contact_and_our_own_do_not(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "ensure_watcher", lambda: None)
    monkeypatch.setattr(agent, "watch", lambda: None)
    for verb, request in (
        ("status", {}),
        ("log", {"run_id": 1, "offset": 0}),
        ("lease", {"lease_s": 900}),
        ("cancel", {"run_id": 1}),
    ):
        node.uptime_s += 50
        monkeypatch.setattr(agent, "read_request", lambda request=request: request)
        agent.main(verb)
        assert files.measure_quiet_s() == 0, verb
    node.uptime_s += 50
    agent.main("_watch")
    assert files.measure_quiet_s() == 50


@pytest.mark.parametrize("reason", ["lease", "done"])
def test_failed_shutdown_is_requested_again(node: Node, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    calls: list[list[str]] = []
    (node.state / "node.json").write_text('{"power_off": ["shutdown", "-h", "now"]}')

    def refuse(words: list[str]) -> int:
        calls.append(words)
        return 1

    monkeypatch.setattr(agent, "run_command", refuse)
    lease.renew(900.0)
    node.uptime_s += 900
    for _ in range(2):
        assert agent.decide_power_off() == "lease"
        agent.power_off(reason)
    assert calls == [["shutdown", "-h", "now"]] * 2 and (node.state / "shutdown").read_text() == reason


# -- uploads to the bucket -----------------------------------------------------------------------------------------


class Bucket:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.objects: dict[str, bytes] = {}
        self.refusals: dict[str, int] = {}  # part of a key -> how often it is still refused
        monkeypatch.setattr(delivery.load_bucket(), "put", self.put)

    def put(self, url: str, content: bytes, variables: dict[str, str]) -> None:
        for part, left in self.refusals.items():
            if part in url and left:
                self.refusals[part] -= 1
                raise delivery.load_bucket().Refused(f"{url}: HTTP 503")
        self.objects[url] = content


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return Bucket(monkeypatch)


def test_outcome_progress_and_log_are_left_in_the_bucket(node: Node, bucket: Bucket) -> None:
    folder = node.begin()
    (folder / "log").write_bytes(b"step 1\nstep 2\n")
    (folder / "progress.jsonl").write_text('{"step": 1}\n{"step": 2, "total": 2}\n')
    assert not delivery.is_due(1), "it still runs"
    node.finish(folder)
    assert delivery.is_due(1) and delivery.deliver(1) == "" and not delivery.is_due(1)
    assert bucket.objects["s3://b/me-job-1/logs/1.log"] == b"step 1\nstep 2\n"
    outcome = json.loads(bucket.objects["s3://b/me-job-1/outcomes/1.json"])
    assert (outcome["status"], outcome["progress"]) == ("SUCCEEDED", {"step": 2, "total": 2})


def test_delivery_continues_after_a_failure_even_in_another_process(node: Node, bucket: Bucket) -> None:
    folder = node.begin()
    (folder / "log").write_bytes(b"x\n")
    node.finish(folder)
    bucket.refusals = {"logs/": 2}
    for _ in range(2):
        assert "HTTP 503" in delivery.deliver(1)
        assert list(bucket.objects) == ["s3://b/me-job-1/outcomes/1.json"], "the outcome is there at once"
        assert delivery.is_due(1) and "HTTP 503" in json.loads((folder / "delivery.json").read_text())["error"]
    bucket.objects.clear()
    assert delivery.deliver(1) == "" and delivery.is_delivered(1)
    assert list(bucket.objects) == ["s3://b/me-job-1/logs/1.log"], "what has arrived is not sent again"


def test_log_of_a_running_program_is_kept_while_the_broker_is_away(node: Node, bucket: Bucket) -> None:
    folder = node.begin()
    (folder / "log").write_bytes(b"step 1\n")
    files.record_contact()
    node.uptime_s += files.QUIET_S - 1
    assert delivery.keep_log(1, 0) == 0 and not bucket.objects, "a broker that is there copies it"
    node.uptime_s += 1
    assert delivery.keep_log(1, 0) == 7
    assert bucket.objects.pop("s3://b/me-job-1/logs/1.log") == b"step 1\n"
    assert delivery.keep_log(1, 7) == 7 and not bucket.objects, "nothing new"
    (folder / "log").write_bytes(b"step 1\nstep 2\n")
    node.finish(folder)
    assert delivery.keep_log(1, 7) == 7 and not bucket.objects, "an ended run is delivered whole"


@pytest.mark.parametrize(("rank", "envs"), [(1, BUCKET), (0, {})])
def test_log_is_kept_by_the_head_and_with_a_bucket_only(
    node: Node, bucket: Bucket, rank: int, envs: dict[str, str]
) -> None:
    (node.begin(rank=rank, envs=envs) / "log").write_bytes(b"x\n")
    files.record_contact()
    node.uptime_s += HOUR
    assert delivery.keep_log(1, 0) == 0 and not bucket.objects


def test_upload_uses_what_the_task_says_before_what_was_granted(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = {**BUCKET, "AWS_REGION": "own"}
    folder = node.begin(envs=envs, secrets={"AWS_ACCESS_KEY_ID": "secret"})
    (folder / "access").mkdir()
    granted = {"AWS_REGION": "granted", "AWS_ACCESS_KEY_ID": "granted", "AWS_SESSION_TOKEN": "granted"}
    (folder / "access" / "envs.json").write_text(json.dumps(granted))
    node.finish(folder)
    used = dict[str, str]()
    bucket = SimpleNamespace(leave_outcome=lambda outcome, variables: used.update(variables))
    monkeypatch.setattr(delivery, "load_bucket", lambda: bucket)
    delivery.send(1, "outcome")
    assert {name: used[name] for name in granted} == {
        "AWS_REGION": "own", "AWS_ACCESS_KEY_ID": "secret", "AWS_SESSION_TOKEN": "granted",
    }  # fmt: skip


def test_two_processes_do_not_deliver_at_once(node: Node, bucket: Bucket) -> None:
    folder = node.begin()
    node.finish(folder)
    assert files.try_lock(folder / "delivery.lock") is not None
    assert delivery.deliver(1) == "" and not bucket.objects and delivery.is_due(1)


def test_ranks_but_the_head_deliver_nothing(node: Node, bucket: Bucket) -> None:
    node.finish(node.begin(rank=1))
    assert not delivery.is_due(1)


def test_after_a_notice_uploads_of_the_log_take_a_fifth_of_the_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may be saving a checkpoint."""
    now_s, begun_s = 0.0, []

    def keep_log(run_id: int, kept_bytes: int) -> int:
        nonlocal now_s
        begun_s.append(now_s)
        now_s += 4.0
        return kept_bytes + 1

    (node.begin() / "preemption").touch()
    monkeypatch.setattr(delivery, "keep_log", keep_log)
    monkeypatch.setattr(delivery.time, "monotonic", lambda: now_s)
    keeper = delivery.LogKeeper()
    while now_s < 100.0:
        keeper.upload_log_if_due(1)
        now_s += 1.0
    assert begun_s[0] == 0.0, "the first is sent at once"
    assert {later - earlier for earlier, later in itertools.pairwise(begun_s)} == {24.0}


def test_watcher_retries_with_backoff_and_survives_any_error(
    node: Node, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual time: the thread's sleeps move the clock, and the last one ends it."""
    now_s, tried_s = 0.0, []
    node.finish(node.begin())

    def sleep(duration_s: float) -> None:
        nonlocal now_s
        now_s += duration_s
        if now_s > 3000:
            raise SystemExit

    def deliver(run_id: int) -> str:
        tried_s.append(now_s)
        if len(tried_s) == 2:
            raise RuntimeError("a surprise")
        return "HTTP 503"

    monkeypatch.setattr(delivery, "deliver", deliver)
    monkeypatch.setattr(delivery.time, "sleep", sleep)
    monkeypatch.setattr(delivery.time, "monotonic", lambda: now_s)
    with pytest.raises(SystemExit):
        delivery.deliver_forever()
    waits_s = [later - earlier for earlier, later in itertools.pairwise(tried_s)]
    assert waits_s[:4] == [2, 4, 8, 16] and max(waits_s) == 300 and len(tried_s) > 10


def test_autostop_leaves_time_to_read_the_last_lines_however_short_it_is(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "ensure_watcher", lambda: None)
    now_s = time.time()
    node.finish(node.begin(), "SUCCEEDED")
    agent.set_autostop({"idle_minutes": 0, "is_down": True})
    monkeypatch.setattr(time, "time", lambda: now_s + 4.0)
    assert agent.decide_power_off() == ""
    monkeypatch.setattr(time, "time", lambda: now_s + 10.0)
    assert agent.decide_power_off() == "autostop"


def test_autostop_counts_from_when_it_was_set_even_on_a_node_that_was_idle_before(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "ensure_watcher", lambda: None)
    monkeypatch.setattr(agent, "measure_idle_s", lambda: 9000.0)
    now_s = time.time()
    agent.set_autostop({"idle_minutes": 10, "is_down": False})
    monkeypatch.setattr(time, "time", lambda: now_s + 500.0)
    assert agent.decide_power_off() == ""
    monkeypatch.setattr(time, "time", lambda: now_s + 700.0)
    assert agent.decide_power_off() == "stop"
    monkeypatch.setattr(agent, "measure_idle_s", lambda: 60.0)
    assert agent.decide_power_off() == ""


def test_autostop_applies_half_an_hour_after_a_restart_of_the_node(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cloud may have restarted it: a rule that was forgotten then left the cluster running until a user looked."""
    monkeypatch.setattr(agent, "ensure_watcher", lambda: None)
    monkeypatch.setattr(agent, "measure_idle_s", lambda: 9000.0)
    agent.set_autostop({"idle_minutes": 10, "is_down": True})
    node.boot, node.uptime_s = "boot-2", 5.0
    assert agent.decide_power_off() == "", "a node that was stopped and started again stays up"
    node.uptime_s = 1800.0 + 590.0
    assert agent.decide_power_off() == ""
    node.uptime_s = 1800.0 + 610.0
    assert agent.decide_power_off() == "autostop"
    monkeypatch.setattr(agent, "measure_idle_s", lambda: 0.0)
    assert agent.decide_power_off() == "", "a run is live"


def test_service_of_a_restarted_node_starts_the_watcher(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[str]()
    monkeypatch.setattr(agent, "start_detached", lambda verb, *arguments: started.append(verb))
    monkeypatch.setattr(os, "umask", lambda mask: 0)  # that of the tests stays
    agent.main("_restarted")
    assert started == ["_watch"] and not (node.state / "heard.json").exists(), "the broker has not returned"


def test_a_cancel_request_is_a_private_file_of_its_run(node: Node) -> None:
    folder = node.begin()
    assert agent.cancel({"run_id": 1}) == agent.cancel({"run_id": 1}) == agent.cancel({"run_id": 2}) == {}
    assert (folder / "cancel").stat().st_mode & 0o777 == 0o600
    assert not (folder.parent / "2").exists()


def test_gang_without_a_free_port_is_an_error_and_not_a_gang_without_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    class Taken:
        def __enter__(self) -> Taken:
            return self

        def __exit__(self, *error: object) -> None:
            return

        def bind(self, address: object) -> None:
            raise OSError("address in use")

    monkeypatch.setattr(agent_link.socket, "socket", Taken)
    with pytest.raises(OSError, match="no free port between 20000 and 32000"):
        agent_link.pick_port()
