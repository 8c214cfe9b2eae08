"""The variables of a run's program that depend on its node."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.agent import FOLDER

MakeEnvs = Callable[..., dict[str, str]]


@pytest.fixture
def make_envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEnvs:
    monkeypatch.syspath_prepend(str(FOLDER))  # as on a node: siblings by bare names
    module = importlib.import_module("agent_environment")
    monkeypatch.setattr(module.agent_access, "read_envs", lambda _: {})

    def make(ip: str, *, gpus: float = 0.0) -> dict[str, str]:
        spec = {
            "run_id": 1, "node_ips": [ip], "gpus_per_node": gpus, "rank": 0, "num_nodes": 1, "secrets": {},
            "head": {"master_port": 2000}, "envs": {},
        }  # fmt: skip
        found: dict[str, str] = module.make_envs(spec, tmp_path, mark="MARK=1", held=None, container=None)
        return found

    return make


def test_program_on_a_machine_without_gpus_may_use_all_its_cores(
    make_envs: MakeEnvs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP, and with it numpy, torch and `nproc`, would otherwise use one core of a machine that is paid for."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in make_envs("10.0.0.1")
    assert make_envs("127.0.0.2")["OMP_NUM_THREADS"] == "1", "nodes of the local cloud share one machine"
    assert "OMP_NUM_THREADS" not in make_envs("127.0.0.2", gpus=1.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert make_envs("127.0.0.2")["OMP_NUM_THREADS"] == "2"
