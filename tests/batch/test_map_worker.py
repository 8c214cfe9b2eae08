"""The worker of a map as processes on real files: leases, lines, failing programs, kill -9."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.batch import plan_file, tally
from broker.batch.splitting import split
from broker.errors import UsageError
from broker.storage import open_bucket
from tests.testbed.s3 import BUCKET, S3Server, serve_s3
from trainers import map_worker
from trainers.map_leases import FAILED, Leases, read_plan
from trainers.map_places import Place, open_place

ROOT = Path(__file__).parents[2]
WAIT_S_MAX = 600  # far more than required
DOUBLE = "def process(items):\n    return [2 * each for each in items]\n"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


@pytest.fixture(params=["file", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    return {"file": f"file://{tmp_path}/bucket", "s3": f"s3://{BUCKET}/{uuid.uuid4().hex}"}[request.param]


def begin(base: str, content: bytes, *, shard_bytes: int, lease_s: float = 60.0) -> tuple[plan_file.MapPlan, Place]:
    """Write an input file and the plan, as `broker map` does."""
    source = open_bucket(f"{base}/in")
    source.write("x.jsonl", content)
    wanted = split(source.list_keys(), shard_bytes=shard_bytes)
    plan, is_new = plan_file.begin(
        open_bucket(f"{base}/out"), wanted, input_url=f"{base}/in", program="p", draw_uid=lambda: "uid",
        lease_s=lease_s, files={},
    )  # fmt: skip
    assert is_new
    return plan, open_place(f"{base}/out")


def read_results(base: str) -> list[object]:
    bucket = open_bucket(f"{base}/out")
    keys = [each.key for each in bucket.list_keys() if each.key.startswith("part-")]
    return [json.loads(line) for key in keys for line in (bucket.read(key) or b"").splitlines()]


def run_worker(place: Place, run: Callable[..., list[bytes]], name: str = "one", attempt: int = 1) -> int:
    plan = read_plan(place)
    leases = Leases(place, plan, worker=name, attempt=attempt)
    return map_worker.work(leases, plan, open_place(plan.input), run, is_noticed=lambda: False)


def echo(content: bytes, is_over: object) -> list[bytes]:
    return content.splitlines()


def test_a_worker_does_all_shards_in_a_folder_and_in_a_bucket(base: str) -> None:
    plan, place = begin(base, b"".join(b"%d\n" % n for n in range(200)), shard_bytes=50)
    assert run_worker(place, echo) == 0
    assert read_results(base) == list(range(200))  # parts are in the order of the input
    now = tally.take(open_bucket(f"{base}/out"), plan)
    assert now.is_complete and now.left == 0 and sum(now.items.values()) == 200
    assert place.list_entries("_map/leases") == []
    assert run_worker(place, echo) == 0  # nothing is left
    assert sum(tally.count_items(open_bucket(f"{base}/out"), now).values()) == 200


def test_no_shard_is_read_from_an_input_that_was_written_again(base: str, capfd: pytest.CaptureFixture[str]) -> None:
    plan, place = begin(base, b"1\n2\n3\n4\n", shard_bytes=2)
    source = open_bucket(f"{base}/in")

    def replace(content: bytes, is_over: object) -> list[bytes]:
        source.write("x.jsonl", b"5\n6\n7\n8\n")
        if base.startswith("file:"):
            os.utime(f"{base.removeprefix('file://')}/in/x.jsonl", (1e9, 1e9))
        return content.splitlines()

    assert run_worker(place, replace) == 1
    assert len(read_results(base)) == 1, "the shard that was read before"
    assert "`x.jsonl` was written again" in capfd.readouterr().err
    assert all(each.size_bytes == 0 for each in place.list_entries("_map/leases")), "released"
    assert place.list_entries(FAILED) == []
    wanted = split(source.list_keys("x.jsonl"), shard_bytes=2)
    with pytest.raises(UsageError, match="was written again"):
        plan_file.begin(
            open_bucket(f"{base}/out"), wanted, input_url=plan.input, program="p", draw_uid=lambda: "uid",
            lease_s=60.0, files={},
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_every_line_belongs_to_one_shard_wherever_the_cuts_are(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    lines = [json.dumps("x" * chance.choice((0, 1, 5, 300))).encode() for _ in range(chance.randint(1, 60))]
    content = b"\n".join(lines) + chance.choice((b"", b"\n"))
    _, place = begin(f"file://{tmp_path}", content, shard_bytes=chance.choice((1, 2, 3, 7, 50, 1000)))
    plan = read_plan(place)
    found = [map_worker.read_lines(open_place(plan.input), shard).splitlines() for shard in plan.shards]
    assert [line for each in found for line in each] == lines


def test_a_lease_is_exclusive_until_it_expires_is_released_or_its_worker_returns(tmp_path: Path) -> None:
    _, place = begin(f"file://{tmp_path}", b"1\n", shard_bytes=10, lease_s=60.0)
    plan = read_plan(place)
    first, second = (Leases(place, plan, worker=name) for name in ("first", "second"))
    lease = first.acquire()
    assert lease is not None and second.acquire() is None
    first.release(lease)
    taken = second.acquire()
    assert taken is not None and taken.epoch == 2
    assert not first.renew(lease) and second.renew(taken)  # the older epoch is fenced
    again = Leases(place, plan, worker="second", attempt=2).acquire()  # its own, from before it was killed
    assert again is not None and again.epoch == 3 and not second.renew(taken)
    os.utime(tmp_path / "out" / again.key, (1.0, 1.0))
    late = first.acquire()
    assert late is not None and late.epoch == 4
    assert first.commit(late, b"1\n", items=1) and not second.commit(taken, b"2\n", items=1)
    assert place.read("part-00000.jsonl") == b"1\n"
    assert first.acquire() is None


def test_a_shard_that_loses_its_holder_nine_times_is_left_out(tmp_path: Path) -> None:
    _, place = begin(f"file://{tmp_path}", b"1\n", shard_bytes=10)
    plan, attempts, reports = read_plan(place), itertools.count(1), []
    for lost in range(9):
        assert Leases(place, plan, worker="one", attempt=next(attempts)).acquire() is not None  # and is lost
        for _ in range(2 if lost < 8 else 0):  # these are not lost, and do not repeat the report of a loss
            holder = Leases(place, plan, worker="one", attempt=next(attempts))
            lease = holder.acquire()
            assert lease is not None
            holder.release(lease)
        reports.append(len(place.list_entries(FAILED)))
    assert reports == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert Leases(place, plan, worker="one", attempt=next(attempts)).acquire() is None
    assert len(place.list_entries(FAILED)) == 3
    assert Leases(place, plan, worker="two").acquire() is None


def test_a_shard_on_which_the_program_fails_is_left_out_after_three_tries(tmp_path: Path) -> None:
    plan, place = begin(f"file://{tmp_path}", b'1\n2\n"bad"\n4\n', shard_bytes=2)
    run_worker(place, lambda content, is_over: map_worker.call_function(increment, content, 8, is_over))
    bucket = open_bucket(f"file://{tmp_path}/out")
    now = tally.take(bucket, plan)
    assert len(now.failed) == 1 and now.left == 0 and read_results(f"file://{tmp_path}") == [2, 3, 5]
    (reason,) = tally.explain_failures(bucket, now)
    assert reason.startswith("TypeError")
    tally.forget_failures(bucket, now)
    assert tally.take(bucket, plan).left == 1 and place.list_entries(FAILED) == []
    assert run_worker(place, echo, attempt=2) == 0
    assert read_results(f"file://{tmp_path}") == [2, 3, "bad", 5]


def increment(items: list[int]) -> list[int]:
    return [each + 1 for each in items]


def test_a_program_that_always_fails_ends_its_worker(tmp_path: Path) -> None:
    _, place = begin(f"file://{tmp_path}", b"1\n" * 20, shard_bytes=2)
    wrong: Callable[[list[int]], list[int]] = lambda items: []  # noqa: E731
    assert run_worker(place, lambda content, is_over: map_worker.call_function(wrong, content, 8, is_over)) == 1
    assert read_results(f"file://{tmp_path}") == []


def test_a_command_filters_lines_and_its_exit_code_counts(tmp_path: Path) -> None:
    words = ["sh", "-c", "sed s/1/one/"]
    assert map_worker.run_command(words, b"1\n2\n", lambda: False) == [b"one", b"2"]
    assert map_worker.run_command(["cat"], b"a\rb\n\nc", lambda: False) == [b"a\rb", b"", b"c"]
    assert map_worker.run_command(["true"], b"a\n", lambda: False) == []
    with pytest.raises(map_worker.ProgramError, match="exited with code 3"):
        map_worker.run_command(["sh", "-c", "exit 3"], b"", lambda: False)
    with pytest.raises(map_worker.ShardLostError):  # the shard was lost: the command is ended
        map_worker.run_command(["sleep", "1000"], b"", lambda: True)


def test_a_worker_that_lost_its_shard_stops_working_on_it(tmp_path: Path) -> None:
    _, place = begin(f"file://{tmp_path}", b"1\n", shard_bytes=2, lease_s=0.03)
    plan = read_plan(place)
    other = Leases(place, plan, worker="other")
    started = threading.Event()

    def wait_until_lost(content: bytes, is_over: Callable[[], bool]) -> list[bytes]:
        started.set()
        end_s = time.monotonic() + WAIT_S_MAX
        while not is_over():
            assert time.monotonic() < end_s, "the loss of the shard was not noticed"
            time.sleep(0.01)
        raise map_worker.ShardLostError

    thread = threading.Thread(target=run_worker, args=(place, wait_until_lost))
    thread.start()
    started.wait(WAIT_S_MAX)
    place.create("part-00000.jsonl", b"9\n")  # as another worker does that took the shard over
    thread.join(WAIT_S_MAX)
    assert not thread.is_alive() and other.acquire() is None
    assert read_results(f"file://{tmp_path}") == [9]


GATED = """\
import os, time
from pathlib import Path

def process(items):
    out, gate = Path(os.environ["BROKER_MAP"][len("file://"):]), Path(os.environ["GATE"])
    while len(list(out.glob("part-*"))) >= int(gate.read_text()):  # held in the middle of a shard
        time.sleep(0.01)
    return [2 * each for each in items]
"""


def test_twenty_kills_of_real_workers_leave_every_result_once(tmp_path: Path) -> None:
    kills, items = 20, 200
    base = f"file://{tmp_path}"
    plan, _ = begin(base, b"".join(b"%03d\n" % n for n in range(100, 100 + items)), shard_bytes=12, lease_s=5)
    (tmp_path / "double.py").write_text(GATED)
    gate = tmp_path / "gate"

    def open_gate(limit: int) -> None:
        gate.with_suffix(".new").write_text(str(limit))
        gate.with_suffix(".new").replace(gate)

    def start(worker: int, attempt: int) -> subprocess.Popen[bytes]:
        variables = {
            **os.environ, "BROKER_MAP": f"{base}/out", "SKYPILOT_TASK_ID": f"job-{worker}", "GATE": str(gate),
            "BROKER_ATTEMPT": str(attempt), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        words = [sys.executable, "-m", "trainers.map_worker", "double.py"]
        return subprocess.Popen(words, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL)

    def wait_until(is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + WAIT_S_MAX
        while not is_so():
            assert time.monotonic() < end_s, what
            time.sleep(0.01)

    open_gate(1)
    workers, attempts = [start(each, 1) for each in range(3)], [1, 1, 1]
    try:
        for kill in range(kills):
            wait_until(lambda done=kill: len(list((tmp_path / "out").glob("part-*"))) > done, "no result")  # type: ignore[misc]
            victim = kill % 3
            assert workers[victim].poll() is None
            os.kill(workers[victim].pid, signal.SIGKILL)
            workers[victim].wait()
            attempts[victim] += 1
            workers[victim] = start(victim, attempts[victim])
            open_gate(kill + 2)
        open_gate(items)
        assert [each.wait(WAIT_S_MAX) for each in workers] == [0, 0, 0]
    finally:
        for each in workers:
            each.kill()
            each.wait()
    assert read_results(base) == [2 * n for n in range(100, 100 + items)]
    assert tally.take(open_bucket(f"{base}/out"), plan).is_complete
    assert all(".partial" not in each.key for each in open_bucket(f"{base}/out").list_keys())


@pytest.mark.parametrize(("bad", "code", "done"), [([3], 0, [1, 2, 4, 5]), ([1, 2, 3, 4, 5], 128 + signal.SIGKILL, [])])
def test_a_shard_that_ends_the_workers_process_is_left_out_after_three_tries(
    bad: list[int], code: int, done: list[int], tmp_path: Path
) -> None:
    base = f"file://{tmp_path}"
    plan, place = begin(base, b"1\n2\n3\n4\n5\n", shard_bytes=2)
    (tmp_path / "fatal.py").write_text(
        "import os, signal\n"
        "def process(items):\n"
        f"    if set(items) & {set(bad)}:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short\n"
        "    return items\n"
    )
    variables = {**os.environ, "BROKER_MAP": f"{base}/out", "SKYPILOT_TASK_ID": "job-1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "trainers.map_worker", "fatal.py"]
    worker = subprocess.run(words, cwd=tmp_path, env=variables, timeout=WAIT_S_MAX, capture_output=True, text=True)
    assert worker.returncode == code, worker.stderr
    assert read_results(base) == done
    entries = place.list_entries(FAILED)
    reasons = {json.loads(place.read(each.key) or b"")["reason"] for each in entries}
    assert reasons == {"the worker was ended by SIGKILL (out of memory?)"}
    now = tally.take(open_bucket(f"{base}/out"), plan)
    if code == 0:
        assert len(entries) == 3 and len(now.failed) == 1 and now.left == 0
    else:  # it ends at the third different shard without a result in between
        assert len({each.key.split("/")[-2] for each in entries}) == 2


def test_a_terminated_worker_releases_its_shard(tmp_path: Path) -> None:
    base = f"file://{tmp_path}"
    _, place = begin(base, b"1\n2\n", shard_bytes=10)
    (tmp_path / "wait.py").write_text(
        "import os, signal\n"
        "def process(items):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)  # the notice of a preemption\n"
        "    return items\n"
    )
    variables = {**os.environ, "BROKER_MAP": f"{base}/out", "SKYPILOT_TASK_ID": "job-1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "trainers.map_worker", "wait.py", "--batch", "1"]
    done = subprocess.run(words, cwd=tmp_path, env=variables, timeout=WAIT_S_MAX, capture_output=True)
    assert done.returncode == 143, done.stderr
    (entry,) = place.list_entries("_map/leases")
    assert entry.size_bytes == 0
