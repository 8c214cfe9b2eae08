"""A slow node of a bundled trainer is named: its ranks report the time of their own work."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Shell

TASK = """
name: uneven
num_nodes: 2
resources: {infra: local}
run: python %s/uneven.py --strategy ddp --train.steps 100000 --train.batch 4 --train.micro_batch 2
"""
PROGRAM = """
import os, time
import torch
from trainers import train

class Uneven(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.busy_s = 0.2 if os.environ["SKYPILOT_NODE_RANK"] == "1" else 0.02

    def forward(self, inputs):
        end_s = time.thread_time() + self.busy_s
        while time.thread_time() < end_s:
            pass
        return self.layer(inputs)

if __name__ == "__main__":
    samples = [(torch.full((4,), index / 64), torch.ones(1)) for index in range(64)]
    train(model=Uneven, samples=samples, loss=torch.nn.functional.mse_loss)
"""


@pytest.mark.long
@pytest.mark.slow
def test_why_names_the_node_whose_rank_is_slow(shell: Shell) -> None:
    """Both nodes take each step in the same time, as the fast one waits for the gradients of the slow one."""
    shell.write("uneven.py", PROGRAM)
    shell.run("jobs", "launch", shell.write("task.yaml", TASK % shell.folder), "--yes", "--detach-run")
    shell.wait_until(lambda: " is slow: " in shell.run("jobs", "events", "1").stdout, "a node is called slow")
    (said,) = [line for line in shell.run("jobs", "why", "1").stdout.splitlines() if " is slow: " in line]
    assert "node 1 (" in said and "s on the others" in said
    shell.run("jobs", "cancel", "1")
    shell.wait_for_jobs()
