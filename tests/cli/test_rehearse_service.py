"""Rehearsals of services on the command line: real replicas and a real balancer on simulated clouds."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Shell

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")

TASK = f"""\
name: web
resources: {{infra: aws/us-east-1, cpus: 2+, use_spot: true, ports: 8000}}
service: {{readiness_probe: /health, replicas: 2}}
run: exec {sys.executable} -m tests.serve.stand_in --port $BROKER_REPLICA_PORT
"""
BROKEN = TASK.replace("run: exec", "run: echo no model at /models && exit 3; exec")


@pytest.mark.long
def test_a_service_whose_replicas_are_preempted_together_is_ready_again_and_leaves_nothing(shell: Shell) -> None:
    """Without `availability`, both replicas are in the cheapest zone, which takes both."""
    target = shell.folder / "report.html"
    shown = shell.run("rehearse", shell.write("web.yaml", TASK), "--for", "20m", "--html", str(target)).stdout
    for line in (
        "* service: started the balancer",
        "* replica 2: the program was started",
        "preempts all nodes without notice",
        "* replica 1: preempted: node 0 gone",
        "* replica 2: preempted: node 0 gone",
        "          status  READY",
        "        replicas  2 wanted",
        "     preemptions  1; ",
        "   lost replicas  2; ready again after at most ",
        "           ready  2 or more ",
        "  simulated bill  ",
        "ok  recovery: 1 preemption took 2 replicas; as many as before were ready again",
        "!   availability: 2 or more replicas were ready ",
        "ok  teardown: no machine, process or balancer was left",
    ):
        assert line in shown, f"{line!r} in\n{shown}"
    assert all(len(line) <= 80 for line in shown[shown.index("          status  ") :].splitlines())
    page = target.read_text()
    assert "Rehearsal of service web" in page and "<caption>Findings</caption>" in page
    assert not shell.find_processes()
    assert not list(shell.folder.glob("broker-rehearsal-*")), "its state folder has gone with it"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_service_as_data_with_a_warning(shell: Shell) -> None:
    done = shell.run("rehearse", shell.write("web.yaml", TASK), "--for", "20m", "--notice", "1", "--json")
    found = json.loads(done.stdout)
    uptime, requests = found["uptime"], found["requests"]
    assert found["preemptions"] == found["forced_preemptions"] == found["notices"] == 1
    assert [each["loss"]["replicas"] for each in uptime["recoveries"]] == [[1, 2]]
    assert all(each["recovery_s"] > 0 for each in uptime["recoveries"])
    assert 0 < uptime["shares"]["2"] <= uptime["shares"]["1"] < 1 and uptime["served_s"] >= 1200
    assert requests["answered"] > 0
    assert requests["sent"] == requests["answered"] + requests["late"] + sum(requests["failures"].values())
    assert found["places"][0] != found["places"][-1], "a place that took machines away has none left"
    assert 0 < found["paid_usd"] < found["ondemand_usd"]
    assert found["left"] == {"machines": 0, "processes": 0, "has_balancer": False}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_service_without_replicas_starts_one_for_a_request(shell: Shell) -> None:
    policy = "replica_policy: {min_replicas: 0, max_replicas: 1, target_requests_in_flight_per_replica: 4}"
    done = shell.run("rehearse", shell.write("web.yaml", TASK.replace("replicas: 2", policy)), "--for", "20m")
    assert "* service: scaled to 1" in done.stdout and "replica 1 is ready" in done.stdout
    assert "Cannot connect" not in done.stdout, "the first request is sent once the balancer listens"
    assert not shell.find_processes()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_service_whose_program_ends_is_reported(shell: Shell) -> None:
    done = shell.run("rehearse", shell.write("web.yaml", BROKEN), code=1)
    assert "BAD start: not all replicas became ready: `run` exited with code 3" in done.stdout
    assert "!   log: the last line of a replica's log is `no model at /models`" in done.stdout
    assert "-> fix the cause that the replica's log names" in done.stdout and "hint:" not in done.stderr
    assert not shell.find_processes()


@pytest.mark.long
@pytest.mark.slow
def test_an_interrupted_rehearsal_of_a_service_leaves_nothing_running(shell: Shell) -> None:
    process = shell.open("rehearse", shell.write("web.yaml", TASK))
    assert process.stdout is not None
    assert any("is ready" in line for line in iter(process.stdout.readline, ""))
    assert shell.find_processes("broker balancer") and shell.find_processes("stand_in")
    process.send_signal(signal.SIGINT)
    shown, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "interrupted: terminating the nodes" in shown
    assert not shell.find_processes()
    assert not list(shell.folder.glob("broker-rehearsal-*")), "its state folder has gone with it"


@pytest.mark.parametrize(
    ("options", "task", "message"),
    [
        (("--verify",), TASK, "`--verify` compares losses, which a service does not have"),
        (("--for", "soon"), TASK, "`--for` must be a duration like"),
        (("--for", "1h"), "name: count\nrun: sleep 1\n", "`--for` is available for services only"),
        ((), TASK.replace(", ports: 8000", ""), "the task names no port for its replicas"),
    ],
)
def test_options_that_do_not_fit_are_refused(shell: Shell, options: tuple[str, ...], task: str, message: str) -> None:
    assert message in shell.run("rehearse", shell.write("web.yaml", task), *options, code=2).stderr


@pytest.mark.long
@pytest.mark.slow
def test_service_over_grpc_is_called_until_it_ends(shell: Shell) -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed: `pip install grpcio`")
    run = f"run: exec {sys.executable} -m tests.serve.grpc_stand_in --port $BROKER_REPLICA_PORT\n"
    service = "service: {protocol: grpc, replicas: 2}\n"
    head = "name: web\nresources: {infra: aws/us-east-1, cpus: 2+, use_spot: true, ports: 8000}\n"
    done = shell.run("rehearse", shell.write("web.yaml", head + service + run), "--for", "20m", "--json")
    assert json.loads(done.stdout)["requests"]["answered"] > 0
    assert "no requests are sent" not in done.stderr
