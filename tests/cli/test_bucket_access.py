"""Output on bucket access before and after a launch; a launch that is refused for it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.jobs.checkpoints import apply_default_checkpoints
from broker.state.store import Store
from broker.task.loader import load_tasks_text
from broker.types import JobStatus
from tests.cli.conftest import Shell
from tests.testbed.ec2 import FakeAws
from tests.testbed.ec2_account import Account
from tests.testbed.sts import SECRET, FakeStore, serve_store

LAUNCHES = ("ec2:RunInstances", "ec2:CreateFleet")
TASK = """\
resources: {infra: aws/us-east-1, instance_type: g5.xlarge}
checkpoint: {to: s3://testbed/runs}
run: python -m trainers.lm
"""


@pytest.fixture
def account(shell: Shell, tmp_path: Path) -> Iterator[Account]:
    account = Account(clock=SystemClock())
    aws = FakeAws(account)
    shell.environment |= aws.environment
    shell.home.mkdir()
    (shell.home / "aws.toml").write_text('ssh_from = ["203.0.113.7/32"]\nregions = ["us-east-1"]\n')
    yield account
    aws.close()


@pytest.fixture
def store(shell: Shell, account: Account) -> Iterator[FakeStore]:
    with serve_store() as served:
        shell.environment |= {
            **served.variables, "AWS_ENDPOINT_URL": shell.environment["AWS_ENDPOINT_URL"],
            "AWS_ENDPOINT_URL_STS": served.url, "AWS_ENDPOINT_URL_S3": served.url, "AWS_ENDPOINT_URL_IAM": served.url,
        }  # fmt: skip
        yield served


@pytest.mark.parametrize("verb", [("launch", "-c", "c"), ("jobs", "launch")], ids=["launch", "jobs"])
def test_launch_whose_nodes_could_not_reach_the_bucket_is_refused_before_money_is_spent(
    shell: Shell, account: Account, store: FakeStore, verb: tuple[str, ...]
) -> None:
    store.arn = "arn:aws:sts::123456789012:assumed-role/AWSReservedSSO_Developer/me"
    store.forbidden = {"CreateUser"}
    done = shell.run(*verb, shell.write("t.yaml", TASK), "--yes", code=5)
    assert "nodes on aws would have no access to `s3://testbed/runs/" in done.stderr
    for way in ("bucket_role", "instance_profile", "secrets: {AWS_ACCESS_KEY_ID"):
        assert way in done.stderr
    assert not [action for action, _, _ in account.calls if action in LAUNCHES]
    assert shell.read_json("jobs", "queue") == [] and shell.read_json("status")["clusters"] == []


def test_retry_is_refused_like_the_launch_where_no_credentials_can_work(
    shell: Shell, account: Account, store: FakeStore
) -> None:
    (task,) = load_tasks_text(TASK, "t.yaml")
    memory = Store(shell.home / "state.db", clock=SystemClock())
    job = memory.jobs.add("train", *apply_default_checkpoints([task], None))
    memory.jobs.set_status(job.id, JobStatus.FAILED, "`run` exited with code 1")
    memory.close()
    store.arn = "arn:aws:sts::123456789012:assumed-role/AWSReservedSSO_Developer/me"
    store.forbidden = {"CreateUser"}
    done = shell.run("jobs", "retry", "1", "--detach-run", "--yes", code=5)
    assert "nodes on aws would have no access to `s3://testbed/runs/" in done.stderr and "bucket_role" in done.stderr
    assert [each["id"] for each in shell.read_json("jobs", "queue", "--all")] == [1]
    assert not [action for action, _, _ in account.calls if action in LAUNCHES]


def test_retry_asks_for_the_price_as_a_launch_does(shell: Shell, account: Account, store: FakeStore) -> None:
    (task,) = load_tasks_text(TASK, "t.yaml")
    memory = Store(shell.home / "state.db", clock=SystemClock())
    job = memory.jobs.add("train", *apply_default_checkpoints([task], None))
    memory.jobs.set_status(job.id, JobStatus.FAILED, "`run` exited with code 1")
    memory.close()
    asked = shell.run("jobs", "retry", "1", "--detach-run", code=2).stderr
    assert "Start again at " in asked and "USD/h?" in asked and "confirm with `--yes`" in asked
    assert [each["id"] for each in shell.read_json("jobs", "queue", "--all")] == [1]
    assert not [action for action, _, _ in account.calls if action in LAUNCHES]


def test_user_reads_what_nodes_may_do_before_the_price_is_confirmed(
    shell: Shell, account: Account, store: FakeStore
) -> None:
    account.fail("RunInstances", "VcpuLimitExceeded", times=9)
    account.fail("CreateFleet", "VcpuLimitExceeded", times=9)
    done = shell.run("launch", "-c", "c", shell.write("t.yaml", TASK), "--yes", code=5)
    assert "nodes get access to s3://testbed/runs/" in done.stderr and "by your IAM user `me`" in done.stderr
    assert "session-secret" not in done.stdout + done.stderr and SECRET not in done.stdout + done.stderr


def test_gc_deletes_the_user_that_reached_the_bucket_with_the_last_cluster(
    shell: Shell, account: Account, store: FakeStore
) -> None:
    store.arn = "arn:aws:sts::123456789012:assumed-role/AWSReservedSSO_Admin/me"
    account.fail("RunInstances", "VcpuLimitExceeded", times=9)
    account.fail("CreateFleet", "VcpuLimitExceeded", times=9)
    done = shell.run("launch", "-c", "c", shell.write("t.yaml", TASK), "--yes", code=5)
    assert "by the IAM user `broker-" in done.stderr and len(store.users) == 1
    shell.run("gc", "--dryrun")
    assert len(store.users) == 1
    assert "deleted 1 bucket access account" in shell.run("gc").stderr
    assert not store.users and not list((shell.home / "access").glob("*.json"))
