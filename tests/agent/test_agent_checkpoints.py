"""Checkpoints that the agent observes after a program has failed, and folders that it cannot or must not list."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from local_gang import Rig, make_task

from broker.agent import agent_checkpoints
from broker.runtime.reports import GangReport
from broker.types import ObservedCheckpoints, RunStatus
from tests.tiers import spread

OLD_S, NEW_S = 1_000_000.0, 2_000_000.0
SLEEP = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)")


def save(folder: Path, *paths: str) -> None:
    """Write files, each newer than the one before."""
    for number, path in enumerate(paths):
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("weights")
        os.utime(file, (OLD_S + number, OLD_S + number))


@pytest.mark.parametrize(
    ("paths", "number", "unnumbered_s", "time_s"),
    spread(
        [
        (("checkpoint-500/model.safetensors", "checkpoint-1500/model.safetensors"), 1500, 0.0, OLD_S + 1),  # HF Trainer
        (("lightning_logs/version_1/checkpoints/epoch=3-step=200.ckpt",), 200, 0.0, OLD_S),
        (("epoch=3-step=200.ckpt", "last.ckpt"), 200, OLD_S + 1, OLD_S + 1),
        (("snapshot.pt",), 0, OLD_S, OLD_S),
        (("iter_0000100/mp_rank_00/model_optim_rng.pt",), 100, 0.0, OLD_S),  # Megatron
        (("global_step70/mp_rank_00_model_states.pt", "global_step80/mp_rank_00_model_states.pt"), 80, 0.0, OLD_S + 1),
        (("step-9/__0_0.distcp", "step-9/__1_0.distcp"), 9, 0.0, OLD_S),
        (("model_epoch_12.pth",), 12, 0.0, OLD_S),
        (("epoch_1/step_100.pt", "epoch_1/step_200.pt", "epoch_1/step_300.pt"), 300, 0.0, OLD_S + 2),
        (("checkpoint-20261128/model.pt", "run-7/model.pt"), 0, OLD_S + 1, OLD_S + 1),  # a date is not a step
        ],
        every=3,
    ),
)  # fmt: skip
def test_checkpoints_are_known_by_their_numbers_and_times(
    tmp_path: Path, paths: tuple[str, ...], number: int, unnumbered_s: float, time_s: float
) -> None:
    save(tmp_path, *paths)
    found = agent_checkpoints.observe(str(tmp_path))
    assert found is not None and (found["number"], found["unnumbered_s"]) == (number, unnumbered_s)
    assert OLD_S <= found["time_s"] <= time_s, "one file of each numbered folder is enough"


def test_number_is_that_of_the_file_and_not_of_a_folder_above() -> None:
    assert agent_checkpoints.read_number("step2_sft/step-400.pt") == 400


def test_highest_number_and_newest_time_count_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [("step-3.pt", 5.0), ("step-9.pt", 2.0), ("step-4.pt", 1.0)]
    for files in (listed, listed[::-1]):
        monkeypatch.setattr(agent_checkpoints, "list_files", lambda folder, files=files: iter(files))
        assert agent_checkpoints.observe("/x") == {"number": 9, "unnumbered_s": 0.0, "time_s": 5.0}


def test_files_of_a_mere_start_are_no_checkpoints(tmp_path: Path) -> None:
    """A program that fails at once leaves logs, its configuration, and empty or unfinished files."""
    save(tmp_path, "runs/Nov28_host/events.out.tfevents.1", "train.log", "config-step-1.json", "checkpoint-7/args.json")
    save(tmp_path, "tmp-checkpoint-500/model.safetensors", ".cache/base.pt", "model.pt.incomplete")
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "model.pt").touch()
    (tmp_path / "latest").symlink_to("checkpoint-9")
    assert agent_checkpoints.observe(str(tmp_path)) is None


def test_large_trees_are_not_listed_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "a/b/c/step-1.pt", "a/b/c/d/step-2.pt")
    found = agent_checkpoints.observe(str(tmp_path))
    assert found is not None and found["number"] == 1, "the second one is too deep"
    monkeypatch.setattr(agent_checkpoints, "ENTRIES_MAX", 3)
    with pytest.raises(ValueError, match="too many entries"):
        agent_checkpoints.observe(str(tmp_path))


@pytest.mark.parametrize("place", ["", "s3://bucket/job-1", "relative/folder"])
def test_buckets_and_unknown_folders_are_not_observed(place: str) -> None:
    assert agent_checkpoints.find_checkpoints({"BROKER_CHECKPOINT_DIR": place}) is None


@pytest.mark.parametrize("program", ["/missing", "/bin/false", "/bin/pwd"])
def test_listing_that_fails_is_the_same_as_no_checkpoints(program: str) -> None:
    assert agent_checkpoints.find_checkpoints({"BROKER_CHECKPOINT_DIR": "/"}, program=[program]) is None


def test_folder_that_hangs_does_not_stall_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends a process that waits for a hung mount, so it is killed but not awaited."""
    started: list[subprocess.Popen[bytes]] = []
    killed: list[int] = []

    class Unkillable(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[call-overload]
            started.append(self)

        def kill(self) -> None:
            killed.append(self.pid)

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None, "it would wait as long as the mount hangs"
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Unkillable)
    envs = {"BROKER_CHECKPOINT_DIR": f"file://{tmp_path}"}
    assert agent_checkpoints.find_checkpoints(envs, program=SLEEP, limit_s=0.05) is None
    assert killed == [started[0].pid] and started[0].poll() is None, "the agent went on while it hung"
    os.kill(started[0].pid, signal.SIGKILL)
    started[0].communicate(timeout=600.0)


def test_head_reports_the_checkpoints_of_a_program_that_failed(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "saved"

    async def main() -> tuple[GangReport, GangReport]:
        cluster = await rig.make_cluster()
        envs = {"BROKER_CHECKPOINT_DIR": str(folder)}
        script = 'mkdir "$BROKER_CHECKPOINT_DIR/checkpoint-3"; echo x >"$BROKER_CHECKPOINT_DIR/checkpoint-3/model.pt"'
        await rig.start(cluster, make_task("exit 3", envs=envs), run_id=1)
        empty = await rig.finish(cluster, run_id=1)
        await rig.start(cluster, make_task(f"{script}; exit 3", envs=envs), run_id=2)
        return empty, await rig.finish(cluster, run_id=2)

    empty, report = asyncio.run(main())
    assert (empty.status, empty.checkpoints) == (RunStatus.FAILED, None)
    saved_s = (folder / "checkpoint-3/model.pt").stat().st_mtime
    assert (report.status, report.returncode, report.progress) == (RunStatus.FAILED, 3, None)
    assert report.checkpoints == ObservedCheckpoints(number=3, unnumbered_s=0.0, time_s=saved_s)
