"""Checkpoints are written, torn, corrupted and fenced on real files."""

import contextlib
import errno
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from trainers import snapshot
from trainers.checkpoint import CheckpointManager, find_newest, list_checkpoints
from trainers.errors import CheckpointError, StaleAttemptError, TrainerError
from trainers.randomness import RandomNumbers
from trainers.ranks import Ranks, join_ranks, leave_ranks
from trainers.storage import FolderStorage, open_storage

from .strategies.conftest import Worlds

# pytest resets the filter that the module sets for itself.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ALONE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))


class Counter:
    """A state of one tensor and one number."""

    def __init__(self) -> None:
        self.values = torch.zeros(1000)
        self.count = 0

    def set(self, count: int) -> None:
        self.values.fill_(count)
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])
        self.count = state["count"]


def open_manager(path: Path, counter: Counter, attempt: int = 1, keep: int = 3) -> CheckpointManager:
    return CheckpointManager(
        FolderStorage(path), ALONE, attempt=attempt, keep=keep, shared={"counter": counter}, own={"own": Counter()}
    )


def save_steps(path: Path, *steps: int, attempt: int = 1, keep: int = 3) -> None:
    counter = Counter()
    manager = open_manager(path, counter, attempt, keep)
    for step in steps:
        counter.set(step)
        manager.save(step)
        manager.wait_for_copy()
        counter.set(-1)  # training continues while the background writes
    manager.wait()
    assert manager.step_committed == steps[-1]


def restore(path: Path, attempt: int = 2) -> int | None:
    counter = Counter()
    step = open_manager(path, counter, attempt).restore()
    assert counter.count == (step or 0) and bool((counter.values == counter.count).all())
    return step


def folder_of(path: Path, step: int) -> Path:
    return path / str(next(name for name in list_checkpoints(FolderStorage(path)) if name.step == step))


def test_newest_checkpoint_is_restored_and_an_empty_folder_restores_nothing(tmp_path: Path) -> None:
    assert restore(tmp_path) is None
    save_steps(tmp_path, 5, 10, attempt=2)
    assert restore(tmp_path) == 10


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "not json object", "corrupt", "short", "missing"])
def test_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(tmp_path, 5, 10)
    folder = folder_of(tmp_path, 10)
    manifest, shard = folder / "manifest.json", folder / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:40])
    elif damage == "not json object":
        manifest.write_text("[]")
    elif damage == "corrupt":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif damage == "short":
        shard.write_bytes(content[:-1])
    else:
        shard.unlink()
    assert restore(tmp_path) == 5
    assert f"skipping checkpoint `{folder.name}`" in capsys.readouterr().err


def test_all_checkpoints_damaged_means_a_fresh_start(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    (folder_of(tmp_path, 5) / "manifest.json").write_text("")
    assert restore(tmp_path) is None


def test_lower_attempt_is_refused_at_start_and_at_commit(tmp_path: Path) -> None:
    old = open_manager(tmp_path, Counter(), attempt=1)
    open_manager(tmp_path, Counter(), attempt=2)
    old.save(5)
    with pytest.raises(StaleAttemptError):
        old.wait()
    assert old.step_committed is None
    with pytest.raises(StaleAttemptError):
        open_manager(tmp_path, Counter(), attempt=1)
    assert restore(tmp_path, attempt=3) is None


def test_retention_keeps_the_last_and_removes_torn_ones(tmp_path: Path) -> None:
    save_steps(tmp_path, 5, 10)
    (folder_of(tmp_path, 5) / "manifest.json").unlink()
    save_steps(tmp_path, 15, 20, 25, attempt=2, keep=2)
    assert [name.step for name in list_checkpoints(FolderStorage(tmp_path))] == [25, 20]


def test_unwritable_checkpoint_is_an_error_at_the_next_wait(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, Counter())
    # A file where the checkpoint's folder should be.
    (tmp_path / f"step-00000005-attempt-0001-{manager._run}").touch()
    manager.save(5)
    with pytest.raises(CheckpointError, match="was not written"):
        manager.wait()
    assert manager.step_committed is None


def hold_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold back the copy of the state until the returned event is set."""
    is_released = threading.Event()
    copy = snapshot.copy_state

    def copy_late(value: Any) -> Any:
        assert is_released.wait(timeout=300)
        return copy(value)

    monkeypatch.setattr(snapshot, "copy_state", copy_late)
    return is_released


def test_save_returns_before_the_state_is_copied_and_wait_for_copy_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_released = hold_copies(monkeypatch)
    counter = Counter()
    counter.set(5)
    manager = open_manager(tmp_path, counter)
    manager.wait_for_copy()  # nothing to wait for
    manager.save(5)
    waiting = threading.Thread(target=manager.wait_for_copy)
    waiting.start()
    waiting.join(timeout=0.05)
    assert waiting.is_alive()
    is_released.set()
    waiting.join(timeout=300)
    counter.set(-1)
    manager.wait()
    assert restore(tmp_path) == 5


def test_buffers_that_the_next_pass_changes_are_those_of_the_saved_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next forward pass runs while the state is copied, and updates the statistics of BatchNorm."""
    is_released = hold_copies(monkeypatch)
    model, other = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    model(torch.ones(4, 3))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    manager = open_model(tmp_path, model, attempt=1)
    manager.save(1)
    model(torch.full((4, 3), 5.0))
    is_released.set()
    manager.wait_for_copy()
    manager.wait()
    assert open_model(tmp_path, other, attempt=2).restore() == 1
    assert all(torch.equal(value, saved[name]) for name, value in other.state_dict().items())
    assert not torch.equal(model.state_dict()["running_mean"], saved["running_mean"])


def open_model(path: Path, model: torch.nn.Module, *, attempt: int) -> CheckpointManager:
    shared = {"model": model}
    return CheckpointManager(
        FolderStorage(path), ALONE, attempt=attempt, keep=1, shared=shared, own={}, buffers=model.buffers
    )


def test_file_is_created_once(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}/deep")
    assert storage.create("a/b", b"first") and not storage.create("a/b", b"second")
    assert storage.read("a/b") == b"first" and storage.list_names("a") == ["b"]
    storage.delete("a")
    storage.delete("a")
    assert storage.read("a/b") is None and storage.checksum("a/b") is None and storage.list_names("a") == []


def test_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(TrainerError, match="no checkpoint storage for `ftp://`"):
        open_storage("ftp://bucket/path")


def test_checkpoint_of_another_shape_is_one_line_with_a_hint(tmp_path: Path) -> None:
    alone = Ranks(rank=0, world_size=1, device=torch.device("cpu"))

    def open_for(width: int, attempt: int) -> CheckpointManager:
        shared = {"model": torch.nn.Linear(width, 1)}
        return CheckpointManager(FolderStorage(tmp_path), alone, attempt=attempt, keep=3, shared=shared, own={})

    manager = open_for(3, 1)
    manager.save(5)
    manager.wait()
    with pytest.raises(
        CheckpointError, match=r"does not fit this model: .*\[1, 3\].*\n\nhint: use the `--model.*new folder"
    ):
        open_for(4, 2).restore()


def test_checkpoint_whose_description_conflicts_is_refused_before_it_is_read(tmp_path: Path) -> None:
    alone, model = Ranks(rank=0, world_size=1, device=torch.device("cpu")), torch.nn.Linear(3, 1)
    manager = CheckpointManager(
        FolderStorage(tmp_path),
        alone,
        attempt=1,
        keep=3,
        shared={"model": model},
        own={},
        about={"heads": 4},
        find_conflict=lambda about: f"{about['heads']} heads",
    )
    manager.save(5)
    manager.wait()
    changed = model.weight.detach().add_(1.0).clone()
    with pytest.raises(CheckpointError, match="does not fit this model: 4 heads\n\nhint: use the flags of the run"):
        manager.restore()
    assert torch.equal(model.weight, changed)


def test_run_on_a_cpu_continues_on_a_gpu_and_then_keeps_its_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint was refused as one of another model, because it lacks the generator of a GPU."""
    restored: list[int] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.full((16,), 7, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append(int(state[0])))
    for attempt, (kind, before, after) in enumerate([("cpu", None, []), ("cuda", 5, []), ("cuda", 10, [7])], start=1):
        own = RandomNumbers(torch.device(kind)).list_states()
        manager = CheckpointManager(
            FolderStorage(tmp_path), ALONE, attempt=attempt, keep=3, shared={"counter": Counter()}, own=own
        )
        assert (manager.restore(), restored) == (before, after)
        manager.save(5 * attempt)
        manager.wait()


class Undeletable(FolderStorage):
    """A bucket whose role may write but not delete."""

    def delete(self, path: str) -> None:
        raise PermissionError("AccessDenied")


def test_checkpoint_is_committed_even_if_old_ones_cannot_be_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, the save counted as failed, and the third one ended the run."""
    manager = CheckpointManager(Undeletable(tmp_path), ALONE, attempt=1, keep=1, shared={"counter": Counter()}, own={})
    for step in range(1, 7):
        manager.save(step)
        manager.wait()
        assert manager.step_committed == step
    assert capsys.readouterr().err.count("warning: old checkpoints were not removed: AccessDenied") == 1


def test_stale_attempt_removes_nothing_that_the_newer_one_may_be_reading(tmp_path: Path) -> None:
    """The newer attempt begins between the commit of the old one and its retention."""

    class Overtaken(FolderStorage):
        def create(self, path: str, content: bytes) -> bool:
            is_new = super().create(path, content)
            if path.startswith("step-00000010") and path.endswith("manifest.json"):
                super().create("attempts/0000000002", b"")
            return is_new

    save_steps(tmp_path, 5)
    counter = Counter()
    shared, own = {"counter": counter}, {"own": Counter()}
    manager = CheckpointManager(Overtaken(tmp_path), ALONE, attempt=1, keep=1, shared=shared, own=own)
    manager.save(10)
    manager.wait()
    assert [name.step for name in list_checkpoints(FolderStorage(tmp_path))] == [10, 5]


def test_damaged_checkpoints_take_no_place_of_those_that_are_kept(tmp_path: Path) -> None:
    """Otherwise, one good checkpoint would be left after a fallback, and none if that one was torn."""
    save_steps(tmp_path, 5, 90, 100)
    for step in (90, 100):
        (folder_of(tmp_path, step) / "__0_0.distcp").write_bytes(b"")
    counter = Counter()
    manager = open_manager(tmp_path, counter, attempt=2, keep=3)
    assert manager.restore() == 5
    for step in (10, 15):
        manager.save(step)
        manager.wait()
    assert [name.step for name in list_checkpoints(FolderStorage(tmp_path))] == [15, 10, 5]


def test_removal_that_is_interrupted_leaves_no_checkpoint_that_looks_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(FolderStorage):
        def delete(self, path: str) -> None:
            if not path.endswith("manifest.json"):
                raise OSError("the machine is preempted")
            super().delete(path)

    save_steps(tmp_path, 5)
    shared, own = {"counter": Counter()}, {"own": Counter()}
    manager = CheckpointManager(Interrupted(tmp_path), ALONE, attempt=1, keep=1, shared=shared, own=own)
    manager.save(10)
    manager.wait()
    assert not (folder_of(tmp_path, 5) / "manifest.json").exists() and folder_of(tmp_path, 5).is_dir()
    assert manager.step_committed == 10 and "old checkpoints were not removed" in capsys.readouterr().err


def test_manifest_whose_write_was_repeated_after_a_lost_answer_is_committed(tmp_path: Path) -> None:
    class Repeating(FolderStorage):
        def create(self, path: str, content: bytes) -> bool:
            return super().create(path, content) and not path.endswith("manifest.json")

    counter = Counter()
    counter.set(5)
    shared, own = {"counter": counter}, {"own": Counter()}
    manager = CheckpointManager(Repeating(tmp_path), ALONE, attempt=1, keep=3, shared=shared, own=own)
    manager.save(5)
    manager.wait()
    assert manager.step_committed == 5 and restore(tmp_path) == 5


def test_steps_beyond_eight_digits_are_newer(tmp_path: Path) -> None:
    save_steps(tmp_path, 99_999_999, 100_000_000)
    assert restore(tmp_path) == 100_000_000


class FullDisk(FolderStorage):
    """A disk on which a second checkpoint fits only if it is the only incomplete one."""

    is_full = False

    def open_writer(self, path: str) -> Any:
        writer = super().open_writer(path)
        writer.fs = FullFiles() if self.is_full else writer.fs
        return writer


class FullFiles(FileSystem):
    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            stream.write(b"a part")
            raise OSError(errno.ENOSPC, "No space left on device")


def test_checkpoint_that_did_not_fit_on_the_disk_leaves_no_files(tmp_path: Path) -> None:
    """Their space is what the next checkpoint needs; they used to stay until one was complete."""
    storage, counter = FullDisk(tmp_path), Counter()
    manager = CheckpointManager(storage, ALONE, attempt=1, keep=1, shared={"counter": counter}, own={"own": Counter()})
    manager.save(5)
    manager.wait()
    storage.is_full = True
    manager.save(10)
    with pytest.raises(CheckpointError, match="No space left"):
        manager.wait()
    assert [name.step for name in list_checkpoints(storage)] == [5]
    storage.is_full = False
    counter.set(15)
    manager.save(15)
    manager.wait()
    assert restore(tmp_path) == 15


def save_while_one_rank_has_no_memory(arguments: Sequence[str]) -> int:
    """Return 0 if all ranks fail the first save and complete the second one."""
    ranks = join_ranks(start_s=300.0, checkpoint_s=300.0)
    storage, counter = FolderStorage(Path(arguments[0])), Counter()
    shared, own = {"counter": counter}, {"own": Counter()}
    manager = CheckpointManager(storage, ranks, attempt=1, keep=1, shared=shared, own=own)
    copy = snapshot.copy_state

    def fail(value: Any) -> Any:
        raise MemoryError

    snapshot.copy_state = fail if ranks.rank == 1 else copy
    manager.save(1)
    with pytest.raises(CheckpointError, match="not copied on rank 1"):
        manager.wait()
    snapshot.copy_state = copy
    manager.save(2)
    manager.wait()
    found = find_newest(storage)
    leave_ranks()
    return 0 if found is not None and found[0].step == 2 and manager.step_committed == 2 else 1


def test_copy_that_fails_on_one_rank_fails_on_all_and_the_next_save_is_whole(worlds: Worlds, tmp_path: Path) -> None:
    """Before, the other ranks wrote this step together with the next one of the rank that had failed."""
    here = "tests.trainers.test_checkpoint:save_while_one_rank_has_no_memory"
    ended = worlds.call(tmp_path, here, [str(tmp_path / "checkpoints")], ranks=2)
    assert ended.codes == [0, 0], ended.errors
