"""`from trainers import train`: models, datasets, losses and optimizers that are not ours."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.tiers import long, spread
from trainers import snapshot
from trainers.dataset import DatasetSamples, open_samples
from trainers.errors import TrainerError
from trainers.loop import check_loss
from trainers.ranks import join_ranks, leave_ranks
from trainers.strategies import create_strategy
from trainers.strategies.options import StrategyOptions
from trainers.training import parse_config, run_training

from .conftest import HELD
from .strategies.conftest import Worlds, read_lines, read_losses
from .test_optimizer import Counted

ROOT = Path(__file__).parents[2]
STEPS = 12
FLAGS = ["--train.steps", str(STEPS), "--train.batch", "8", "--train.micro_batch", "2", "--checkpoint.every_steps", "2"]
EVALUATED = ["--evaluate.every_steps", "4", "--checkpoint.every_steps", "3"]
HERE = "tests.trainers.test_training"


class Points(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        point = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"point": point, "target": point.sum().sin()}


class Network(nn.Module):
    """With a ModuleList, dropout, a parameter that takes no part, and a name that is not ours for anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))
        self.last = nn.Linear(6, 1)

    def forward(self, point: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:
        for layer in self.layers:
            point = point + layer(point)
        return {"prediction": self.last(point)[:, 0]}


def measure(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(outputs["prediction"], batch["target"])


RECIPE: dict[str, Any] = {"model": Network, "samples": Points(), "loss": measure, "validation": Points()}


def with_adamw(arguments: Sequence[str]) -> int:
    return run_training(arguments, RECIPE, defaults={"train.learning_rate": 0.01})


def with_momentum(arguments: Sequence[str]) -> int:
    own = {
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9),
        "schedule": lambda step: 1.0 - step / STEPS,
    }
    return run_training(arguments, RECIPE | own, defaults={})


def with_a_module_of_other_weights(arguments: Sequence[str]) -> int:
    torch.manual_seed(int(os.environ["RANK"]))
    return run_training(arguments, RECIPE | {"model": Network()}, defaults={})


class Counting(nn.Module):
    """With a buffer that each pass changes, as BatchNorm's statistics, and on which the loss depends."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 1)
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, point: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.passes += 1
        PASSED.set()
        return {"prediction": self.line(point)[:, 0] + 0.01 * self.passes}


class Statistics(nn.Module):
    """With BatchNorm, whose statistics are those of each rank's own samples, and buffers of other types."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))
        self.last = nn.Linear(6, 1)
        self.is_odd: Tensor
        self.unsaved: Tensor
        self.register_buffer("is_odd", torch.tensor([False]))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)

    def forward(self, point: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.is_odd = ~self.is_odd
        for layer in self.layers:
            point = point + layer(point * self.unsaved.sum())
        return {"prediction": self.last(point)[:, 0]}


def with_statistics(arguments: Sequence[str]) -> int:
    return run_training(arguments, RECIPE | {"model": Statistics}, defaults={"train.learning_rate": 0.01})


class Masking(Network):
    """Draws from Python's and NumPy's generators in its passes, as wav2vec 2.0 of `transformers` does."""

    def forward(self, point: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:
        kept = torch.from_numpy(np.random.rand(point.shape[1]) < random.uniform(0.5, 1.0))
        return super().forward(point * kept, target)


def with_values_outside_tensors(arguments: Sequence[str]) -> int:
    own = {"model": Masking, "optimizer": lambda named: Counted([value for _, value in named])}
    return run_training(arguments, RECIPE | own, defaults={})


PASSED = threading.Event()


def with_a_buffer_and_late_copies(arguments: Sequence[str]) -> int:
    """Copy the state of a checkpoint only when the next pass has run; after the last step, none comes."""
    copy = snapshot.copy_state

    def copy_late(state: Any) -> Any:
        snapshot.copy_state = copy  # which calls itself for each part of the state
        PASSED.wait(timeout=1.0)
        try:
            return copy(state)
        finally:
            snapshot.copy_state = copy_late

    def measure_and_clear(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        PASSED.clear()
        return measure(outputs, batch)

    snapshot.copy_state = copy_late
    return run_training(arguments, RECIPE | {"model": Counting, "loss": measure_and_clear}, defaults={})


@pytest.mark.parametrize(
    ("recipe", "ranks", "flags"),
    [
        pytest.param("with_adamw", 2, ["--strategy", "ddp", "--evaluate.every_steps", "4"], marks=pytest.mark.long),
        pytest.param("with_values_outside_tensors", 1, [], marks=pytest.mark.long),
        pytest.param("with_values_outside_tensors", 2, ["--strategy", "ddp"], marks=pytest.mark.long),
        pytest.param("with_values_outside_tensors", 3, ["--strategy", "parameter_server"], marks=pytest.mark.long),
        pytest.param("with_a_buffer_and_late_copies", 1, ["--train.micro_batch", "8"], marks=pytest.mark.long),
        ("with_statistics", 2, ["--strategy", "ddp", *EVALUATED]),
        pytest.param("with_statistics", 2, ["--strategy", "allreduce", *EVALUATED], marks=pytest.mark.long),
        pytest.param("with_statistics", 2, ["--strategy", "fsdp", *EVALUATED], marks=pytest.mark.long),
        pytest.param("with_statistics", 2, ["--strategy", "zero1", *EVALUATED], marks=pytest.mark.long),
        pytest.param("with_statistics", 4, ["--strategy", "hsdp", "--mesh", "2x2", *EVALUATED], marks=pytest.mark.long),
        pytest.param("with_statistics", 2, ["--strategy", "diloco", *EVALUATED], marks=pytest.mark.long),
        pytest.param("with_adamw", 2, ["--strategy", "fsdp", "--recompute", "full"], marks=pytest.mark.long),
        pytest.param("with_adamw", 3, ["--strategy", "parameter_server"], marks=pytest.mark.exhaustive),
        pytest.param("with_momentum", 2, ["--strategy", "fsdp"], marks=pytest.mark.exhaustive),
        pytest.param("with_momentum", 2, ["--strategy", "diloco", "--diloco.every_steps", "3"], marks=pytest.mark.long),
        pytest.param("with_momentum", 2, ["--strategy", "allreduce"], marks=pytest.mark.exhaustive),
        pytest.param("with_adamw", 4, ["--strategy", "hsdp", "--mesh", "2x2"], marks=pytest.mark.exhaustive),
        pytest.param("with_adamw", 3, ["--strategy", "gossip"], marks=pytest.mark.long),
    ],
)
def test_killed_run_of_a_foreign_model_resumes_bit_identically(
    worlds: Worlds, tmp_path: Path, recipe: str, ranks: int, flags: list[str]
) -> None:
    arguments = [*FLAGS, *flags]
    whole = worlds.call(tmp_path / "whole", f"{HERE}:{recipe}", arguments, ranks=ranks)
    assert whole.codes == [0] * ranks, whole.errors
    broken = tmp_path / "broken"
    ended = worlds.call(broken, f"{HERE}:{recipe}", arguments, ranks=ranks, kill_at="step 7/")
    assert ended.codes == [-9] * ranks, ended.errors
    ended = worlds.call(broken, f"{HERE}:{recipe}", arguments, ranks=ranks, attempt=2)
    assert ended.codes == [0] * ranks, ended.errors
    assert any(line["event"] == "resumed" for line in read_lines(broken))
    expected = {step: losses[0] for step, losses in read_losses(tmp_path / "whole").items()}
    assert sorted(read_losses(broken)) == sorted(expected) == list(range(1, STEPS + 1))
    assert all(loss == expected[step] for step, losses in read_losses(broken).items() for loss in losses)
    # These depend on the statistics of BatchNorm, which training losses do not.
    validated = [
        {line["step"]: line["validation_loss"] for line in read_lines(path) if line.get("validation_loss") is not None}
        for path in (tmp_path / "whole", broken)
    ]
    assert validated[0] == validated[1]


def test_run_with_more_steps_than_now_asked_for_is_finished_and_saves_nothing(worlds: Worlds, tmp_path: Path) -> None:
    """Before, it saved the later state under the name of the last step asked for."""
    for steps in ("4", "2"):
        ended = worlds.call(tmp_path, f"{HERE}:with_adamw", [*FLAGS, "--train.steps", steps], ranks=1)
        assert ended.codes == [0], ended.errors
    assert [path.name[:13] for path in sorted((tmp_path / "checkpoints").glob("step-*"))] == [
        "step-00000002",
        "step-00000004",
    ]
    last = read_lines(tmp_path)[-1]
    assert (last["step"], last["checkpoint_step"], last["event"]) == (4, 4, "finished")
    assert "is of step 4, so no step is left: raise `--train.steps`" in ended.errors


def share_buffers_of_ranks(arguments: Sequence[str]) -> int:
    """Return 0 if each rank gets the number of the first rank of its island."""
    ranks = join_ranks(start_s=300.0, checkpoint_s=300.0)
    strategy = create_strategy(arguments[0], ranks, StrategyOptions(mesh=arguments[1]))
    model = nn.BatchNorm1d(2)
    model.running_mean = torch.full((2,), float(ranks.rank))
    strategy.share_buffers(model)
    leave_ranks()
    return 0 if model.running_mean.tolist() == [2.0 * (ranks.rank // 2)] * 2 else 1


@pytest.mark.parametrize("strategy", spread(["diloco+ddp", "gossip+fsdp", "diloco+allreduce"], every=3))
def test_ranks_of_an_island_share_their_buffers(worlds: Worlds, tmp_path: Path, strategy: str) -> None:
    ended = worlds.call(tmp_path, f"{HERE}:share_buffers_of_ranks", [strategy, "2x2"], ranks=4)
    assert ended.codes == [0] * 4, ended.errors


def test_strategies_agree_whatever_the_number_of_ranks(worlds: Worlds, tmp_path: Path) -> None:
    """Without dropout, of which every rank draws its own."""
    losses = []
    for ranks, strategy in ((1, "ddp"), (2, "fsdp"), (2, "allreduce")):
        folder = tmp_path / f"{ranks}-{strategy}"
        ended = worlds.call(folder, f"{HERE}:without_dropout", [*FLAGS, "--strategy", strategy], ranks=ranks)
        assert ended.codes == [0] * ranks, ended.errors
        losses.append([each[0] for each in read_losses(folder).values()])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6) and losses[2] == pytest.approx(losses[0], abs=1e-6)


def without_dropout(arguments: Sequence[str]) -> int:
    def make() -> nn.Module:
        model = Network()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return run_training(arguments, RECIPE | {"model": make}, defaults={})


class Words(Points):
    """Sequences of which many labels are ignored, and of some all."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        numbers = torch.Generator().manual_seed(index)
        labels = torch.randint(5, (7,), generator=numbers)
        labels[torch.rand(7, generator=numbers) < (index % 4) / 3] = -100
        return {"point": torch.randn(7, 6, generator=numbers), "labels": labels}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 5)])

    def forward(self, point: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = self.layers[0](point)
        return logits


COUNTED: dict[str, Any] = {
    "model": Tagger,
    "samples": Words(),
    "validation": Words(),
    "loss": lambda outputs, batch: nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten()),
    "count": lambda batch: (batch["labels"] != -100).sum(),
    "optimizer": lambda named: torch.optim.SGD(named, lr=0.5),
}


def with_ignored_labels(arguments: Sequence[str]) -> int:
    return run_training(arguments, COUNTED, defaults={})


@pytest.mark.parametrize(
    ("ranks", "strategy", "micro_batch"),
    [(1, "ddp", 1), *spread([(2, "fsdp", 2), (2, "zero2", 1), (3, "ddp", 2), (2, "allreduce", 3)], every=4)],
)
def test_counted_loss_is_the_mean_over_all_labels_of_a_batch(
    worlds: Worlds, tmp_path: Path, ranks: int, strategy: str, micro_batch: int
) -> None:
    """As plain PyTorch computes it in one pass over each batch, though some passes have no label."""
    flags = ["--train.steps", "4", "--train.batch", "7", "--train.micro_batch", str(micro_batch)]
    flags += [
        "--train.norm_max",
        "1e9",
        "--evaluate.every_steps",
        "4",
        "--evaluate.samples",
        "7",
        "--strategy",
        strategy,
    ]
    ended = worlds.call(tmp_path, f"{HERE}:with_ignored_labels", flags, ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors
    torch.manual_seed(0)
    model, samples = Tagger(), DatasetSamples(Words(), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for step in range(5):
        batch = samples.read(7 * step if step < 4 else 0, 7)  # the last one is the evaluation
        loss = COUNTED["loss"](model(**batch), batch)
        expected.append(loss.item())
        if step < 4:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    losses = [each[0] for each in read_losses(tmp_path).values()]
    evaluated = [line["validation_loss"] for line in read_lines(tmp_path) if line.get("validation_loss")]
    assert [*losses, *evaluated] == pytest.approx(expected, abs=1e-6)


@long
def test_ranks_that_do_not_step_together_cannot_count(worlds: Worlds, tmp_path: Path) -> None:
    ended = worlds.call(tmp_path, f"{HERE}:with_ignored_labels", [*FLAGS, "--strategy", "gossip"], ranks=2)
    assert ended.codes == [1, 1] and "`count` needs ranks that take each step together" in ended.errors


def test_module_whose_weights_differ_by_rank_begins_with_the_first_rank_s(worlds: Worlds, tmp_path: Path) -> None:
    function = f"{HERE}:with_a_module_of_other_weights"
    arguments = [*FLAGS, "--train.learning_rate", "0.01", "--checkpoint.every_steps", "0"]
    losses = []
    for ranks, strategy in ((1, "ddp"), (2, "allreduce")):
        ended = worlds.call(tmp_path / strategy, function, [*arguments, "--strategy", strategy], ranks=ranks)
        assert ended.codes == [0] * ranks, ended.errors
        losses.append(read_losses(tmp_path / strategy)[1][0])
    # Dropout differs by rank; other weights would be further apart by far.
    assert losses[0] == pytest.approx(losses[1], abs=0.15)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [("tensor", "does not declare how its layers may be sharded"), ("pipeline", "does not consist of blocks")],
)
def test_strategy_that_cuts_models_refuses_a_foreign_one(
    worlds: Worlds, tmp_path: Path, strategy: str, reason: str
) -> None:
    ended = worlds.call(tmp_path, f"{HERE}:with_adamw", [*FLAGS, "--strategy", strategy], ranks=2)
    assert ended.codes == [1, 1] and "Traceback" not in ended.errors
    assert reason in ended.errors


def with_a_number(arguments: Sequence[str]) -> int:
    def make() -> nn.Module:
        model = Network()
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
        return model

    return run_training(arguments, RECIPE | {"model": make}, defaults={})


@pytest.mark.parametrize("strategy", spread(["fsdp", "zero2", "hsdp"], every=3))
def test_parameter_that_cannot_be_sharded_is_named(worlds: Worlds, tmp_path: Path, strategy: str) -> None:
    ended = worlds.call(tmp_path, f"{HERE}:with_a_number", [*FLAGS, "--strategy", strategy], ranks=2)
    assert ended.codes == [1, 1] and "Traceback" not in ended.errors
    assert "cannot shard `scale`: give it the shape (1,)" in ended.errors


def test_every_item_comes_once_an_epoch_in_an_order_of_the_seed() -> None:
    samples, other = DatasetSamples(Points(), seed=1), DatasetSamples(Points(), seed=2)
    epochs = [samples.read(50 * epoch, 50)["target"] for epoch in (0, 1)]
    assert torch.equal(epochs[0].sort().values, epochs[1].sort().values) and not torch.equal(epochs[0], epochs[1])
    assert torch.equal(samples.read(60, 5)["point"], samples.read(50, 50)["point"][10:15])
    assert samples.fingerprint != other.fingerprint


def test_pairs_functions_and_own_collate() -> None:
    items = [(torch.tensor([float(index)]), index) for index in range(5)]
    inputs, targets = DatasetSamples(items, seed=0).read(0, 5)
    assert inputs[:, 0].tolist() == targets.tolist() and sorted(targets.tolist()) == [0, 1, 2, 3, 4]
    samples = open_samples(lambda: items, seed=0, collate=lambda chosen: torch.tensor([item[1] for item in chosen]))
    assert samples.read(0, 5).tolist() == targets.tolist()
    assert open_samples(samples, seed=3) is samples


def test_dataset_is_never_read_by_two_threads_at_once() -> None:
    """A file that both read would be moved by one between a seek and a read of the other."""
    inside: list[int] = []

    class Items(list[int]):
        def __getitem__(self, index: Any) -> Any:
            inside.append(index)
            if len(inside) == 3:  # after the first item of each, from which the digests are made
                other.start()
                other.join(timeout=0.05)
                assert len(inside) == 3, "the other thread waits"
            return index

    items = Items(range(8))
    training, validation = DatasetSamples(items, seed=0), DatasetSamples(items, seed=1)
    other = threading.Thread(target=lambda: validation.read(0, 2))
    training.read(0, 2)
    other.join(timeout=300)
    assert len(inside) == 6


def test_dataset_without_a_length_and_an_empty_one_are_explained() -> None:
    with pytest.raises(TrainerError, match=r"`generator` has no length\. Exact resume needs a map-style Dataset"):
        open_samples((item for item in ()), seed=0)
    with pytest.raises(TrainerError, match="empty"):
        open_samples([], seed=0)
    with pytest.raises(TrainerError, match=r"`DataLoader` has no `\[index\]`\. Pass the Dataset itself"):
        open_samples(torch.utils.data.DataLoader(Points()), seed=0)


@pytest.mark.parametrize(
    ("loss", "found"), [(torch.ones(3), r"a tensor of shape \(3,\)"), (0.5, "float"), ((torch.tensor(1.0),), "tuple")]
)
def test_loss_that_is_not_a_mean_is_explained(loss: Any, found: str) -> None:
    with pytest.raises(TrainerError, match=f"a tensor without dimensions, not {found}"):
        check_loss(loss)


def test_flags_that_cannot_work_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_config(["--evaluate.every_steps", "5"], {}, has_validation=False)
    assert "`train(..., validation=...)`" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"did you mean `train\.steps`"):
        parse_config([], {"train.step": 5}, has_validation=False)
    config = parse_config(["--train.micro-batch", "3"], {"train.steps": 7, "train.micro_batch": 5}, has_validation=True)
    assert (config.train.steps, config.train.micro_batch) == (7, 3)


def read_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/TRAINERS_YOUR_MODEL.md").read_text(), re.DOTALL)


def run_script(
    path: Path,
    *flags: str,
    workers: int = 1,
    kill_after: int = 0,
    attempt: int = 1,
    kills_one_rank: bool = False,
) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("BROKER_", "SKYPILOT_"))}
    variables |= {
        "BROKER_CHECKPOINT_DIR": str(path.parent / "checkpoints"),
        "BROKER_PROGRESS_FILE": str(path.parent / "progress.jsonl"),
        "BROKER_ATTEMPT": str(attempt),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(workers),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{HELD}{os.pathsep}{ROOT}",
    }
    released = path.parent / "released"
    if kill_after:  # or a fast run would end before its kill
        variables |= {"HELD_AT": str(kill_after), "HELD_UNTIL": str(released)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, path.name, *flags], cwd=path.parent, env=variables, stdout=pipe, stderr=pipe, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if kill_after and line.startswith(f"step {kill_after}/"):
            kill_after = 0  # a run that resumes at this very step says so again
            if kills_one_rank:
                ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(ranks[-1]), signal.SIGKILL)
                released.touch()
            else:
                os.killpg(process.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, "".join(lines), errors)


@pytest.mark.parametrize("workers", spread([1, 2], every=0))
def test_first_example_of_the_docs_is_killed_and_resumes(tmp_path: Path, workers: int) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "points.py").write_text(read_examples()[0])
    script = tmp_path / "broken/points.py"
    flags = ("--train.steps", "40", "--checkpoint.every_steps", "5", "--strategy", "allreduce")
    shown = run_script(script, "--help")
    assert shown.returncode == 0 and "Learn a function of eight numbers." in shown.stdout
    assert run_script(tmp_path / "whole/points.py", *flags, workers=workers).returncode == 0
    assert run_script(script, *flags, workers=workers, kill_after=22).returncode == -9
    done = run_script(script, *flags, workers=workers, attempt=2)
    assert done.returncode == 0, done.stderr
    expected = {step: losses[0] for step, losses in read_losses(tmp_path / "whole").items()}
    assert sorted(read_losses(tmp_path / "broken")) == sorted(expected) == list(range(1, 41))
    assert all(loss == expected[step] for step, each in read_losses(tmp_path / "broken").items() for loss in each)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 1), ("fsdp", 2)])
def test_hugging_face_example_of_the_docs_learns_and_resumes_bit_identically(
    tmp_path: Path, strategy: str, workers: int
) -> None:
    flags = ("--train.steps", "12", "--train.batch", "8", "--checkpoint.every_steps", "3", "--strategy", strategy)
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "windows.py").write_text(read_examples()[1])
    done = run_script(tmp_path / "whole/windows.py", *flags, workers=workers)
    assert done.returncode == 0, done.stderr
    expected = {step: losses[0] for step, losses in read_losses(tmp_path / "whole").items()}
    assert expected[12] < expected[1] - 0.1
    script = tmp_path / "broken/windows.py"
    assert run_script(script, *flags, workers=workers, kill_after=8).returncode == -9
    done = run_script(script, *flags, workers=workers, attempt=2)
    assert done.returncode == 0, done.stderr
    assert any(line["event"] == "resumed" for line in read_lines(tmp_path / "broken"))
    assert sorted(read_losses(tmp_path / "broken")) == sorted(expected) == list(range(1, 13))
    assert all(loss == expected[step] for step, each in read_losses(tmp_path / "broken").items() for loss in each)


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "steps", "kill_after", "own"),
    [
        pytest.param(0, 3000, 300, (), id="points"),
        pytest.param(1, 160, 20, (), id="GPT-2 of transformers"),
        pytest.param(1, 160, 20, ("--strategy", "fsdp", "--checkpoint.peer_every_steps", "1"), id="its shards"),
    ],
)
def test_elastic_run_of_the_docs_example_outlives_a_rank(
    tmp_path: Path, example: int, steps: int, kill_after: int, own: tuple[str, ...]
) -> None:
    """The script finds its way back into its own `train` call after each change of the world."""
    script = tmp_path / "example.py"
    script.write_text(read_examples()[example])
    flags = ("--elastic", "1:2", "--train.steps", str(steps), "--log.every_steps", "10", "--train.batch", "8")
    flags = (*flags, "--checkpoint.every_steps", "500", *own)
    done = run_script(script, *flags, workers=2, kill_after=kill_after, kills_one_rank=True)
    assert done.returncode == 0, done.stderr
    assert "resumed from memory" in done.stdout and f"step {steps}/{steps}  finished" in done.stdout


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_elastic_run_that_loses_a_rank_within_an_update_reads_a_checkpoint(tmp_path: Path) -> None:
    """Half of the survivor's parameters have moved: its memory belongs to no step."""
    flags = ["--train.steps", "14", "--train.batch", "8", "--train.micro_batch", "2", "--checkpoint.every_steps", "2"]
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "joint.py").write_text((ROOT / "tests/trainers/joint_update.py").read_text())
    assert run_script(tmp_path / "whole/joint.py", *flags).returncode == 0
    flags += ["--strategy", "allreduce", "--elastic", "1:2", "--log.every_steps", "1"]
    done = run_script(tmp_path / "broken/joint.py", *flags, workers=2)
    assert done.returncode == 0 and (tmp_path / "broken/killed").exists(), done.stderr
    assert "a step was interrupted while it changed the state" in done.stderr
    lines = [line for line in read_lines(tmp_path / "broken") if str(line["event"]).startswith("resumed")]
    assert lines[0]["event"] == "resumed" and lines[0]["step"] in (4, 6), "the newest checkpoint, if it was complete"
    expected = {step: losses[0] for step, losses in read_losses(tmp_path / "whole").items()}
    found = {step: losses[-1] for step, losses in read_losses(tmp_path / "broken").items()}
    assert found == pytest.approx({step: expected[step] for step in found}, abs=1e-9)
    assert {*range(1, 8), 14} <= set(found)


HANGING = """
import faulthandler, os, threading
import torch
from trainers import train

reads = 0


def leave(code, leave=os._exit):
    if os.environ.get("RANK") == "1":  # its own watchdog ends nothing
        faulthandler.cancel_dump_traceback_later()
        threading.Event().wait()
    leave(code)


os._exit = leave


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        global reads
        reads += 1
        if os.environ["RANK"] == "1" and reads > 40:
            threading.Event().wait()
        return torch.ones(2), torch.ones(2)


if __name__ == "__main__":
    train(model=lambda: torch.nn.Linear(2, 2), samples=Points(), loss=torch.nn.functional.mse_loss)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_elastic_rank_whose_peer_hangs_is_ended_by_the_watchdog_alone(tmp_path: Path) -> None:
    """The peer still sends its beats, and collectives have no limit that is due, as with NCCL in an elastic run."""
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    flags = ("--elastic", "1:2", "--train.steps", "1000", "--train.batch", "8", "--watchdog.timeout_s", "10")
    done = run_script(script, *flags, "--checkpoint.every_steps", "0", "--strategy", "allreduce", workers=2)
    assert done.returncode == 75, done.stderr
    assert "rank 0 hangs" in done.stderr
