"""Whole runs as real processes: killed, preempted and resumed."""

import json
import os
import random
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.testbed.s3 import BUCKET, serve_s3
from tests.tiers import long, spread
from trainers.config import parse_config
from trainers.lm import build, describe, find_conflict, main

from .conftest import TINY, TOTAL, TrainingFolder, await_step, kill_all
from .strategies.conftest import Worlds

SEED = 20261121
SMALL = ["--model.depth", "1", "--model.width", "16", "--model.heads", "2", "--model.context", "16"]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "strategy"), spread([(3, "ddp"), (1, "ddp")], every=0, more=2), ids=str)
def test_killed_run_resumes_bit_identically(worlds: Worlds, tmp_path: Path, workers: int, strategy: str) -> None:
    """Losses after kill -9 of every rank equal those of an undisturbed run to the last bit."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    whole, broken = TrainingFolder(path=tmp_path / "whole"), TrainingFolder(path=tmp_path / "broken")
    ended = whole.fork(worlds, workers=workers, strategy=strategy)
    assert ended.codes == [0] * workers, ended.errors
    step = random.Random(f"{SEED}/{workers}/{strategy}").randint(12, 45)
    print(f"seed {SEED}: kill after step {step}")
    process = broken.start(workers=workers, strategy=strategy, held_at=step)
    await_step(process, step)
    kill_all(process)
    assert process.returncode == -signal.SIGKILL
    assert max(broken.losses()) < TOTAL
    ended = broken.fork(worlds, workers=workers, strategy=strategy, attempt=2)
    assert ended.codes == [0] * workers, ended.errors
    resumed = [line for line in broken.lines() if line["event"] == "resumed"]
    assert len(resumed) == 1 and int(str(resumed[0]["step"])) > 0
    expected = {key: values[0] for key, values in whole.losses().items()}
    assert set(expected) == set(broken.losses()) == set(range(1, TOTAL + 1))
    for key, values in broken.losses().items():
        assert [each.hex() for each in values] == [expected[key].hex()] * len(values), f"step {key}"
    assert expected[TOTAL] < expected[1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_run_killed_with_its_checkpoints_in_a_bucket_resumes_bit_identically(worlds: Worlds, tmp_path: Path) -> None:
    """Two ranks under FSDP; the machine is gone and all that is left is what lies in S3."""
    flags = ("--train.steps", "20")
    with serve_s3() as server:
        folders = []
        for name in ("whole", "broken"):
            (tmp_path / name).mkdir()
            environment = server.variables | {"BROKER_CHECKPOINT_DIR": f"s3://{BUCKET}/{name}"}
            folders.append(TrainingFolder(path=tmp_path / name, environment=environment))
        whole, broken = folders
        ended = whole.fork(worlds, *flags, workers=2, strategy="fsdp")
        assert ended.codes == [0, 0], ended.errors
        ended = broken.fork(worlds, *flags, workers=2, strategy="fsdp", kill_after=13)
        assert ended.codes == [-signal.SIGKILL] * 2, ended.errors
        ended = broken.fork(worlds, *flags, workers=2, strategy="fsdp", attempt=2)
        assert ended.codes == [0, 0], ended.errors
    assert next(int(str(line["step"])) for line in broken.lines() if line["event"] == "resumed") > 0
    assert not (tmp_path / "broken" / "checkpoints").exists()
    expected = {key: values[0] for key, values in whole.losses().items()}
    assert all(set(values) == {expected[key]} for key, values in broken.losses().items())
    assert set(broken.losses()) == set(range(1, 21))


@pytest.mark.slow
@long
def test_sigterm_commits_the_current_step_and_another_world_size_continues(worlds: Worlds, tmp_path: Path) -> None:
    """Two ranks are preempted; one alone finishes with the losses of an undisturbed run, up to rounding."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    whole, broken = TrainingFolder(path=tmp_path / "whole"), TrainingFolder(path=tmp_path / "broken")
    flags = ("--model.dropout", "0", "--checkpoint.every_steps", "0")
    assert whole.fork(worlds, *flags).codes == [0]
    process = broken.start(*flags, workers=2, held_at=7)
    await_step(process, 7)
    process.terminate()
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 143, errors
    last = broken.lines()[-1]
    assert last["event"] == "preempted, checkpoint committed" and last["checkpoint_step"] == last["step"]
    assert "preempted, checkpoint committed" in output
    assert int(str(last["step"])) < TOTAL
    ended = broken.fork(worlds, *flags, attempt=2)
    assert ended.codes == [0] and "random numbers start again" in ended.errors
    steps = [int(str(line["step"])) for line in broken.lines() if line["loss"] is not None]
    assert steps == list(range(1, TOTAL + 1))  # nothing repeated, nothing left out
    expected = {key: values[0] for key, values in whole.losses().items()}
    assert {key: values[0] for key, values in broken.losses().items()} == pytest.approx(expected, abs=1e-4)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_preemption_file_commits_and_bfloat16_resumes(worlds: Worlds, folder: TrainingFolder) -> None:
    """The broker's file stops a run after one more step; without it the run finishes."""
    flags = ("--dtype", "bfloat16")
    (folder.path / "preempted").touch()
    assert folder.fork(worlds, *flags).codes == [143]
    assert folder.lines()[-1]["checkpoint_step"] == 1
    (folder.path / "preempted").unlink()
    assert folder.fork(worlds, *flags, attempt=2).codes == [0]
    assert sorted(folder.losses()) == list(range(1, TOTAL + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every_s", "expected"), spread([("1000000", [5, 10, 24]), ("0.000001", [5, 10, *range(11, 25)])], every=2)
)
def test_run_saves_at_the_interval_that_the_broker_advises(
    worlds: Worlds, tmp_path: Path, every_s: str, expected: list[int]
) -> None:
    """The first two saves measure what one costs; the run ends with the last."""
    folder = TrainingFolder(path=tmp_path, environment={"BROKER_CHECKPOINT_EVERY_S": every_s})
    ended = folder.fork(worlds, "--train.steps", "24", "--checkpoint.every_steps", "-1", "--checkpoint.keep", "99")
    assert ended.codes == [0], ended.errors
    saved = [int(re.findall(r"\d+", path.name)[0]) for path in (tmp_path / "checkpoints").glob("step*")]
    assert sorted(saved) == expected


@pytest.mark.exhaustive
@pytest.mark.slow
def test_stale_attempt_and_unknown_strategy_end_with_one_line(folder: TrainingFolder) -> None:
    """A wrong start is an error message, not a stack trace."""
    (folder.path / "checkpoints" / "attempts").mkdir(parents=True)
    (folder.path / "checkpoints" / "attempts" / "0000000009").touch()
    code, errors = folder.run(attempt=3)
    assert code == 1
    assert errors == "error: attempt 3 is stale: attempt 9 of this job has started\n"
    code, errors = folder.run(attempt=9, strategy="dpd")
    assert code == 1
    assert errors.startswith("error: unknown strategy `dpd`; known: ddp, allreduce,") and errors.count("\n") == 1


def test_vocabulary_is_rounded_up_for_gpus_by_default() -> None:
    for flags, expected in (([], 384), (["--model.vocabulary_multiple", "1"], 300)):
        config = parse_config([*SMALL, "--model.vocabulary", "300", *flags])
        assert build(config, torch.device("cpu")).model.vocabulary == expected


def test_deterministic_run_is_the_same_run_on_a_cpu(folder: TrainingFolder, worlds: Worlds, tmp_path: Path) -> None:
    """On a CPU it changes nothing; without a GPU, only the switches can be checked."""
    assert folder.fork(worlds, "--train.steps", "5").codes == [0]
    other = TrainingFolder(path=tmp_path / "deterministic")
    ended = worlds.call(
        other.path,
        "tests.trainers.test_lm:train_deterministically",
        ["--strategy", "ddp", *TINY, "--train.steps", "5", "--deterministic"],
        ranks=1,
    )
    assert ended.codes == [0], ended.errors
    assert other.losses() == folder.losses()


def train_deterministically(arguments: Sequence[str]) -> int:
    """Run a rank; return 3 unless the switches are set."""
    code = main(arguments)
    is_set = torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" in os.environ
    return code if is_set else 3


@pytest.mark.parametrize(
    ("before", "after", "conflict"),
    [
        ((), ("--model.heads", "2"), "`--model.heads` was `4` and is `2`"),
        ((), ("--model.activation", "gelu_tanh"), "`--model.activation` was `gelu` and is `gelu_tanh`"),
        ((), ("--model.rope_theta", "5e5", "--model.dropout", "0.1", "--model.context", "64"), ""),  # no part of a GPT
        (("--model.kind", "llama"), ("--model.kind", "llama", "--model.rope_theta", "5e5"), "`--model.rope_theta` was"),
        (("--lora.rank", "4"), ("--lora.rank", "4", "--lora.alpha", "8"), "`--lora.alpha` was `16.0` and is `8.0`"),
        ((), ("--lora.rank", "4", "--lora.alpha", "8"), ""),  # new adapters
    ],
)
def test_flags_that_give_the_same_weights_another_meaning_are_noticed(
    before: tuple[str, ...], after: tuple[str, ...], conflict: str
) -> None:
    old, new = parse_config(before), parse_config(after)
    about = json.loads(json.dumps(describe(old, old.model, -1, "bytes")))
    found = find_conflict(new.model, new.lora, about)
    assert (conflict in found) if conflict else not found
    assert find_conflict(new.model, new.lora, {}) == "", "an older checkpoint does not say"


@long
def test_checkpoint_of_other_heads_is_refused_although_its_shapes_fit(worlds: Worlds, folder: TrainingFolder) -> None:
    flags = ("--train.steps", "2", "--checkpoint.every_steps", "0")
    assert folder.fork(worlds, *flags).codes == [0]
    ended = folder.fork(worlds, *flags, "--train.steps", "3", "--model.heads", "4", workers=2, attempt=2)
    assert ended.codes == [1, 1] and "Traceback" not in ended.errors
    assert "does not fit this model: `--model.heads` was" in ended.errors
