"""Runs that request a fraction of an accelerator share one, in `broker exec` and `broker queue`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.state.store import Store
from tests.cli.conftest import Shell

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")

LONG = "resources: {accelerators: 't4:0.5'}\nrun: 'echo begun; sleep 600'\n"


@pytest.mark.long
def test_exec_runs_halves_in_parallel_and_queue_shows_waiting_runs(shell: Shell) -> None:
    shell.run("launch", shell.write("none.yaml", "resources: {infra: local}\nsetup: 'true'\n"), "-c", "c")
    store = Store(shell.home / "state.db", clock=SystemClock())
    cluster = store.clusters.get("c")
    assert cluster is not None
    offer = replace(cluster.placement.offer, accelerator="T4", accelerator_count=1)  # simulated: no accelerator is used
    store.clusters.put(replace(cluster, placement=replace(cluster.placement, offer=offer)))
    store.close()

    path = shell.write("half.yaml", LONG)
    for _ in range(3):
        shell.run("exec", "c", path, "--detach-run")
    shell.wait_until(
        lambda: [run["status"] for run in shell.read_json("queue", "c")][1:] == ["RUNNING", "RUNNING", "PENDING"],
        "two run and the third waits",
    )
    table = shell.run("queue", "c").stdout.splitlines()
    assert "ACCELERATORS" in table[0] and "T4:0.5" in table[1] and "PENDING" in table[1]

    refused = shell.run("exec", "c", path, "--gpus", "A100:8", code=2)
    assert "requests A100:8" in refused.stderr and "have T4:1" in refused.stderr
    shell.run("cancel", "c", "2")
    shell.wait_until(lambda: shell.read_json("queue", "c")[3]["status"] == "RUNNING", "the third has its turn")
