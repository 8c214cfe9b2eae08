"""A managed job while the machine that launched it is unavailable: announced before it starts, and kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.clock import SystemClock
from broker.config import load_config
from broker.state.store import Store
from broker.types import Attempt, JobStatus, Placement, Task
from tests.simulation.world import make_offer
from tests.testbed.ec2 import FakeAws
from tests.testbed.ec2_account import Account

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
TASK = "name: t\nresources: {infra: aws/us-east-1, instance_type: g5.xlarge, use_spot: true}\nrun: sleep 1\n"
# Waits for the test, so that its whole second half runs without a daemon.
HELD = """\
name: held
resources: {infra: local, use_spot: true}
num_nodes: 2
run: |
  mkdir -p $BROKER_CHECKPOINT_DIR
  echo "$BROKER_ATTEMPT" >> $BROKER_CHECKPOINT_DIR/started-$SKYPILOT_NODE_RANK
  while [ -e $BROKER_CHECKPOINT_DIR/../hold ]; do sleep 0.05; done
  echo "{\\"step\\": 7, \\"total\\": 7}" >> $BROKER_PROGRESS_FILE
  echo "last words of $SKYPILOT_NODE_RANK"
  touch $BROKER_CHECKPOINT_DIR/ended-$SKYPILOT_NODE_RANK
"""


@pytest.fixture
def account(shell: Any) -> Iterator[Account]:
    account = Account(clock=SystemClock())
    aws = FakeAws(account)
    shell.environment |= aws.environment
    shell.home.mkdir()
    (shell.home / "aws.toml").write_text('ssh_from = ["203.0.113.7/32"]\nregions = ["us-east-1"]\n')
    yield account
    aws.close()


@pytest.mark.parametrize(
    ("more", "setting", "allowance"),
    [("", "", "12 h"), ("", 'unattended = "3h"\n', "3 h"), ("unattended: 45m\n", 'unattended = "3h"\n', "45 min")],
)
def test_launch_shows_in_one_line_how_long_it_continues(
    shell: Any, account: Account, more: str, setting: str, allowance: str
) -> None:
    (shell.home / "config.toml").write_text(setting)
    done = shell.run("jobs", "launch", shell.write("t.yaml", TASK + more), code=None)
    told = [line for line in done.stderr.splitlines() if "without this machine" in line]
    assert told == [f"continues for up to {allowance} without this machine; preemptions are handled when it is back"]
    assert shell.read_json("jobs", "queue") == [] and account.instances == {}, "shown before anything is paid for"


def test_job_on_this_machine_is_launched_without_that_line(shell: Any) -> None:
    done = shell.run("jobs", "launch", shell.write("t.yaml", "resources: {infra: local}\nrun: echo hi\n"), "--yes")
    assert "without this machine" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("cloud", "sentence"),
    [
        ("aws", "It continues for up to 2 h without this machine; preemptions are handled when it is back."),
        (
            "verda",
            "It continues, and costs money, while this machine is unavailable, even beyond budget and deadline, "
            "because machines of verda cannot terminate themselves; preemptions are handled when it is back.",
        ),
    ],
)
def test_why_shows_how_long_a_job_elsewhere_continues(shell: Any, cloud: str, sentence: str) -> None:
    config = load_config(shell.home)
    store = Store(config.database, clock=SystemClock())
    task = Task(name="t", run="x", unattended_s=7200.0)
    offer = replace(make_offer("east1a"), cloud=cloud)
    placement = Placement(offer=offer, is_spot=True, node_count=1)
    job = store.jobs.add("t", task)
    store.jobs.put_attempt(Attempt(job_id=job.id, number=1, cluster="job-1-1", placement=placement, started_s=1.0))
    store.jobs.set_status(job.id, JobStatus.RUNNING)
    assert sentence in shell.run("jobs", "why", "1").stdout.splitlines()
    store.jobs.set_status(job.id, JobStatus.CANCELLED)
    store.close()
    assert "It continues" not in shell.run("jobs", "why", "1").stdout, "it has ended"


def test_invalid_setting_is_named_before_anything_starts(shell: Any) -> None:
    shell.home.mkdir()
    (shell.home / "config.toml").write_text('unattended = "1m"\n')
    done = shell.run("jobs", "launch", shell.write("t.yaml", "resources: {infra: local}\nrun: x\n"), "--yes", code=None)
    assert done.returncode and "`unattended` is `1m`" in done.stderr and "at least 15m" in done.stderr
    (shell.home / "config.toml").unlink()
    assert shell.read_json("jobs", "queue") == []


@pytest.mark.long
def test_job_continues_without_its_daemon_and_the_next_one_reads_how_it_ended(shell: Any) -> None:
    hold: Path = shell.home / "checkpoints" / "hold"
    hold.parent.mkdir(mode=0o700, parents=True)
    hold.touch()
    shell.run("jobs", "launch", shell.write("held.yaml", HELD), "--yes", "--detach-run")
    shell.wait_until(lambda: len(list(shell.find_checkpoints(1).glob("started-*"))) == 2, "both ranks run")
    folder = shell.find_checkpoints(1)
    shell.wait_until(lambda: shell.get_status(1) == "RUNNING", "the job is known to run")
    shell.kill_daemon()
    leases = [json.loads(path.read_text()) for path in shell.home.glob("local/*/home/.broker/lease.json")]
    assert [lease["lease_s"] for lease in leases] == [12 * 3600.0] * 2
    hold.unlink()
    shell.wait_until(lambda: len(list(folder.glob("ended-*"))) == 2, "both ranks have ended")
    shell.wait_until(
        lambda: len(list(shell.home.glob("local/*/home/.broker/runs/1/outcome.json"))) == 2, "their agents know"
    )
    assert not shell.find_processes("broker daemon"), "no daemon saw the end"
    shell.run("jobs", "wait", "1")
    (job,) = shell.read_json("jobs", "queue")
    assert (job["status"], len(job["attempts"]), job["progress"]["step"]) == ("SUCCEEDED", 1, 7)
    assert (folder / "started-0").read_text() == "1\n", "started once"
    assert "last words of 0" in shell.run("jobs", "logs", "1").stdout
