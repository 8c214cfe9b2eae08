"""Broker's commands on a cluster: launch, jobs that survive evictions, and what is left afterwards."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from broker.types import JobStatus
from tests.cli.conftest import Shell, shell
from tests.clouds.kubernetes.api_server import ApiServer
from tests.clouds.kubernetes.cluster import Json, find_root

__all__ = ["shell"]

pytestmark = pytest.mark.long
STORY_S_MAX = 900.0  # training processes import torch for many seconds on a busy machine
STEPS = 40
HELD = Path(__file__).parents[2] / "trainers/held"
HELD_AT = 6  # after this step the run waits for the test, or it could end before
TRAIN = f"""\
name: train
num_nodes: NODES
resources: {{infra: k8s/test, cpus: 1+, memory: 1+}}
checkpoint: {{to: SHARED}}
run: |
  while [ ! -e SHARED/go ]; do sleep 0.1; done
  export PYTHONPATH={HELD}:$PYTHONPATH HELD_AT={HELD_AT} HELD_UNTIL=SHARED/released
  {sys.executable} -m trainers.lm --strategy ddp --train.steps {STEPS} --checkpoint.every_steps 4
"""
HELLO = """\
resources: {infra: kubernetes, cpus: 1+}
envs: {GREETING: hello}
secrets: {KEY: not-for-the-api}
run: |
  echo "$GREETING from $SKYPILOT_NODE_IPS with ${#KEY} letters"
"""


def wait_until(is_so: Callable[[], bool], describe: Callable[[], str]) -> None:
    end_s = time.monotonic() + STORY_S_MAX
    while not is_so():
        assert time.monotonic() < end_s, describe()
        time.sleep(0.05)


def prepare(server: ApiServer, shell: Shell, text: str = "") -> None:
    """Make the cloud native, with two nodes of 4 vCPUs."""
    for index in range(2):
        server.cluster.add_node(f"n{index}", cpu="4", memory="16Gi")
    shell.environment |= {
        "KUBECONFIG": str(server.kubeconfig), "KUBECACHEDIR": str(server.folder / "cache"), "BROKER_OFFLINE": "1",
    }  # fmt: skip
    shell.home.mkdir(exist_ok=True)
    (shell.home / "kubernetes.yaml").write_text(text)
    shell.run("check", "kubernetes")


def submit(shell: Shell, folder: Path, *, node_count: int = 1) -> int:
    folder.mkdir(exist_ok=True)
    task = TRAIN.replace("SHARED", str(folder)).replace("NODES", str(node_count))
    shell.run("jobs", "launch", shell.write("task.yaml", task), "--yes", "--detach-run")
    with shell.open_store() as store:
        return max(job.id for job in store.jobs.list())


def read_losses(shell: Shell, job_id: int) -> list[tuple[int, str]]:
    log = shell.run("jobs", "logs", str(job_id)).stdout
    return [(int(found[1]), found[2]) for found in re.finditer(rf"^step (\d+)/{STEPS}  (loss \S+)", log, re.M)]


def list_live(server: ApiServer) -> list[Json]:
    return [pod for pod in server.cluster.list("ml") if pod["status"]["phase"] not in ("Succeeded", "Failed")]


def test_task_runs_in_a_pod_and_nothing_is_left(server: ApiServer, shell: Shell) -> None:
    prepare(server, shell)
    done = shell.run("launch", shell.write("task.yaml", HELLO), "--yes", "--cluster", "one")
    assert re.search(r"hello from 127\.77\.\S+ with 15 letters", done.stdout), done.stdout
    (pod,) = list_live(server)
    assert "not-for-the-api" not in json.dumps(server.cluster.list()), "secrets reach the node through exec only"
    shell.run("exec", "one", "echo again > ~/note")
    assert "one" in shell.run("status").stdout
    shell.run("down", "one", "--yes")
    assert not list_live(server)
    assert not (find_root() / pod["metadata"]["name"]).exists()
    shell.run("gc")
    assert not server.cluster.list("ml"), "records of ended pods are swept"


def test_job_whose_pod_is_evicted_resumes_bit_identically(server: ApiServer, shell: Shell, tmp_path: Path) -> None:
    prepare(server, shell, "test: {usd_hour: 0.5}\n")

    def describe() -> str:
        return f"{shell.run('jobs', 'events', '1').stdout}\n{shell.run('jobs', 'logs', '1', code=None).stdout}"

    job_id = submit(shell, tmp_path / "shared", node_count=2)
    wait_until(lambda: shell.get_status(job_id) is JobStatus.RUNNING, describe)
    gang = list_live(server)
    assert len(gang) == 2
    (tmp_path / "shared" / "go").touch()
    wait_until(lambda: any((tmp_path / "shared").rglob("manifest.json")), describe)
    server.cluster.evict(gang[1]["metadata"]["name"], grace_s=0)
    wait_until(
        lambda: gang[1]["metadata"]["name"] not in {pod["metadata"]["name"] for pod in list_live(server)}, describe
    )
    (tmp_path / "shared" / "released").touch()
    wait_until(lambda: shell.get_status(job_id).is_terminal, describe)
    assert shell.get_status(job_id) is JobStatus.SUCCEEDED, describe()
    assert "recovered at step" in shell.run("jobs", "events", str(job_id)).stdout
    again = submit(shell, tmp_path / "shared", node_count=2)
    wait_until(lambda: shell.get_status(again).is_terminal, describe)
    cut, whole = read_losses(shell, job_id), read_losses(shell, again)
    assert [step for step, _ in whole] == list(range(1, STEPS + 1))
    assert set(cut) == set(whole), "a repeated step comes to the same loss"
    repeated = sum(new <= old for (old, _), (new, _) in pairwise(cut))
    print(f"steps logged {len(cut)}, restarts in the log {repeated}")
    wait_until(lambda: not list_live(server), describe)


@pytest.mark.exhaustive
def test_job_survives_the_daemon(server: ApiServer, shell: Shell, tmp_path: Path) -> None:
    prepare(server, shell)
    job_id = submit(shell, tmp_path / "shared")
    wait_until(lambda: shell.get_status(job_id) is JobStatus.RUNNING, lambda: shell.run("jobs", "events", "1").stdout)
    names = {pod["metadata"]["name"] for pod in list_live(server)}
    shell.kill_daemon()
    (tmp_path / "shared" / "released").touch()
    (tmp_path / "shared" / "go").touch()
    shell.wait_for_jobs()
    assert shell.get_status(job_id) is JobStatus.SUCCEEDED
    assert {pod["metadata"]["name"] for pod in server.cluster.list("ml")} <= names, "its pod was adopted"
    wait_until(lambda: not list_live(server), lambda: "the daemon ends the pods of an ended job")


def test_lost_answer_to_a_create_makes_one_pod(server: ApiServer, shell: Shell) -> None:
    prepare(server, shell)
    server.is_answer_lost = True
    shell.run("launch", shell.write("task.yaml", HELLO), "--yes", "--cluster", "one")
    assert not server.is_answer_lost
    assert len(list_live(server)) == 1
    shell.run("down", "one", "--yes")


def test_forbidden_namespace_is_explained(server: ApiServer, shell: Shell) -> None:
    prepare(server, shell)
    server.denied.add(("ml", "pods"))
    done = shell.run("launch", shell.write("task.yaml", HELLO), "--yes", "--cluster", "one", code=None)
    assert done.returncode, done.stdout
    assert 'cannot access "pods" in the namespace "ml"' in done.stderr
    check = shell.run("check", "kubernetes", code=None)
    assert "broker check --policy kubernetes" in check.stdout + check.stderr
    server.denied.clear()
