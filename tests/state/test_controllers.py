"""Three controller processes on a real PostgreSQL: jobs survive the loss of any of them, and the server's restart."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.config import load_config
from broker.state.postgres_store import PostgresStore
from broker.types import JobStatus
from tests.cli.conftest import Shell
from tests.signals import signal_all
from tests.state.postgres_server import Server

pytestmark = [
    pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc"),
    pytest.mark.long,
]

# Counts to 30, one line per number and attempt, and waits at 10 while the file `hold` exists.
COUNT = """\
name: count
resources: {infra: local}
run: |
  mkdir -p $BROKER_CHECKPOINT_DIR
  n=$(cat $BROKER_CHECKPOINT_DIR/n 2>/dev/null || echo 0)
  while [ $n -lt 30 ]; do
    n=$((n + 1))
    echo "$BROKER_ATTEMPT $n" >> $BROKER_CHECKPOINT_DIR/ledger
    echo $n > $BROKER_CHECKPOINT_DIR/n.new && mv $BROKER_CHECKPOINT_DIR/n.new $BROKER_CHECKPOINT_DIR/n
    echo "{\\"step\\": $n, \\"total\\": 30}" >> $BROKER_PROGRESS_FILE
    sleep 0.1
    while [ -e $BROKER_CHECKPOINT_DIR/../hold ] && [ $n -ge 10 ]; do sleep 0.1; done
  done
"""
JOBS = 3


@pytest.fixture
def shell(tmp_path: Path, postgres: Server) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    shell.environment["BROKER_STATE"] = postgres.make_url()
    yield shell
    signal_all(shell.find_processes())


def open_store(shell: Shell) -> PostgresStore:
    config = load_config(shell.home)
    url = shell.environment["BROKER_STATE"]
    return PostgresStore(url, home=config.home, clock=SystemClock(), owner=config.owner)


def read_holders(store: PostgresStore) -> dict[int, tuple[int, int]]:
    """Return the process and the epoch of each claimed job."""
    rows = store.rows("SELECT job_id, holder, epoch FROM claims WHERE job_id > 0 AND holder <> ''")
    return {row["job_id"]: (int(re.split("/", row["holder"])[1]), row["epoch"]) for row in rows}


def test_three_controllers_share_jobs_and_take_over_from_one_that_is_killed(shell: Shell, postgres: Server) -> None:
    held = shell.home / "checkpoints" / "hold"
    held.parent.mkdir(mode=0o700, parents=True)
    held.touch()
    task = shell.write("count.yaml", COUNT)
    for _ in range(JOBS):
        shell.run("jobs", "launch", task, "--yes", "--detach-run")
    controllers = [
        shell.open("daemon"),
        shell.open("daemon"),
    ]  # besides the one that the first command started
    store = open_store(shell)
    shell.wait_until(lambda: store.claims.measure_load().controller_count == 3, "three controllers have a lease")
    shell.wait_until(
        lambda: len({pid for pid, _ in read_holders(store).values()}) == 3 and len(read_holders(store)) == JOBS,
        "each has a share of the jobs",
    )
    shell.wait_until(lambda: all(job.progress and job.progress.step == 10 for job in store.jobs.list()), "step 10")

    before = read_holders(store)
    victim = before[1][0]
    os.kill(victim, signal.SIGKILL)
    shell.wait_until(lambda: victim not in {pid for pid, _ in read_holders(store).values()}, "its jobs are taken over")
    after = read_holders(store)
    assert after[1][1] > before[1][1], "in a new epoch"

    zombie = after[2][0]
    os.kill(zombie, signal.SIGSTOP)
    shell.wait_until(
        lambda: zombie not in {pid for pid, _ in read_holders(store).values()}, "those of a stopped one, too"
    )
    os.kill(zombie, signal.SIGCONT)
    postgres.stop()
    postgres.start()

    held.unlink()
    shell.wait_until(lambda: not store.jobs.list_live_ids(), "all jobs have ended")
    jobs = store.jobs.list()
    assert [job.status for job in jobs] == [JobStatus.SUCCEEDED] * JOBS
    assert all(len(job.attempts) == 1 for job in jobs), "no program was restarted for a controller's sake"
    for job in jobs:
        ledger = (shell.home / "checkpoints" / job.folder / "ledger").read_text().splitlines()
        assert ledger == [f"1 {n}" for n in range(1, 31)], "nothing ran twice"
    assert "SUCCEEDED" in shell.run("jobs", "queue", "--all").stdout
    store.close()
    for process in controllers:
        process.kill()
        process.communicate()
