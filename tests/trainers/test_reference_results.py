"""Trainers against independent statements: AdamW written out, the shuffle of items, and which checkpoints are kept."""

import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.tiers import examples
from tests.trainers.test_checkpoint import ALONE, Counter, open_manager
from trainers import checkpoint
from trainers.checkpoint import CheckpointManager
from trainers.config import TrainConfig
from trainers.data import Corpus, map_tensors, samples_of_rank, split_batch, split_windows
from trainers.dataset import DatasetSamples, describe, open_samples
from trainers.errors import CheckpointError, TrainerError
from trainers.manifest import (
    MANIFEST_VERSION,
    CheckpointName,
    DamagedFile,
    check_seal,
    divide,
    find_newest,
    list_checkpoints,
    read_manifest,
    remove_old,
    seal_manifest,
)
from trainers.optimizer import Optimizer, find_learning_rate
from trainers.storage import FolderStorage

# pytest resets the filter that the module sets for itself.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_steps_are_those_of_adamw_with_the_schedule_and_no_decay_of_biases() -> None:
    """Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), algorithm 2, in double precision."""
    config = TrainConfig(steps=6, warmup_steps=2, learning_rate=0.05, learning_rate_min=0.005, weight_decay=0.2)
    torch.manual_seed(5)
    model = nn.Linear(4, 3)
    optimizer = Optimizer(model.named_parameters(), config)
    expected = {name: value.detach().double().clone() for name, value in model.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in expected.items()}
    second = {name: torch.zeros_like(value) for name, value in expected.items()}
    rates = [
        0.025,
        0.05,
        0.05,
        0.03875,
        0.01625,
        0.005,
    ]  # two of warmup, then half a cosine at 0, 60, 120 and 180 degrees
    for step, rate in enumerate(rates):
        assert optimizer.learning_rate == pytest.approx(rate) and optimizer.steps_done == step
        assert not optimizer.is_finished
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            gradient = parameter.grad.double()
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            moved = (first[name] / (1 - 0.9 ** (step + 1))) / ((second[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
            decay = 0.2 if name == "weight" else 0.0
            expected[name] = expected[name] - rate * decay * expected[name] - rate * moved
        optimizer.step()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.is_finished
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_the_rate_stays_at_its_minimum_after_the_last_step_and_may_begin_at_the_peak() -> None:
    config = TrainConfig(steps=5, warmup_steps=0, learning_rate=1.0, learning_rate_min=0.2)
    found = [find_learning_rate(step, config) for step in (0, 2, 4, 5, 900)]
    assert found == pytest.approx([1.0, 0.6, 0.2, 0.2, 0.2])
    whole = TrainConfig(steps=4, warmup_steps=4, learning_rate=1.0, learning_rate_min=0.2)
    assert [find_learning_rate(step, whole) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_several_updates_of_one_step_share_its_rate() -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters.values()), lr=0.1)

    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = Optimizer(
        model.named_parameters(), TrainConfig(steps=9), make=sgd, schedule=lambda step: 1.0 / (step + 1)
    )
    for share in (0.25, 0.75):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step(schedule_step=4, rate_share=share)
        assert optimizer.steps_done == 5
    assert model.weight.item() == pytest.approx(-0.1 / 5), "0.02 in all, a quarter and three quarters of it"
    assert optimizer.learning_rate == pytest.approx(0.1 / 6)


def make_corpus(lengths: list[int], context: int, windows: range, *, seed: int = 0, name: str = "print") -> Corpus:
    begins = [1000 * index for index in range(len(lengths))]
    shards = [torch.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
    return Corpus(shards, name, context, seed, windows)


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 6), st.data())
def test_a_corpus_shows_each_of_its_windows_once_an_epoch_and_no_other(
    lengths: list[int], context: int, data: st.DataObject
) -> None:
    """Against slicing: whole windows of each shard from its beginning, each with the token that follows."""
    cut = [
        list(range(1000 * index + start, 1000 * index + start + context + 1))
        for index, length in enumerate(lengths)
        for start in range(0, length - context, context)
    ]
    if not cut:
        with pytest.raises(TrainerError, match=f"{max(lengths)} tokens in a row; a context of {context} needs"):
            make_corpus(lengths, context, range(0))
        return
    first = data.draw(st.integers(0, len(cut) - 1))
    windows = range(first, data.draw(st.integers(first + 1, len(cut))))
    corpus = make_corpus(lengths, context, windows)
    assert corpus.window_count == len(windows)
    for epoch in (0, 3):
        inputs, targets = corpus.read(epoch * len(windows), len(windows))
        assert inputs.dtype == targets.dtype == torch.long
        shown = [[*row.tolist(), after[-1].item()] for row, after in zip(inputs, targets, strict=True)]
        assert sorted(shown) == cut[windows.start : windows.stop]
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_the_longest_row_of_too_short_data_is_named() -> None:
    with pytest.raises(TrainerError, match="the data has 7 tokens in a row; a context of 8 needs 9"):
        make_corpus([3, 7, 5], 8, range(0))


def test_the_newest_checkpoint_is_the_last_whose_files_are_all_as_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage, counter = FolderStorage(tmp_path), Counter()
    assert find_newest(storage) is None
    manager = open_manager(tmp_path, counter)
    for step in (1, 2, 3):
        begun_s = time.perf_counter()
        manager.save(step)
        manager.wait()
        assert 0 < manager.write_s <= time.perf_counter() - begun_s
    found = find_newest(storage)
    assert found is not None and found[0].step == 3 and found[1].world_size == 1
    (file,) = (tmp_path / str(found[0])).glob("__0_*")
    file.write_bytes(b"x" + file.read_bytes()[1:])
    found = find_newest(storage)
    assert found is not None and found[0].step == 2
    assert f"skipping checkpoint `step-00000003-attempt-0001-{manager._run}`" in capsys.readouterr().err


def test_a_corpus_differs_where_its_text_context_seed_or_part_does() -> None:
    made = [
        make_corpus([99], 4, range(9)),
        make_corpus([99], 5, range(9)),
        make_corpus([99], 4, range(8)),
        make_corpus([99], 4, range(1, 9)),
        make_corpus([99], 4, range(9), seed=1),
        make_corpus([99], 4, range(9), name="other"),
    ]
    assert len({each.fingerprint for each in made}) == 6
    assert make_corpus([99], 4, range(9)).fingerprint == made[0].fingerprint


@given(st.integers(0, 1000), st.floats(0, 0.99))
def test_the_parts_for_training_and_evaluation_make_up_the_data(count: int, share: float) -> None:
    training, kept = split_windows(count, share)
    assert [*training, *kept] == list(range(count)) and len(kept) == math.floor(count * share)


def test_a_batch_smaller_than_the_world_is_refused_and_one_each_is_not() -> None:
    assert [list(samples_of_rank(7, 3, rank, 3)) for rank in range(3)] == [[7], [8], [9]]
    with pytest.raises(TrainerError, match="a batch of 2 leaves some of 3 ranks"):
        samples_of_rank(7, 2, 0, 3)


class Items:
    """A map-style dataset: item i is a pair of tensors that hold i."""

    def __init__(self, count: int, make: Callable[[int], Any] = lambda index: (torch.full((2,), index), index)) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


def test_a_dataset_is_shown_whole_every_epoch_in_another_order_that_any_rank_can_compute() -> None:
    samples = DatasetSamples(Items(17), seed=3)

    def read(first: int, count: int, of: DatasetSamples = samples) -> list[int]:
        tensors, numbers = of.read(first, count)
        assert tensors.tolist() == [[number] * 2 for number in numbers.tolist()]
        return [int(number) for number in numbers]

    epochs = [read(17 * epoch, 17) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert read(10, 14) == [*epochs[0][10:], *epochs[1][:7]], "a batch may span two epochs"
    assert [read(sample, 1)[0] for sample in range(17)] == epochs[0]
    assert read(0, 17, DatasetSamples(Items(17), seed=4)) != epochs[0]


def test_the_fingerprint_of_a_dataset_depends_on_its_shape_and_not_on_its_values() -> None:
    def find(count: int, make: Callable[[int], Any], seed: int = 0) -> str:
        return DatasetSamples(Items(count, make), seed=seed).fingerprint

    makes: list[Callable[[int], Any]] = [
        lambda index: torch.zeros(2),
        lambda index: torch.zeros(3),
        lambda index: torch.zeros(2, dtype=torch.int32),
        lambda index: {"a": torch.zeros(2)},
        lambda index: {"b": torch.zeros(2)},
        lambda index: (torch.zeros(2), torch.zeros(2)),
    ]
    found = [find(5, make) for make in makes]
    assert len({*found, find(6, makes[0]), find(5, makes[0], seed=1)}) == 8
    assert find(5, lambda index: torch.rand(2)) == found[0]
    assert describe(torch.zeros(4, 2)) == describe(torch.ones(9, 2)), "the number of samples is not part of it"


def test_sources_of_samples_are_distinguished() -> None:
    items = Items(4)
    assert isinstance(open_samples(items, seed=1), DatasetSamples)
    assert isinstance(open_samples(lambda: items, seed=1), DatasetSamples)
    own = DatasetSamples(items, seed=9)
    assert open_samples(own, seed=1) is own and open_samples(lambda: own, seed=1) is own
    joined = open_samples(items, seed=1, collate=len).read(0, 3)
    assert joined == 3
    with pytest.raises(TrainerError, match="the dataset is empty"):
        open_samples(Items(0), seed=1)
    with pytest.raises(TrainerError, match="`generator` has no length"):
        open_samples((each for each in range(3)), seed=1)


def test_a_pair_is_input_and_target_and_any_other_batch_is_both() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    assert split_batch((one, two)) == (one, two) and split_batch([one, two]) == (one, two)
    for batch in (one, (one, two, one), {"a": one}):
        assert all(part is batch for part in split_batch(batch))
    changed = map_tensors({"a": [one, "text"], "b": (two,)}, lambda tensor: tensor + 1)
    assert changed == {"a": (torch.ones(1), "text"), "b": (2 * two,)}


def write_checkpoint(storage: FolderStorage, name: CheckpointName, *, is_complete: bool = True) -> None:
    storage.create(f"{name}/data", b"x")
    if is_complete:
        storage.create(f"{name}/manifest.json", b"{}")


names = st.builds(
    CheckpointName, step=st.integers(1, 4), attempt=st.integers(1, 3), run=st.sampled_from(["aaaaaaaa", "bbbbbbbb"])
)


@settings(max_examples=examples(40))
@given(st.dictionaries(names, st.booleans(), min_size=1, max_size=8), names, st.integers(1, 3))
def test_the_last_complete_checkpoints_are_kept_and_none_of_a_later_attempt_or_being_written_is_touched(
    tmp_path_factory: pytest.TempPathFactory, found: dict[CheckpointName, bool], newest: CheckpointName, keep: int
) -> None:
    storage = FolderStorage(tmp_path_factory.mktemp("kept"))
    found[newest] = True
    for name, is_complete in found.items():
        write_checkpoint(storage, name, is_complete=is_complete)
    complete = sorted(
        (name for name in found if found[name]), key=lambda name: (name.step, name.attempt, name.run), reverse=True
    )
    expected = {*complete[:keep], newest, *(name for name in found if name.attempt > newest.attempt)}
    # A rank that was paused may commit after the others have begun a later checkpoint of the same attempt.
    expected |= {
        name for name in found if name.attempt == newest.attempt and name.step > newest.step and not found[name]
    }
    remove_old(storage, newest=newest, keep=keep)
    left = list_checkpoints(storage)
    assert set(left) == expected
    assert left == sorted(left, key=lambda name: (name.step, name.attempt, name.run), reverse=True)
    assert [name for name in complete if name in expected] == [
        name for name in left if storage.read(f"{name}/manifest.json") is not None
    ]


@given(st.sets(st.text("abc", min_size=1), max_size=9), st.integers(1, 5))
def test_files_are_divided_among_the_ranks_without_gap_or_overlap(files: set[str], world_size: int) -> None:
    shares = [divide(files, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(file for share in shares for file in share) == sorted(files)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_manifest_is_refused_for_each_part_that_is_not_what_was_written(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    good: dict[str, Any] = {
        "version": MANIFEST_VERSION, "step": 1, "attempt": 1, "world_size": 2, "shared": ["model"], "own": ["rng"],
        "about": {"a": 1}, "files": {"__0_0.distcp": ["0" * 64, 5]},
    }  # fmt: skip

    def read(number: int, manifest: dict[str, Any], seal: str | None) -> Any:
        name = CheckpointName(step=number, attempt=1, run="aaaaaaaa")
        storage.create(f"{name}/manifest.json", json.dumps({**manifest, "seal": seal}).encode())
        return read_manifest(storage, name)

    contents = read(1, good, seal_manifest(good))
    assert (contents.world_size, contents.shared, contents.own) == (2, {"model"}, {"rng"})
    assert contents.about == {"a": 1} and contents.files["__0_0.distcp"].size == 5
    for version in (MANIFEST_VERSION - 1, MANIFEST_VERSION + 1):  # an intact one is neither skipped nor removed
        other = {"version": version, "files": {}, "new": 1}
        with pytest.raises(CheckpointError, match=f"version {version}, not {MANIFEST_VERSION}"):
            read(30 + version, other, seal_manifest(other))
        with pytest.raises(DamagedFile):
            read(40 + version, {**good, "version": version}, seal_manifest(good))
    for number, (key, value) in enumerate({"world_size": 3, "shared": [], "own": [], "about": {}, "files": {}}.items()):
        with pytest.raises(DamagedFile, match="does not match"):
            read(3 + number, {**good, key: value}, seal_manifest(good))
    with pytest.raises(DamagedFile, match="does not match"):
        read(20, good, None)
    missing = {key: value for key, value in good.items() if key != "files"}
    with pytest.raises(DamagedFile, match="cannot be read"):
        read(21, missing, seal_manifest(missing))


def test_a_file_is_whole_only_with_its_checksum_and_its_size() -> None:
    from trainers.manifest import FileChecksum

    sha256 = hashlib.sha256(b"abc").hexdigest()
    check_seal("f", FileChecksum(sha256=sha256, size=3), (sha256, 3))
    for actual in ((sha256, 4), ("0" * 64, 3)):
        with pytest.raises(DamagedFile, match="`f` does not match its"):
            check_seal("f", FileChecksum(sha256=sha256, size=3), actual)
    with pytest.raises(DamagedFile, match="`f` is missing"):
        check_seal("f", FileChecksum(sha256=sha256, size=3), None)


class FullDisk(FolderStorage):
    """A folder that takes no checkpoint of some steps."""

    def __init__(self, path: Path, refused: set[int]) -> None:
        super().__init__(path)
        self.refused = refused

    def open_writer(self, path: str) -> Any:
        if int(path.split("-")[1]) in self.refused:
            raise OSError("no space left")
        return super().open_writer(path)


def test_failed_saves_are_warnings_until_too_many_fail_in_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    most = checkpoint.FAILURES_MAX
    refused = {*range(1, most), *range(51, 51 + most)}
    manager = CheckpointManager(
        FullDisk(tmp_path, refused), ALONE, attempt=1, keep=3, shared={"counter": Counter()}, own={}
    )
    for step in (*range(1, most), 50, *range(51, 51 + most)):  # one before the limit, a success, and the limit
        manager.save(step)
        manager.wait_for_copy()
    assert capsys.readouterr().err.count("no space left; training continues until the next checkpoint") == 2 * most - 2
    with pytest.raises(CheckpointError, match="was not written: no space left"):
        manager.save(99)
    assert manager.step_committed == 50


def test_a_step_is_saved_once_and_again_after_its_save_failed(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, Counter())
    blocker = tmp_path / f"step-00000005-attempt-0001-{manager._run}"
    blocker.touch()
    manager.save(5)
    with pytest.raises(CheckpointError):
        manager.wait()
    assert not blocker.exists(), "the remains of a failed save are removed"
    manager.save(5)
    manager.wait()
    (name,) = list_checkpoints(FolderStorage(tmp_path))
    written = (tmp_path / str(name) / "manifest.json").stat().st_mtime_ns
    manager.save(5)
    manager.wait()
    assert (tmp_path / str(name) / "manifest.json").stat().st_mtime_ns == written
    again = open_manager(tmp_path, Counter(), attempt=2)
    assert again.restore() == 5
    again.save(5)
    again.wait()
    assert list_checkpoints(FolderStorage(tmp_path)) == [name], "what was restored is not written a second time"
