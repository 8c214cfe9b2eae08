"""Services over gRPC, HAProxy and inference routers on the command line: real daemon, balancer, replicas, kill -9."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.types import BalancerType
from tests.cli.conftest import Shell
from tests.cli.test_serve import PROGRAM, ask, list_replicas
from tests.serve.stands import needs_haproxy, with_router
from tests.signals import signal_all

pytestmark = [
    pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc"),
    pytest.mark.long,
]

TASK = """\
name: web
resources: {{cpus: 1+, infra: local}}
service: {{replicas: 2, {service}}}
run: exec {python} {program}
"""
HAPROXY = "haproxy -W"
ROUTERS = ("smg::router", "vllm::router")
# What routers ask of engines: the list of models, and `/v1/embeddings`, whose answer names the replica.
ENGINE = """\
import http.server, json, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"object": "list", "data": [{"id": "m", "object": "model"}]})
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        name = os.environ["TEXT"] + " " + os.environ["SKYPILOT_SERVE_REPLICA_ID"]
        self.answer({"object": "list", "data": [], "model": name})
    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["BROKER_REPLICA_PORT"])), Handler).serve_forever()
"""
GRPC_PROGRAM = "-m tests.serve.grpc_stand_in --port $BROKER_REPLICA_PORT"


def kill_program(shell: Shell, word: str, number: int) -> None:
    """Send kill -9 to the program of one replica; its node and its entrance stay."""
    mark = f"SKYPILOT_SERVE_REPLICA_ID={number}\0".encode()
    pids = [
        pid for pid, command in shell.find_processes(word).items()
        if mark in Path(f"/proc/{pid}/environ").read_bytes() and command.startswith(sys.executable)
    ]  # fmt: skip
    assert pids
    signal_all(pids)
    # Until then, the kernel may accept a connection for it, which is reset.
    shell.wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the program has ended")


def live_through(
    shell: Shell, *, write: Callable[[str], str], call: Callable[[str], str], word: str, is_haproxy: bool = False
) -> None:
    """Bring a service up, kill a replica, update the service and take it down.

    `write` makes a task whose answers begin with a text, `call` sends one request to an endpoint, and `word` is in the
    command line of each replica.
    """
    shell.run("serve", "up", write("one"), "-y", "--wait")
    shell.wait_until(lambda: len(list_replicas(shell)) == 2, "both replicas are ready")
    endpoint = shell.read_json("serve", "status")[0]["endpoint"]
    shell.wait_until(lambda: {call(endpoint) for _ in range(10)} == {"one 1", "one 2"}, "both replicas answer")
    assert bool(shell.find_processes(HAPROXY)) is is_haproxy
    kill_program(shell, word, 1)
    assert {call(endpoint) for _ in range(10)} == {"one 2"}  # none fails, and none meets the dead one
    shell.wait_until(lambda: len(list_replicas(shell)) == 2, "a replica has taken its place")
    shell.wait_until(lambda: len({call(endpoint) for _ in range(10)}) == 2, "it answers")
    shell.run("serve", "update", "web", write("two"), "-y")
    shell.wait_until(
        lambda: [each["version"] for each in list_replicas(shell)] == [2, 2] and call(endpoint).startswith("two "),
        "both replicas are replaced",
    )
    assert {call(endpoint).partition(" ")[0] for _ in range(10)} == {"two"}
    shell.run("serve", "down", "web")  # in a pipe, nothing is asked
    assert shell.read_json("serve", "status") == []
    assert not any(shell.find_processes(each) for each in ("broker balancer", HAPROXY, *ROUTERS, word))
    assert not list((shell.home / "serve").iterdir()) and shell.is_at_rest()


def test_service_over_grpc_lives_through_a_kill_and_an_update(shell: Shell) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed: `pip install grpcio`")
    from tests.serve.grpc_stand_in import SAY

    def write(text: str) -> str:
        program = f'{GRPC_PROGRAM} --name "{text} $SKYPILOT_SERVE_REPLICA_ID"'
        return shell.write(
            f"{text}.yaml", TASK.format(service="protocol: grpc", python=sys.executable, program=program)
        )

    def call(endpoint: str) -> str:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]  # a connection of its own
        with grpc.insecure_channel(endpoint, options=options) as channel:
            answer: bytes = channel.unary_unary(SAY)(b"x", timeout=300)
        return answer.decode().removesuffix(" x")

    live_through(shell, write=write, call=call, word="grpc_stand_in")


@needs_haproxy
def test_service_behind_haproxy_lives_through_a_kill_and_an_update(shell: Shell) -> None:
    def write(text: str) -> str:
        task = TASK.format(
            service="readiness_probe: /, balancer: {type: haproxy}",
            python=sys.executable,
            program=f"{shell.write('server.py', PROGRAM)}\nenvs: {{TEXT: {text}}}",
        )
        return shell.write(f"{text}.yaml", task)

    live_through(
        shell, write=write, call=lambda endpoint: ask(f"http://{endpoint}/"), word="server.py", is_haproxy=True
    )


@with_router
def test_service_behind_an_inference_router_lives_through_a_kill_and_an_update(
    kind: BalancerType, shell: Shell
) -> None:
    def write(text: str) -> str:
        task = TASK.format(
            service=f"readiness_probe: /, balancer: {{type: {kind}}}, load_balancing_policy: round_robin",
            python=sys.executable,
            program=f"{shell.write('server.py', ENGINE)}\nenvs: {{TEXT: {text}}}",
        )
        return shell.write(f"{text}.yaml", task)

    def call(endpoint: str) -> str:
        request = urllib.request.Request(
            f"http://{endpoint}/v1/embeddings",
            json.dumps({"model": "m", "input": "x"}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return str(json.load(response)["model"])

    live_through(shell, write=write, call=call, word="server.py")
