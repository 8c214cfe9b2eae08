"""The real daemon process with a real file and real nodes: killed at every effect, on a full disk, with a locked file.

`tests/simulation` runs thousands of histories of the same code on virtual time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.config import Config, load_config
from broker.state.store import Store
from broker.types import Job, JobStatus, Resources, Task
from tests.signals import suspend
from tests.tiers import spread

ROOT = Path(__file__).parent.parent.parent
CRASHING = str(Path(__file__).parent / "failing_daemon.py")
RUN_S_MAX = 900  # far more than required
STEPS = 4
GROUPS = 16
COUNT = f"""
n=$(cat $BROKER_CHECKPOINT_DIR/n 2>/dev/null || echo 0); mkdir -p $BROKER_CHECKPOINT_DIR
while [ $n -lt {STEPS} ]; do n=$((n + 1)); echo $n > $BROKER_CHECKPOINT_DIR/n
echo "$BROKER_ATTEMPT $n" >> $BROKER_CHECKPOINT_DIR/ledger; sleep 0.02; done
"""
pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(tmp_path / "home")


def submit(config: Config, run: str = COUNT) -> Job:
    store = Store(config.database, clock=SystemClock())
    task = Task(name="count", run=run, resources=(Resources(cloud="local", use_spot=True),))
    job = store.jobs.add("count", task)
    store.close()
    return job


def run_daemon(config: Config, crash_at: int | None = None) -> int:
    program = [CRASHING] if crash_at else ["-m", "broker", "daemon", "--idle", "0"]
    environment = {**os.environ, "BROKER_HOME": str(config.home), "PYTHONPATH": str(ROOT), "CRASH_AT": str(crash_at)}
    done = subprocess.run([sys.executable, *program], env=environment, capture_output=True, timeout=RUN_S_MAX)
    assert done.returncode in (0, 137), done.stderr.decode()
    return done.returncode


def check_end(config: Config, job: Job) -> None:
    store = Store(config.database, clock=SystemClock())
    found = store.jobs.get(job.id)
    assert found is not None and found.status is JobStatus.SUCCEEDED, found
    assert not store.clusters.list() and not store.intents.list_open()
    assert all(bill.ended_s is not None for bill in store.bills.list()), "billing has stopped"
    ledger = (config.checkpoints / job.folder / "ledger").read_text().split("\n")[:-1]
    steps = [tuple(map(int, line.split())) for line in ledger]
    assert sorted({step for _, step in steps}) == list(range(1, STEPS + 1))
    assert steps == sorted(steps), "attempts one after the other, steps in order: nothing ran twice at once"
    assert not find_processes(config.home)
    store.close()


def find_processes(home: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(home).encode() in command:
            found.append(entry.name)
    return found


# A calm run passes about forty effects, which the groups share; tests/simulation kills at the same effects on virtual
# time.
@pytest.mark.parametrize("group", spread(range(GROUPS), every=0, more=16))
def test_after_a_kill_at_any_effect_the_next_daemon_ends_the_job_once(tmp_path: Path, group: int) -> None:
    crash_at, crashes = group + 1, 0
    while True:
        config = load_config(tmp_path / str(crash_at))
        job = submit(config)
        code = run_daemon(config, crash_at)
        if code == 0:
            break  # a run without a crash: all effects were tried
        crashes += 1
        run_daemon(config)
        check_end(config, job)
        crash_at += GROUPS
    assert crashes >= 2


def test_a_database_locked_by_another_process_only_makes_it_wait(config: Config) -> None:
    job = submit(config)
    other = sqlite3.connect(config.database, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(1.0, lambda: other.execute("COMMIT"))
    release.start()
    run_daemon(config)
    release.join()
    check_end(config, job)


def test_of_two_concurrent_daemons_one_runs(config: Config) -> None:
    job = submit(config)
    environment = {**os.environ, "BROKER_HOME": str(config.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "broker", "daemon", "--idle", "0"]
    twins = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(2)]
    codes = [twin.wait(RUN_S_MAX) for twin in twins]
    for twin in twins:
        twin.communicate()
    assert codes == [0, 0]
    run_daemon(config)
    check_end(config, job)


# After its second step it waits for a file, so that what is done to its daemon happens in the middle.
WAITING = COUNT.replace("sleep 0.02", "while [ $n -ge 2 ] && [ ! -e $BROKER_CHECKPOINT_DIR/go ]; do sleep 0.02; done")


def start_daemon(config: Config, offset: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "BROKER_HOME": str(config.home), "PYTHONPATH": str(ROOT), "CLOCK_OFFSET": str(offset)}
    return subprocess.Popen([sys.executable, CRASHING], env=environment, stderr=subprocess.PIPE)


def wait_for(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + RUN_S_MAX
    while not is_so():
        assert time.monotonic() < end_s, "the condition never became true"
        time.sleep(0.02)


def is_half_done(config: Config, job: Job) -> bool:
    ledger = config.checkpoints / job.folder / "ledger"
    store = Store(config.database, clock=SystemClock())
    found = store.jobs.get(job.id)
    store.close()
    return ledger.exists() and ledger.read_text().endswith(" 2\n") and found is not None and found.status == "RUNNING"


def let_go(config: Config, job: Job) -> None:
    (config.checkpoints / job.folder / "go").touch()


@pytest.mark.parametrize("jump_s", spread([-3600, 3600], every=2))
def test_a_wall_clock_that_jumps_by_an_hour_changes_nothing(config: Config, tmp_path: Path, jump_s: int) -> None:
    job = submit(config, WAITING)
    daemon = start_daemon(config, tmp_path / "offset")
    wait_for(lambda: is_half_done(config, job))
    (tmp_path / "offset").write_text(str(jump_s))
    before = read_beat_s(config)
    wait_for(lambda: abs(read_beat_s(config) - before) > 1800)  # the daemon uses the new time
    let_go(config, job)
    _, errors = daemon.communicate(timeout=RUN_S_MAX)
    assert daemon.returncode == 0, errors
    check_end(config, job)
    store = Store(config.database, clock=SystemClock())
    assert len(store.jobs.list_attempts(job.id)) == 1, "no healthy attempt was given up"
    store.close()


def read_beat_s(config: Config) -> float:
    connection = sqlite3.connect(config.database)
    beat_s = float(connection.execute("SELECT beat_s FROM leader").fetchone()[0])
    connection.close()
    return beat_s


def test_a_replaced_daemon_that_resumes_takes_no_further_action(config: Config, tmp_path: Path) -> None:
    job = submit(config, WAITING)
    first = start_daemon(config, tmp_path / "none")
    wait_for(lambda: is_half_done(config, job))
    suspend(first.pid, config.database, [config.local_cloud / "lock"])
    (tmp_path / "later").write_text("3600")  # to the second, the first has not shown itself for an hour
    second = start_daemon(config, tmp_path / "later")
    wait_for(lambda: read_beat_s(config) > time.time() + 1800)
    os.kill(first.pid, signal.SIGCONT)
    _, words = first.communicate(timeout=RUN_S_MAX)
    assert first.returncode == 0 and b"taken over" in words, words
    let_go(config, job)
    assert second.wait(RUN_S_MAX) == 0
    second.communicate()
    check_end(config, job)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_loses_nothing_and_the_job_ends_when_there_is_room(tmp_path: Path) -> None:
    home = tmp_path / "small"
    home.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(home)], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount")
    try:
        config = load_config(home)
        job = submit(config)
        filler = home / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        environment = {**os.environ, "BROKER_HOME": str(home), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "broker", "daemon", "--idle", "0"]
        daemon = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert daemon.stderr is not None
        assert any("full" in line or "space" in line for line in iter(daemon.stderr.readline, "")), "it says why"
        filler.unlink()
        daemon.communicate(timeout=RUN_S_MAX)
        run_daemon(config)
        check_end(config, job)
    finally:
        subprocess.run(["umount", "-l", str(home)], check=False)
