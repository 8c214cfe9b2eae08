"""`broker advise --serve`: options for a load, a task file that can be served, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.app.advising_serve import read_s
from broker.app.service_checks import check_service
from broker.errors import UsageError
from broker.task.loader import load_tasks
from tests.cli.conftest import Shell

LOAD = ("advise", "--serve", "--params", "8B", "--rps", "20", "--ttft", "0.5s", "--tpot", "50ms")


def test_options_meet_the_latency_and_the_task_can_be_served(shell: Shell) -> None:
    path = shell.folder / "llm.yaml"
    found = json.loads(shell.run(*LOAD, "--yaml", str(path), "--json").stdout)
    assert found["options"] == sorted(found["options"], key=lambda each: each["usd_per_million_tokens"])
    for each in found["options"]:
        assert each["ttft_s"] <= 0.5 and each["tpot_s"] <= 0.05
        assert each["rps_per_replica"] * each["replicas"] >= 20
        assert each["placement"]["availability"] >= 0.99
    (task,) = load_tasks(path)
    assert check_service(task).policy.replicas_min == found["options"][0]["replicas"]


def test_impossible_latency_is_refused_with_a_hint(shell: Shell) -> None:
    told = shell.run("advise", "--serve", "--params", "70B", "--tpot", "1ms", code=None)
    assert told.returncode and "no GPU can serve this load" in told.stderr and "--tpot" in told.stderr


def test_options_of_training_are_refused(shell: Shell) -> None:
    told = shell.run(*LOAD, "--deadline", "24h", "--hour-value", "0", "--dtype", "fp16", code=2).stderr
    assert "`--dtype`, `--deadline`, `--hour-value` cannot be used with `--serve`" in told


def test_options_of_serving_are_refused_without_it(shell: Shell) -> None:
    told = shell.run("advise", "--params", "7B", "--tokens", "1B", "--rps", "5", "--kv-heads", "4", code=2).stderr
    assert "`--rps`, `--kv-heads` can only be used with `--serve`" in told


def test_latency_is_read_with_its_unit(tmp_path: Path) -> None:
    assert (read_s("50ms", "--tpot"), read_s("0.5s", "--ttft"), read_s(None, "--ttft")) == (0.05, 0.5, None)
    with pytest.raises(UsageError, match="invalid time `5`"):
        read_s("5", "--ttft")
