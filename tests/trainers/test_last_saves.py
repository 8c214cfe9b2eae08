"""The save at a preemption notice and that of the last step are tried even after too many saves have failed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.trainers.test_checkpoint import ALONE, Counter
from tests.trainers.test_reference_results import FullDisk
from trainers.checkpoint import FAILURES_MAX, CheckpointManager, find_newest
from trainers.config import EvaluateConfig, LogConfig, RunConfig, TrainConfig
from trainers.elastic import Elastic
from trainers.errors import CheckpointError
from trainers.gc_control import GcControl
from trainers.loop import DeviceReading, StepReport
from trainers.metrics import Meter, MetricFiles
from trainers.preemption import EXIT_CODE_PREEMPTED
from trainers.progress import Progress
from trainers.supervisor import Supervisor
from trainers.watchdog import Watchdog

# pytest resets the filter that the module sets for itself.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STEP = FAILURES_MAX + 1


@pytest.fixture
def disk(tmp_path: Path) -> FullDisk:
    """A disk that is full during the first saves."""
    return FullDisk(tmp_path / "checkpoints", set(range(1, STEP)))


@pytest.fixture
def checkpoints(disk: FullDisk) -> CheckpointManager:
    """Checkpoints of which as many saves have failed as end a run."""
    manager = CheckpointManager(disk, ALONE, attempt=1, keep=3, shared={"counter": Counter()}, own={})
    for step in range(1, STEP):
        manager.save(step)
        manager.wait_for_copy()
    return manager


def drive(checkpoints: CheckpointManager, folder: Path, *, steps: int, is_stop_asked: bool) -> tuple[int, str]:
    """Take `STEP`, which no save interval includes; return the exit code and the lines of progress."""
    idle: Any = SimpleNamespace(is_due=lambda step: False, step=lambda: None, stop=lambda: None)
    config = RunConfig(
        train=TrainConfig(steps=steps), log=LogConfig(every_steps=0), evaluate=EvaluateConfig(every_steps=STEP)
    )
    supervisor = Supervisor(
        config=config,
        checkpoints=checkpoints,
        pacer=idle,
        progress=Progress(folder / "progress.jsonl", total=steps, is_silent=False),
        files=MetricFiles(config.log, attempt=1, is_silent=True),
        meter=Meter(units_per_sample=1, flops_per_sample=0.0, peak_flops=None, ranks=1),
        evaluation=cast(Any, SimpleNamespace(run=lambda: 0.0)),
        profile=idle,
        watchdog=Watchdog(0.0),
        ranks=ALONE,
        node_times=cast(Any, None),
    )
    reading = DeviceReading(loss=1.0, norm=1.0, skipped_steps=(), is_stop_asked=is_stop_asked)
    # Without entering the control, which would collect the garbage of the whole test run.
    code = supervisor._drive(iter([StepReport(step=STEP, learning_rate=0.1, reading=reading)]), GcControl())
    return code, (folder / "progress.jsonl").read_text()


def find_step(disk: FullDisk) -> int | None:
    newest = find_newest(disk)
    return None if newest is None else newest[0].step


def test_notice_after_too_many_failed_saves_still_saves(
    disk: FullDisk, checkpoints: CheckpointManager, tmp_path: Path
) -> None:
    code, lines = drive(checkpoints, tmp_path, steps=STEP + 1, is_stop_asked=True)
    assert (code, find_step(disk)) == (EXIT_CODE_PREEMPTED, STEP)
    assert "preempted, checkpoint committed" in lines


def test_notice_is_followed_by_a_save_without_an_evaluation(checkpoints: CheckpointManager, tmp_path: Path) -> None:
    """It may take longer than the machine has left."""
    evaluated = '"validation_loss": 0.0'
    assert evaluated not in drive(checkpoints, tmp_path, steps=STEP + 1, is_stop_asked=True)[1]
    assert evaluated in drive(checkpoints, tmp_path, steps=STEP, is_stop_asked=True)[1], "the last step is evaluated"


def test_notice_exits_as_preempted_where_that_save_fails_as_well(
    disk: FullDisk, checkpoints: CheckpointManager, tmp_path: Path
) -> None:
    disk.refused.add(STEP)
    code, lines = drive(checkpoints, tmp_path, steps=STEP + 1, is_stop_asked=True)
    assert (code, find_step(disk)) == (EXIT_CODE_PREEMPTED, None)
    assert "preempted, checkpoint not made" in lines


def test_last_step_is_saved_after_too_many_failed_saves(
    disk: FullDisk, checkpoints: CheckpointManager, tmp_path: Path
) -> None:
    assert drive(checkpoints, tmp_path, steps=STEP, is_stop_asked=False)[0] == 0
    assert find_step(disk) == STEP


def test_run_whose_last_step_is_not_saved_fails(disk: FullDisk, checkpoints: CheckpointManager, tmp_path: Path) -> None:
    disk.refused.add(STEP)
    with pytest.raises(CheckpointError, match="no space left"):
        drive(checkpoints, tmp_path, steps=STEP, is_stop_asked=False)


@pytest.mark.parametrize("is_refused", [False, True])
def test_leaving_rank_leaves_whether_or_not_the_state_was_saved(
    disk: FullDisk, checkpoints: CheckpointManager, capsys: pytest.CaptureFixture[str], *, is_refused: bool
) -> None:
    """It would otherwise exit with code 1, which ends the whole run as failed."""
    if is_refused:
        disk.refused.add(STEP)
    member: Any = SimpleNamespace(vote=lambda *, is_leaving: "go", world=SimpleNamespace(rank=0))
    elastic = Elastic(member=member, notice=cast(Any, SimpleNamespace(is_given=lambda: True)), is_kept=False)
    assert elastic.decide(checkpoints, STEP) == "go"
    assert find_step(disk) == (None if is_refused else STEP)
    assert ("no space left; the ranks that stay resume" in capsys.readouterr().err) == is_refused
