"""Gateways on the command line: real daemon, machines, balancers and replicas, kill -9."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Shell
from tests.cli.test_serve import PROGRAM, ask, preempt

pytestmark = [
    pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc"),
    pytest.mark.long,
]

TASK = """\
name: web
resources: {{cpus: 1+, infra: local}}
service: {{readiness_probe: /, replicas: 1, gateway: {gateway}}}
envs: {{TEXT: {text}}}
run: exec {python} {program}
"""


def write_task(shell: Shell, text: str = "one", gateway: str = "{infra: local, count: 2}") -> str:
    program = shell.write("server.py", PROGRAM)
    return shell.write(f"{text}.yaml", TASK.format(text=text, gateway=gateway, python=sys.executable, program=program))


def list_gateways(shell: Shell, status: str = "READY") -> list[Any]:
    (service,) = shell.read_json("serve", "status")
    return [each for each in service["gateways"] if each["status"] == status]


def find_balancers(shell: Shell, gateway: dict[str, Any]) -> list[int]:
    """Return the balancer processes of a gateway, by the home folder of its machine."""
    with shell.open_store() as store:
        job = store.jobs.get(gateway["job_id"])
        assert job is not None
        cluster = store.clusters.get(job.attempts[-1].cluster)
    assert cluster is not None
    home = cluster.nodes[0].handle
    return [
        pid for pid in shell.find_processes("broker balancer")
        if f"HOME={home}" in Path(f"/proc/{pid}/environ").read_text()
    ]  # fmt: skip


def answers(url: str, text: str) -> bool:
    """Return whether a balancer listens there and passes on an answer that begins with this text."""
    try:
        return ask(url).startswith(text)
    except (urllib.error.URLError, OSError):
        return False


def count_attempts(shell: Shell, job_id: int) -> int:
    with shell.open_store() as store:
        return len(store.jobs.list_attempts(job_id))


class Client:
    """Asks a URL over and over, until it is stopped; counts answers and failures."""

    def __init__(self, url: str) -> None:
        self.answers, self.failures = 0, list[str]()
        self._url, self._is_over = url, threading.Event()

    def run(self) -> None:
        while not self._is_over.is_set():
            try:
                ask(self._url)
                self.answers += 1
            except (urllib.error.URLError, OSError) as error:
                self.failures.append(str(error))

    def stop(self) -> None:
        self._is_over.set()


def test_one_gateway_serves_while_the_other_is_killed_restarted_lost_and_replaced(shell: Shell) -> None:
    shell.run("serve", "up", write_task(shell), "-y", "--wait")
    shell.wait_until(lambda: len(list_gateways(shell)) == 2, "both gateways serve")
    first, second = list_gateways(shell)
    assert first["endpoint"] != second["endpoint"]
    assert ask(f"http://{first['endpoint']}").startswith("one ")
    assert "GATEWAY" in shell.run("serve", "status").stdout
    client = Client(f"http://{second['endpoint']}")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client.run)
        try:
            (balancer,) = find_balancers(shell, first)
            os.kill(balancer, signal.SIGKILL)
            shell.wait_until(
                lambda: bool(set(find_balancers(shell, first)) - {balancer}), "the balancer is started again"
            )
            shell.wait_until(lambda: answers(f"http://{first['endpoint']}", "one "), "it answers again")
            shell.kill_daemon()
            assert ask(f"http://{first['endpoint']}").startswith("one ")
            shell.run("serve", "status")  # starts the daemon
            preempt(shell, first["job_id"])
            shell.wait_until(
                lambda: count_attempts(shell, first["job_id"]) == 2 and len(list_gateways(shell)) == 2,
                "the machine is replaced",
            )
            shell.wait_until(lambda: answers(f"http://{first['endpoint']}", "one "), "the new machine answers")
        finally:
            client.stop()
        asking.result()
    assert client.failures == [] and client.answers > 0
    shell.run("serve", "update", "web", write_task(shell, "two"), "-y")
    shell.wait_until(lambda: ask(f"http://{second['endpoint']}").startswith("two "), "the update is served")
    assert [each["job_id"] for each in list_gateways(shell)][1] == second["job_id"]
    shell.run("serve", "down", "web", "-y")
    assert shell.read_json("serve", "status") == []
    assert not shell.find_processes("broker balancer") and not list((shell.home / "serve").iterdir())
    assert shell.is_at_rest()
