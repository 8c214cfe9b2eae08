"""kill -9 of broker at each call that changes an account: before it takes effect, and before its answer arrives.

Each phase counts its calls from zero, so that a launch, a replacement and a termination are each interrupted at every
call. Clients of a service read streams meanwhile.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.types import JobStatus
from tests.signals import signal_all
from tests.testbed.ec2_server import HangUp
from tests.testbed.gce import LostAnswer
from tests.testbed.metadata import MetadataServer
from tests.testbed.stage import HELLO, PLACES, Stage, open_stage
from tests.testbed.test_service import PAUSE_S, STREAMS, count_ready, read_all_along, until

READING = ("Describe", "Get", "List", "AssumeRole")
SERVICE = f"""\
name: web
resources:
  use_spot: true
{PLACES}
service:
  readiness_probe: {{path: /health, timeout_seconds: 2}}
  replicas: 2
  ports: 8080
run: exec /usr/bin/python3 FOLDER/engine.py {PAUSE_S}
"""
JOB = f"""\
name: wait
num_nodes: 2
resources:
  use_spot: true
{PLACES}
run: while [ ! -e FOLDER/enough ]; do sleep 0.2; done
"""


class CallKiller:
    """Kills a process of broker at the first call of each kind in a phase, before and after the call's effect."""

    def __init__(self, stage: Stage, *, target: str = "broker daemon") -> None:
        self._stage, self._target = stage, target
        self._done: set[tuple[str, bool]] = set()
        self.kills: list[str] = []
        stage.aws.on_call = self._kill_in_aws
        stage.gce.on_call = self._kill_in_google

    def begin_phase(self) -> None:
        self._done.clear()

    def _kill_in_aws(self, action: str, is_after: bool) -> None:
        if not action.partition(":")[2].startswith(READING) and self._kill(action, is_after):
            raise HangUp

    def _kill_in_google(self, action: str, is_after: bool) -> None:
        is_reading = action.startswith("GET") or action.endswith(("wait", ":testIamPermissions"))
        if not is_reading and self._kill(action, is_after):
            raise LostAnswer

    def _kill(self, action: str, is_after: bool) -> bool:
        targets = self._stage.find_processes(self._target)
        if (action, is_after) in self._done or not targets:
            return False
        self._done.add((action, is_after))
        self.kills.append(f"{'after' if is_after else 'before'} {action}")
        signal_all(targets)
        return True


@pytest.fixture
def stage(tmp_path: Path, metadata: MetadataServer, shared: Path) -> Iterator[Stage]:
    with open_stage(tmp_path, metadata, shared=[shared]) as stage:
        settings = stage.home / "aws.toml"
        settings.write_text(f"{settings.read_text()}uses_private_addresses = true\n")
        yield stage


def wait_until(stage: Stage, is_so: Callable[[], bool], what: str) -> None:
    """Wait; a command brings a killed daemon back, as a user's next command or a supervisor does."""

    def check() -> bool:
        if not stage.find_processes("broker daemon"):
            stage.run("status", code=None)
        return is_so()

    stage.wait_until(check, what)


def list_machines(stage: Stage) -> list[str]:
    """List the machines that the clouds bill."""
    with stage.aws.lock:
        own = [each.id for each in stage.account.instances.values() if each.state in ("pending", "running")]
    return own + [name for name in stage.list_living() if name not in stage.account.instances]


async def preempt_under_streams(stage: Stage, url: str, killer: CallKiller) -> None:
    """Preempt a replica while clients read; return once it is replaced, with every stream whole."""
    async with read_all_along(url) as (tally, errors):
        await until(lambda: tally.ended >= STREAMS)
        killer.begin_phase()
        lost = list_machines(stage)[0]
        stage.bridge.preempt(lost, notice_s=2)
        await asyncio.to_thread(wait_until, stage, lambda: lost not in list_machines(stage), "a replica is preempted")
        await asyncio.to_thread(wait_until, stage, lambda: count_ready(stage) == 2, "both replicas are ready again")
    assert (tally.broken, tally.different, errors) == (0, 0, [])


@pytest.mark.parametrize("cloud", ["aws", pytest.param("gcp", marks=pytest.mark.exhaustive)])
def test_job_outlives_a_kill_at_every_call(stage: Stage, shared: Path, cloud: str) -> None:
    if cloud == "gcp":
        stage.account.full |= {(zone, "m5.large") for zone in ("us-east-1a", "us-east-1b", "us-west-2a")}
    killer = CallKiller(stage)
    stage.run("jobs", "launch", stage.write("job.yaml", JOB.replace("FOLDER", str(shared))), "--yes", "--detach-run")
    wait_until(stage, lambda: stage.get_status(1) is JobStatus.RUNNING, "the job runs")
    killer.begin_phase()
    lost = stage.list_by_rank()[0].rpartition("/")[2]
    stage.bridge.preempt(lost, notice_s=1)
    wait_until(stage, lambda: lost not in list_machines(stage), "a machine is preempted")
    wait_until(stage, lambda: stage.get_status(1) is JobStatus.RECOVERING, "the job recovers")
    wait_until(stage, lambda: stage.get_status(1) is JobStatus.RUNNING, "the job runs again")
    wait_until(stage, lambda: len(list_machines(stage)) == 2, "the gang's machines are the only ones")
    killer.begin_phase()
    (shared / "enough").touch()
    wait_until(stage, lambda: stage.get_status(1) is JobStatus.SUCCEEDED, "the job succeeds")
    wait_until(stage, lambda: not list_machines(stage), "nothing is left")
    wait_until(stage, stage.is_at_rest, "broker is at rest")
    print(f"{len(killer.kills)} kills: {', '.join(killer.kills)}")
    assert len(killer.kills) >= 6


def test_service_outlives_a_kill_at_every_call_and_answers_throughout(stage: Stage, shared: Path) -> None:
    engine = shared / "engine.py"
    shutil.copy(Path(__file__).with_name("engine.py"), engine)
    engine.chmod(0o644)
    killer = CallKiller(stage)
    stage.run("serve", "up", stage.write("web.yaml", SERVICE.replace("FOLDER", str(shared))), "-y")
    wait_until(stage, lambda: count_ready(stage) == 2, "both replicas are ready")
    wait_until(stage, lambda: len(list_machines(stage)) == 2, "the replicas' machines are the only ones")
    (service,) = stage.read_json("serve", "status")
    asyncio.run(preempt_under_streams(stage, f"http://{service['endpoint']}", killer))
    wait_until(stage, lambda: len(list_machines(stage)) == 2, "the replicas' machines are the only ones again")
    killer.begin_phase()
    stage.run("serve", "down", "web", "-y", code=None)
    wait_until(stage, lambda: not list_machines(stage), "nothing is left")
    wait_until(stage, stage.is_at_rest, "broker is at rest")
    print(f"{len(killer.kills)} kills: {', '.join(killer.kills)}")
    assert len(killer.kills) >= 6


@pytest.mark.parametrize("cloud", ["aws", pytest.param("gcp", marks=pytest.mark.exhaustive)])
def test_a_command_that_is_killed_at_every_call_can_be_repeated(stage: Stage, cloud: str) -> None:
    if cloud == "gcp":
        stage.account.full |= {(zone, "m5.large") for zone in ("us-east-1a", "us-east-1b", "us-west-2a")}
    task = stage.write("hello.yaml", HELLO)
    launches = CallKiller(stage, target="broker launch")
    while stage.run("launch", task, "-c", "dev", "--yes", code=None).returncode:
        assert launches.kills and len(launches.kills) < 40, launches.kills
    wait_until(stage, lambda: len(list_machines(stage)) == 2, "the cluster's machines are the only ones")
    downs = CallKiller(stage, target="broker down")
    while stage.read_json("status")["clusters"]:
        stage.run("down", "dev", "--yes", code=None)
        assert len(downs.kills) < 40, downs.kills
    assert not list_machines(stage) and stage.is_at_rest()
    print(f"{launches.kills} {downs.kills}")
    assert len(launches.kills) >= 4 and len(downs.kills) >= 2


@pytest.mark.exhaustive
def test_a_server_is_set_up_and_removed_although_each_command_is_killed_at_every_call(stage: Stage) -> None:
    ups = CallKiller(stage, target="broker server up")
    place = ("--infra", "aws/us-east-1", "--python", sys.executable, "--yes", "--login")
    while stage.run("server", "up", *place, code=None).returncode:
        assert len(stage.account.calls) < 1000
    assert stage.read_json("server", "status")["is_running"] and len(list_machines(stage)) == 1
    downs = CallKiller(stage, target="broker server down")
    while stage.run("server", "down", code=None).returncode:
        assert len(stage.account.calls) < 2000
    assert not list_machines(stage)
    assert set(stage.account.roles) == set(stage.account.profiles) == {"reader"}
    assert len(ups.kills) >= 10 and len(downs.kills) >= 5
