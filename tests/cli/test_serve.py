"""Services on the command line: real daemon, balancer and replicas, kill -9."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT, Shell
from tests.signals import signal_all

pytestmark = [
    pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc"),
    pytest.mark.slow,
]

PROGRAM = """\
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = (os.environ["TEXT"] + " " + os.environ["SKYPILOT_SERVE_REPLICA_ID"]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["BROKER_REPLICA_PORT"])), Handler).serve_forever()
"""
TASK = """\
name: web
resources: {{cpus: 1+, infra: local, use_spot: true}}
service: {{readiness_probe: /, replicas: 2}}
envs: {{TEXT: {text}}}
run: exec {python} {program}
"""


def write_task(shell: Shell, text: str) -> str:
    program = shell.write("server.py", PROGRAM)
    return shell.write(f"{text}.yaml", TASK.format(text=text, python=sys.executable, program=program))


def ask(url: str) -> str:
    with urllib.request.urlopen(url, timeout=300) as response:
        return str(response.read().decode())


def list_replicas(shell: Shell, status: str = "READY") -> list[Any]:
    (service,) = shell.read_json("serve", "status")
    return [each["replica"] for each in service["replicas"] if each["status"] == status]


def start(shell: Shell) -> str:
    """Bring the service up; return its URL."""
    shell.run("serve", "up", write_task(shell, "one"), "-y", "--wait")
    shell.wait_until(lambda: len(list_replicas(shell)) == 2, "both replicas are ready")
    return "http://" + shell.read_json("serve", "status")[0]["endpoint"]


def preempt(shell: Shell, job_id: int) -> None:
    with shell.open_store() as store:
        job = store.jobs.get(job_id)
        assert job is not None
        cluster = job.attempts[-1].cluster
    shell.run("local", "preempt", cluster)


def test_service_survives_daemon_balancer_and_replicas_and_leaves_nothing(shell: Shell) -> None:
    url = start(shell)
    assert ask(url).startswith("one ")
    shell.kill_daemon()
    assert ask(url).startswith("one ")  # the balancer needs no daemon
    (balancer,) = shell.find_processes("broker balancer")
    os.kill(balancer, signal.SIGKILL)
    shell.wait_until(lambda: balancer not in shell.find_processes("broker balancer"), "the balancer is dead")
    shell.run("serve", "status")  # starts the daemon, which starts the balancer
    shell.wait_until(lambda: bool(shell.find_processes("broker balancer")), "another balancer")
    shell.wait_until(lambda: len(list_replicas(shell)) == 2, "the replicas are the same")
    first, second = list_replicas(shell)
    assert (first["number"], second["number"]) == (1, 2)
    preempt(shell, first["job_id"])
    assert {ask(url) for _ in range(10)} <= {"one 1", "one 2"}
    shell.wait_until(lambda: len(list_replicas(shell)) == 2, "the preempted replica is back")
    told = shell.run("serve", "why", "web").stdout
    assert "Service web is READY" in told and "replica 1 is ready" in told
    assert "unknown service" in shell.run("serve", "down", "other", "-y", code=2).stderr
    shell.run("serve", "down", "web", "-y")
    assert shell.read_json("serve", "status") == []
    assert not shell.find_processes("broker balancer") and not list((shell.home / "serve").iterdir())
    assert shell.is_at_rest()


@pytest.mark.long
def test_update_under_load_fails_no_request(shell: Shell) -> None:
    url = start(shell)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        is_updated = False
        shell.run("serve", "update", "web", write_task(shell, "two"), "-y")
        while not is_updated:
            answers = [each.result() for each in [pool.submit(ask, url) for _ in range(10)]]
            assert all(each.split()[0] in ("one", "two") for each in answers)
            (service,) = shell.read_json("serve", "status")
            is_updated = [each["replica"]["version"] for each in service["replicas"]] == [2, 2]
    assert ask(url).startswith("two ")
    shell.run("serve", "down", "--all", "-y")


def test_task_that_cannot_be_served_is_refused_before_anything_starts(shell: Shell) -> None:
    path = shell.write("plain.yaml", "resources: {infra: local}\nrun: echo\n")
    assert "has no `service:`" in shell.run("serve", "up", path, "-y", code=2).stderr
    path = shell.write("pool.yaml", "resources: {infra: local}\npool: {workers: 1}\nrun: echo\n")
    assert "worker pools are not supported" in shell.run("serve", "up", path, "-y", code=2).stderr
    assert "exists" not in shell.run("serve", "status").stdout


# The bundled engine: streams that are identical whatever is killed.

TOKENS = 1900  # about a second even on a fast machine, so that the kill comes in the middle
ENGINE = """\
name: lm
resources: {{cpus: 1+, infra: local}}
service: {{readiness_probe: /health, replicas: 2}}
run: exec {python} -m trainers.serve --checkpoint {checkpoint} --host 127.0.0.1
"""


def read_stream(url: str, prompt: str, count: int) -> str:
    fields = {"prompt": prompt, "max_tokens": count, "stream": True, "ignore_eos": True, "temperature": 0.7, "seed": 3}
    request = urllib.request.Request(
        f"{url}/v1/completions", data=json.dumps(fields).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        events = [line[6:] for line in response.read().decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1])


@pytest.mark.long
def test_streams_of_a_trained_model_survive_kills_and_are_identical(shell: Shell) -> None:
    checkpoint = shell.folder / "checkpoints"
    environment = {**shell.environment, "BROKER_CHECKPOINT_DIR": str(checkpoint)}
    command = [sys.executable, "-m", "trainers.lm", "--train.steps", "2", "--train.batch", "2", "--model.depth", "2"]
    command += ["--model.width", "32", "--model.context", "2048"]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True)
    path = shell.write("lm.yaml", ENGINE.format(python=sys.executable, checkpoint=checkpoint))
    # Without a limit, as two engines import torch.
    assert shell.open("serve", "up", path, "-y", "--wait").wait() == 0
    while len(list_replicas(shell)) != 2:
        time.sleep(0.2)
    url = "http://" + shell.read_json("serve", "status")[0]["endpoint"]
    undisturbed = read_stream(url, "abc", TOKENS)
    resumed = 0
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        while not resumed:  # on a busy machine, the streams may end before the kill
            shell.wait_until(lambda: len(list_replicas(shell)) == 2, "both replicas are ready")
            streams = [pool.submit(read_stream, url, "abc", TOKENS) for _ in range(4)]
            while sum(list_in_flight(shell).values()) != 4 and not all(each.done() for each in streams):
                time.sleep(0.02)
            busiest = max(list_in_flight(shell).items(), key=lambda each: each[1])[0]
            kill_engine(shell, busiest)
            assert {each.result() for each in streams} == {undisturbed}
            load = shell.read_json("serve", "status")[0]["load"]
            assert load["broken"] == 0
            resumed = load["resumed"]
    shell.run("serve", "down", "--all", "-y")


def list_in_flight(shell: Shell) -> dict[str, int]:
    """Read the balancer's own report: a command would take as long as the streams."""
    (path,) = shell.home.glob("serve/*/load.json")
    return {number: each["in_flight"] for number, each in json.loads(path.read_text())["replicas"].items()}


def kill_engine(shell: Shell, number: str) -> None:
    """Send kill -9 to the program of one replica."""
    mark = f"SKYPILOT_SERVE_REPLICA_ID={number}\0".encode()
    pids = [pid for pid in shell.find_processes("trainers.serve") if mark in Path(f"/proc/{pid}/environ").read_bytes()]
    assert pids
    signal_all(pids)


@pytest.mark.long
def test_pipeline_trains_exports_and_serves_what_it_trained(shell: Shell) -> None:
    path = ROOT / "task_templates/serving/train_and_serve.yaml"
    tiny = "--model.width 32 --model.context 32 --train.steps 4 --checkpoint.every_steps 4"
    shell.run("serve", "up", str(path), "--env", f"MODEL={tiny}", "-y")
    while (status := shell.read_json("serve", "status")[0]["status"]) != "READY":  # imports of torch take their time
        assert status == "STARTING", shell.run("serve", "why", "lm").stdout
        time.sleep(1)
    assert [shell.get_status(job_id).value for job_id in (1, 2)] == ["SUCCEEDED", "SUCCEEDED"]
    url = "http://" + shell.read_json("serve", "status")[0]["endpoint"]
    body = json.dumps({"prompt": "a", "max_tokens": 4, "ignore_eos": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body), timeout=300) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 4
    shell.run("serve", "down", "lm", "-y")


@pytest.mark.long
def test_replicas_of_a_pipeline_whose_job_fails_do_not_start(shell: Shell) -> None:
    failing = "name: train\nresources: {infra: local}\nrun: exit 3\n---\n"
    text = TASK.format(text="one", python=sys.executable, program=shell.write("server.py", PROGRAM))
    shell.run("serve", "up", shell.write("both.yaml", failing + text), "-y")
    shell.wait_until(lambda: shell.read_json("serve", "status")[0]["status"] == "FAILED", "the service is given up")
    assert "FAILED" in shell.run("serve", "why", "web").stdout
    assert not any(each["usd_hour"] for each in shell.read_json("serve", "status")[0]["replicas"])
    shell.run("serve", "down", "web", "-y")
