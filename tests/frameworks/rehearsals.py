"""Run the program of a template that needs GPUs on CPUs, killed and preempted; see `cpu_stand_in.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.conftest import ROOT
from tests.frameworks.beds import StuckError
from tests.frameworks.registry import GpuTemplate

STEPS, SAVE_STEPS, RANKS = 16, 4, 4
WAIT_S_MAX = 900.0  # far more than required
POLL_S = 0.1


class Run:
    """One start of all ranks by torchrun, as an attempt of a job would start them."""

    def __init__(self, template: GpuTemplate, python: Path, folder: Path, attempt: int) -> None:
        self.place = folder
        self.notice = folder / f"notice-{attempt}"
        self.progress = folder / f"progress-{attempt}"
        self.log = folder / f"log-{attempt}"
        folder.mkdir(exist_ok=True)
        variables = {
            "STEPS": str(STEPS),
            "SAVE_STEPS": str(SAVE_STEPS),
            "OMP_NUM_THREADS": "1",
            "BROKER_ATTEMPT": str(attempt),
            "BROKER_CHECKPOINT_DIR": str(folder / "checkpoints"),
            "BROKER_PREEMPTION_FILE": str(self.notice),
            "BROKER_PROGRESS_FILE": str(self.progress),
            **template.envs,
        }
        words = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        words += ["-m", "tests.frameworks.cpu_stand_in", f"trainers.frameworks.{template.program}", *template.flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env={**os.environ, **variables}, stdout=log, stderr=log, start_new_session=True
            )

    def read(self) -> list[dict[str, Any]]:
        content = self.progress.read_text() if self.progress.exists() else ""
        return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait. Raises StuckError if all ranks end first, or after the limit."""
        end_s = time.monotonic() + WAIT_S_MAX
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > end_s:
                if is_so():
                    return
                self.end()
                raise StuckError(f"{what}: did not happen\n" + "\n".join(self.log.read_text().splitlines()[-60:]))
            time.sleep(POLL_S)

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: any(line["step"] >= step for line in self.read()), f"step {step}")

    def kill_rank(self, rank: int) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in map(int, children):
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
                return
        raise StuckError(f"no process of rank {rank} below {self.process.pid}")

    def await_end(self) -> int:
        self.wait(lambda: self.process.poll() is not None, "the end")
        return self.process.returncode

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def rehearse(template: GpuTemplate, python: Path, folder: Path) -> dict[str, Any]:
    """Return the row of the table. Raises StuckError, or AssertionError where a bar is missed."""
    killed = Run(template, python, folder / "disturbed", 1)
    killed.wait_for_step(SAVE_STEPS + 2)
    killed.kill_rank(RANKS - 1)
    assert killed.await_end() != 0
    noticed = Run(template, python, folder / "disturbed", 2)
    noticed.wait_for_step(SAVE_STEPS * 2 + 1)
    noticed.notice.touch()
    assert noticed.await_end() != 0
    last = Run(template, python, folder / "disturbed", 3)
    assert last.await_end() == 0, last.log.read_text()[-4000:]
    whole = Run(template, python, folder / "whole", 1)
    assert whole.await_end() == 0, whole.log.read_text()[-4000:]
    lost = [
        before.read()[-1]["step"] + 1 - after.read()[0]["step"]
        for before, after in ((killed, noticed), (noticed, last))
    ]
    assert 0 <= lost[0] <= SAVE_STEPS, lost
    assert lost[1] == 0, f"a notice lost {lost[1]} steps"
    results = [json.loads((folder / name / "checkpoints/result.json").read_text()) for name in ("disturbed", "whole")]
    losses = [line["loss"] for line in whole.read()]
    return {
        "lost_steps": lost,
        "is_identical": results[0]["weights_sha256"] == results[1]["weights_sha256"],
        "losses": [losses[0], losses[-1]],
    }
