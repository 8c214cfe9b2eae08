"""Fuzz targets of the program on a node: requests on its stdin, and its files on a damaged disk.

Each runs in a home folder of its own; processes it would start are recorded and not started.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from broker.agent import agent as _agent_package
from tests.fuzz.registry import Target

sys.path.append(str(Path(_agent_package.__file__).parent))  # as on a node, where the files find each other by name
import agent
import agent_dead_runs
import agent_files

sys.path.pop()

VERBS = ("submit", "status", "cancel", "lease", "autostop", "log")
# Exceptions that an invalid request may raise: the verb ends with a trace on the caller's stderr.
REFUSALS = (ValueError, KeyError, TypeError, AssertionError, AttributeError, IndexError, OverflowError, RecursionError)
# The agent waits for its files to be on the disk: memory spares most of an input's time.
_HOME = Path(tempfile.mkdtemp(prefix="fuzz-node-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
_SPEC = {
    "run_id": 1, "rank": 1, "num_nodes": 2, "node_ips": ["127.0.0.1", "127.0.0.2"], "gpus_per_node": 0, "name": "t",
    "setup": None, "run": "true", "envs": {}, "secrets": {}, "image": None, "lease_s": 900,
    "head": {"address": "127.0.0.1", "coordinator_port": 1, "master_port": 2, "credential": "pem"},
}  # fmt: skip
FILES = {
    "runs/1/spec.json": json.dumps(_SPEC),
    "runs/1/state.json": json.dumps({"status": "RUNNING", "started_s": 1.0}),
    "runs/1/outcome.json": json.dumps(
        {"status": "FAILED", "returncode": 1, "reason": "x", "ended_s": 2.0, "own_returncode": 1}
    ),
    "runs/1/progress.jsonl": '{"step": 1, "total": 2}\n',
    "runs/1/log": "line\n",
    "lease.json": json.dumps({"expires_s": 1e12, "boot": "b"}),
    "autostop.json": json.dumps({"idle_minutes": 5.0, "is_down": True, "set_s": 1.0, "boot": "b"}),
    "node.json": json.dumps({"power_off": "file", "notices": None}),
    "preemption": json.dumps({"notice_s": 30}),
    "image.json": json.dumps({"image": "x"}),
}


def reset() -> None:
    shutil.rmtree(_HOME, ignore_errors=True)
    for name, text in FILES.items():
        path = _HOME / ".broker" / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text.replace('"b"', json.dumps(agent_files.read_boot())))
    for module in (agent_files, agent.files):
        module.HOME, module.STATE, module.RUNS = _HOME, _HOME / ".broker", _HOME / ".broker" / "runs"


def start_nothing(*_: Any, **__: Any) -> None:
    """Replace a process that would outlive the input."""


def call(verb: str, stdin: bytes) -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    old, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    starter, agent.start_detached = agent.start_detached, start_nothing
    try:
        with contextlib.redirect_stdout(out):
            agent.main(verb)
    finally:
        sys.stdin, agent.start_detached = old, starter
    out.seek(0)
    return out.buffer.read().decode("utf-8", "replace")


def fuzz_agent(data: bytes) -> None:
    """Check that the agent writes only below its own folder and answers the next correct request."""
    reset()
    verb = VERBS[(data[0] if data else 0) % len(VERBS)]
    before = set(_HOME.iterdir())
    try:
        call(verb, data[1:])
    except REFUSALS:
        pass
    assert set(_HOME.iterdir()) == before, "it wrote beside its folder"
    answer = json.loads(call("status", b"{}"))
    assert 1 in [each["id"] for each in answer["runs"]]
    assert call("log", b'{"run_id": 1, "offset": 0}') == "line\n"
    assert agent.decide_power_off() in ("", "lease", "autostop", "stop")


def fuzz_files(data: bytes) -> None:
    """Damage one file: the node still answers, still judges its end, and knows that a dead run is dead."""
    reset()
    name = list(FILES)[(data[0] if data else 0) % len(FILES)]
    (_HOME / ".broker" / name).write_bytes(data[1:])
    call("status", b"{}")
    call("log", b'{"run_id": 1, "offset": 0}')
    assert agent.decide_power_off() in ("", "lease", "autostop", "stop")
    starter, agent_dead_runs.kill_marked = agent_dead_runs.kill_marked, start_nothing
    try:
        agent_dead_runs.end_if_dead(1)
    finally:
        agent_dead_runs.kill_marked = starter
    with contextlib.suppress(*(REFUSALS if name == "runs/1/spec.json" else ())):  # a run that cannot be continued
        call("submit", json.dumps(_SPEC).encode())
    call("autostop", b'{"idle_minutes": 1, "is_down": true}')


FUZZ_TARGETS: dict[str, Target] = {"agent": fuzz_agent, "agent-files": fuzz_files}
SEEDS = {
    "agent": [bytes([verb]) + json.dumps(request).encode() for verb, request in (
        (0, {**_SPEC, "run_id": 2}), (1, {"run_id": 1}), (2, {"run_id": 1}), (3, {"lease_s": 900}),
        (4, {"idle_minutes": 5, "is_down": True}), (4, {"idle_minutes": None}), (5, {"run_id": 1, "offset": 2}),
    )],
    "agent-files": [
        *[bytes([place]) + text.encode() for place, text in enumerate(FILES.values())],
        # Found once: files of the right form with values of another kind, of this boot.
        *[bytes([place]) + json.dumps({**value, "boot": agent_files.read_boot()}).encode() for place, value in (
            (5, {"expires_s": "x"}), (5, {}), (5, {"until_s": []}), (6, {"set_s": "x"}), (6, {}), (0, {"notice_s": 30}),
        )],
    ],
}  # fmt: skip
