"""The whole story at the command line: broker, real daemons and real ssh over fake AWS and fake Google, real hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from broker.types import JobStatus
from tests.contents import read_all
from tests.testbed.metadata import MetadataServer
from tests.testbed.s3 import BUCKET
from tests.testbed.stage import BUCKET_LOGIN, CANARY, HELLO, TRAIN, Stage, open_stage

HELD = Path(__file__).parents[1] / "trainers/held"


@pytest.fixture
def stage(tmp_path: Path, metadata: MetadataServer) -> Iterator[Stage]:
    with open_stage(tmp_path, metadata) as stage:
        yield stage


def test_launch_runs_a_gang_on_spot_machines_and_down_leaves_nothing(stage: Stage) -> None:
    done = stage.run("launch", stage.write("hello.yaml", HELLO), "-c", "dev", "--yes")
    names = sorted(each.id for each in stage.account.instances.values())
    hellos = [line for line in done.stdout.splitlines() if "hello from" in line]
    assert sorted(line.split("hello from ")[1].split()[0] for line in hellos) == names
    assert {each.is_spot for each in stage.account.instances.values()} == {True}
    assert stage.run("ssh", "dev-1", "--", "hostname").stdout.strip() in names
    refused = stage.run("autostop", "dev", "-i", "1", code=2).stderr
    assert "cannot stop themselves" in refused and "--down" in refused
    stage.run("autostop", "dev", "-i", "0", "--down")
    stage.wait_until(lambda: not stage.list_living(), "an idle cluster ends by itself")
    stage.run("down", "dev", "--yes")
    assert stage.list_living() == set()
    assert stage.read_json("status")["clusters"] == []


def test_training_moves_between_regions_and_clouds_and_continues_from_its_bucket(stage: Stage) -> None:
    # The first two attempts wait for their preemption at step 40, however late it comes.
    hold = f"if [ $BROKER_ATTEMPT -lt 3 ]; then export PYTHONPATH={HELD} HELD_AT=40 HELD_UNTIL=/never; fi"
    task = stage.write("train.yaml", TRAIN.replace("run: |\n", f"run: |\n  {hold}\n"))
    stage.account.full.add(("us-east-1b", "m5.large"))
    stage.run("jobs", "launch", task, *BUCKET_LOGIN, "--yes", "--detach-run")
    stage.wait_for_step(3)
    stage.account.full.add(("us-east-1a", "m5.large"))
    first = stage.list_by_rank()
    for name in first:  # no node is left to speak for the gang
        stage.bridge.preempt(name, notice_s=2)
    stage.wait_for_step(20, attempt=2)
    stage.account.full.add(("us-west-2a", "m5.large"))
    second = stage.list_by_rank()
    stage.bridge.preempt(second[1], notice_s=0)
    job = stage.finish()
    assert job.status is JobStatus.SUCCEEDED, stage.describe()
    zones = [attempt.placement.offer.zone for attempt in job.attempts]
    assert zones == ["us-east-1a", "us-west-2a", "us-central1-a"]
    events = stage.run("jobs", "events", "1").stdout
    # Two seconds suffice to save and to report it where processors are free; otherwise the list shows what was lost.
    assert "the cloud gave notice" in events or "node 0 and 1 gone" in events, events
    assert "node 1 gone" in events, events
    assert events.count("recovered at step") == 2, events
    hosts = dict(stage.bridge.hosts)
    gangs = [[hosts.pop(name) for name in names] for names in (first, second)] + [list(hosts.values())]
    for before, after in pairwise(gangs):
        assert max(host.off_s for host in before) < min(host.on_s for host in after), "no two gangs at once"
    log = stage.run("jobs", "logs", "1").stdout
    steps = [(int(found[1]), found[2]) for found in re.finditer(r"^step (\d+)/60  (loss \S+)", log, re.M)]
    numbers = [step for step, _ in steps]
    cuts = [(old, new) for old, new in pairwise(numbers) if new != old + 1]
    assert len(cuts) <= 2, "with notice no step is lost where two seconds were enough to save"
    assert all(old - new < 10 for old, new in cuts), (
        f"otherwise those since the newest checkpoint, of each fifth step: {cuts}"
    )
    # Machines that vanish at once take their last lines with them; the result of those steps is in the checkpoint.
    untold = {step for old, new in cuts[:1] for step in range(old + 1, new)}
    assert sorted({*numbers, *untold}) == list(range(1, 61)), log
    assert len(set(steps)) == 60 - len(untold), "what is done twice comes to the same loss, on another cloud too"


def test_unobserved_success_counts_after_the_machines_have_ended(stage: Stage) -> None:
    """The daemon is gone when the program ends, and the machines are gone before the next one looks."""
    task = f"""\
name: unseen
resources: {{infra: aws/us-east-1/us-east-1a, instance_type: m5.large, use_spot: true}}
checkpoint: {{to: s3://{BUCKET}/unseen}}
secrets: {{AWS_ACCESS_KEY_ID: null, AWS_SECRET_ACCESS_KEY: null}}
envs: {{AWS_ENDPOINT_URL_S3: null, AWS_REGION: us-east-1}}
run: |
  echo '{{"step": 1}}' >> $BROKER_PROGRESS_FILE
  until [ -e stop ]; do sleep 0.1; done
"""
    stage.run("jobs", "launch", stage.write("unseen.yaml", task), *BUCKET_LOGIN, "--yes", "-d")
    stage.wait_for_step(1)
    stage.kill_daemon()
    (name,) = stage.list_living()
    stage.bridge.hosts[name].execute("touch", "/home/ubuntu/sky_workdir/stop")
    assert stage.s3
    s3 = stage.s3
    stage.wait_until(
        lambda: any(key.endswith("/outcomes/1.json") for key in s3.list_keys("unseen")),
        "the head leaves word in the bucket",
    )
    stage.bridge.hosts[name].shut_down()
    stage.wait_until(lambda: not stage.list_living(), "the machine has ended itself")
    stage.run("status")  # brings a daemon back
    job = stage.finish()
    assert job.status is JobStatus.SUCCEEDED and len(job.attempts) == 1, stage.describe()


def test_secret_is_visible_only_to_the_program(stage: Stage) -> None:
    """On two clouds, a secret must be in no process list, file, log, tag, boot script or call, even after the run."""
    task = f"""\
name: quiet
resources:
  use_spot: true
  ordered:
    - {{infra: aws/us-east-1/us-east-1a, instance_type: m5.large}}
    - {{infra: gcp/us-central1/us-central1-a, instance_type: e2-standard-4}}
secrets: {{TOKEN: null}}
setup: echo set up
run: |
  test "$(printenv TOKEN | tr a-z A-Z)" = {CANARY.upper()} && echo heard
  echo "{{\\"step\\": $BROKER_ATTEMPT}}" >> $BROKER_PROGRESS_FILE
  until [ -e stop ]; do sleep 0.1; done
"""
    stage.environment["TOKEN"] = CANARY
    stage.run("jobs", "launch", stage.write("quiet.yaml", task), "--secret", "TOKEN", "--yes", "-d")
    stage.wait_for_step(1)
    (on_aws,) = stage.list_living()
    expect_quiet(stage, on_aws)
    log = stage.home / "logs" / "jobs" / "1.log"
    stage.wait_until(lambda: log.exists() and "heard" in log.read_text(), "its log is copied")
    stage.account.full.add(("us-east-1a", "m5.large"))
    stage.bridge.preempt(on_aws, notice_s=0)
    stage.wait_for_step(2, attempt=2)
    (on_gcp,) = stage.list_living()
    expect_quiet(stage, on_gcp)
    stage.bridge.hosts[on_gcp].execute("touch", "/home/ubuntu/sky_workdir/stop")
    assert stage.finish().status is JobStatus.SUCCEEDED, stage.describe()
    for command in (
        ("jobs", "events", "1"),
        ("jobs", "queue", "-o", "json"),
        ("jobs", "why", "1"),
        ("status", "--json"),
    ):
        assert CANARY not in stage.run(*command).stdout
    text = stage.run("jobs", "logs", "1").stdout
    assert text.count("heard") == 2 and CANARY not in text
    stage.wait_until(lambda: not list((stage.home / "secrets").glob("*")), "the secret is forgotten")


def expect_quiet(stage: Stage, name: str) -> None:
    """Expect the canary with the program on host `name`, in files of its user alone, and nowhere else."""
    host = stage.bridge.hosts[name]
    processes = host.execute("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
    assert "agent.py" in processes and CANARY not in processes
    ours = b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))
    assert b"broker" in ours and CANARY.encode() not in ours
    # The program's environment is private to its user, and so is what the agent keeps to start it.
    for path in host.execute("grep", "-rl", CANARY, "/home/ubuntu", "/var/log", "/run").split():
        assert host.execute("stat", "-c", "%a %U", path) == "600 ubuntu\n", path
    machines = [(each.id, each.user_data, each.tags, each.parameters) for each in stage.account.instances.values()]
    text = repr((stage.account.calls, machines, stage.gce.requests))
    assert name in text and "ssh-ed25519" in text and CANARY not in text
    for file, content in read_all(stage.home):
        if file.parent.name == "secrets":
            assert file.stat().st_mode & 0o777 == 0o600
        else:
            assert CANARY.encode() not in content, file
