"""Checkpoints are written, torn, corrupted and fenced on real files."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers import snapshot
from trainers.checkpoint import CheckpointManager, list_checkpoints
from trainers.errors import CheckpointError, StaleAttemptError, TrainerError
from trainers.ranks import Ranks
from trainers.storage import FolderStorage, open_storage

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
        manager.settle()
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


def test_save_returns_before_the_state_is_copied_and_settle_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_released = hold_copies(monkeypatch)
    counter = Counter()
    counter.set(5)
    manager = open_manager(tmp_path, counter)
    manager.settle()  # nothing to wait for
    manager.save(5)
    settling = threading.Thread(target=manager.settle)
    settling.start()
    settling.join(timeout=0.05)
    assert settling.is_alive()
    is_released.set()
    settling.join(timeout=300)
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
    manager.settle()
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
    with pytest.raises(CheckpointError, match=r"does not fit this model: .*\[1, 3\].*\n\nhint: use the `--model"):
        open_for(4, 2).restore()
