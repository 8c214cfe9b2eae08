"""Twenty checkpoints with a torn or flipped part: none is loaded, none is fatal."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainers.checkpoint import CheckpointManager, list_checkpoints
from trainers.manifest import (
    MANIFEST_VERSION,
    CheckpointName,
    DamagedFile,
    FileChecksum,
    check_seal,
    divide,
    read_manifest,
    remove_old,
    seal_manifest,
)
from trainers.ranks import Ranks
from trainers.storage import FolderStorage

from .test_checkpoint import Counter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ALONE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
SEED = 20261121
DAMAGES = 20


def flip(content: bytearray, draw: random.Random) -> None:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def cut(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content)) :]


def zero(content: bytearray, draw: random.Random) -> None:
    """Zero a part, as a file system leaves a page that was never written."""
    begin = draw.randrange(len(content))
    end = min(len(content), begin + 4096)
    while not any(content[begin:end]):  # zeros already: nothing would be damaged
        begin = draw.randrange(len(content))
        end = min(len(content), begin + 4096)
    content[begin:end] = bytes(end - begin)


def swap(content: bytearray, draw: random.Random) -> None:
    """Swap two parts: every byte is one that was written."""
    half = len(content) // 2
    if content[:half] == content[half : 2 * half]:
        flip(content, draw)
    content[:half], content[half : 2 * half] = content[half : 2 * half], content[:half]


KINDS: list[Callable[[bytearray, random.Random], None]] = [flip, flip, cut, zero, swap]


def test_twenty_damaged_checkpoints_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counter = Counter()
    manager = CheckpointManager(
        FolderStorage(tmp_path), ALONE, attempt=1, keep=99, shared={"counter": counter}, own={"own": Counter()}
    )
    for step in range(1, DAMAGES + 2):
        counter.values.uniform_()
        counter.count = step
        manager.save(step)
        manager.wait_for_copy()
    manager.wait()
    newest_first = list_checkpoints(FolderStorage(tmp_path))
    draw = random.Random(SEED)
    damages = []
    for place, name in enumerate(newest_first[:DAMAGES]):
        folder = tmp_path / str(name)
        file = sorted(folder.iterdir())[place % 3]
        content = bytearray(file.read_bytes())
        kind = draw.choice(KINDS)
        kind(content, draw)
        assert bytes(content) != file.read_bytes()
        file.write_bytes(content)
        damages.append(f"{kind.__name__} {file.name}")
    assert len({each.split()[1] for each in damages}) == 3
    found = Counter()
    again = CheckpointManager(
        FolderStorage(tmp_path), ALONE, attempt=2, keep=99, shared={"counter": found}, own={"own": Counter()}
    )
    assert (again.restore(), found.count) == (1, 1), damages
    warnings = capsys.readouterr().err
    assert all(f"skipping checkpoint `{name}`" in warnings for name in newest_first[:DAMAGES])
    print(f"{DAMAGES} of {DAMAGES} damaged checkpoints passed over, seed {SEED}: {', '.join(damages)}")


class MemoryStorage:
    """Checkpoints by name: those with True have a manifest. `deleted` in order."""

    def __init__(self) -> None:
        self.checkpoints: dict[str, bool] = {}
        self.deleted: list[str] = []

    def list_names(self, path: str) -> list[str]:
        return ["attempts", *self.checkpoints]

    def read(self, path: str) -> bytes | None:
        return b"{}" if self.checkpoints[path.partition("/")[0]] else None

    def delete(self, path: str) -> None:
        self.deleted.append(path)


def name_checkpoint(step: int, attempt: int) -> CheckpointName:
    return CheckpointName(step=step, attempt=attempt, run="0123abcd")


def remove(keep: int, *checkpoints: tuple[int, int, bool], damaged: tuple[int, int] | None = None) -> list[str]:
    """Remove after the save of step 50 by attempt 2; return the steps and attempts removed, and how."""
    storage = MemoryStorage()
    storage.checkpoints = {str(name_checkpoint(step, attempt)): is_whole for step, attempt, is_whole in checkpoints}
    remove_old(
        storage,  # type: ignore[arg-type]
        newest=name_checkpoint(50, 2),
        keep=keep,
        damaged=() if damaged is None else {name_checkpoint(*damaged)},
    )
    return storage.deleted


def show(step: int, attempt: int) -> list[str]:
    name = str(name_checkpoint(step, attempt))
    return [f"{name}/manifest.json", name]


def test_checkpoints_that_are_kept_are_the_newest_complete_ones() -> None:
    """The manifest goes first: half a removal must leave an incomplete checkpoint, not a damaged one."""
    mine = (50, 2, True)
    assert remove(2, mine, (40, 1, True), (30, 1, True)) == show(30, 1)
    assert remove(1, mine, (40, 1, True), (30, 1, True)) == [*show(40, 1), *show(30, 1)]
    assert remove(2, mine, (45, 1, False), (40, 1, True)) == show(45, 1), "an interrupted save counts as none"
    assert remove(2, mine, (40, 1, True), (30, 1, True), damaged=(40, 1)) == show(40, 1)


def test_checkpoints_of_others_that_may_be_at_work_are_not_removed() -> None:
    assert remove(1, (50, 2, True), (60, 3, False), (10, 3, True)) == [], "of a later attempt"
    assert remove(1, (50, 2, True), (60, 2, False)) == [], "which the others of this attempt are writing"


def test_step_decides_which_checkpoint_is_newer() -> None:
    storage = MemoryStorage()
    names = [name_checkpoint(9, 3), name_checkpoint(20, 1), name_checkpoint(20, 2)]
    storage.checkpoints = {str(name): True for name in names}
    assert list_checkpoints(storage) == [names[2], names[1], names[0]]  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_file_is_checked_by_exactly_one_rank(ranks: int) -> None:
    files = [f"__{number}_0.distcp" for number in range(5)]
    parts = [divide(files, rank=rank, world_size=ranks) for rank in range(ranks)]
    assert sorted(file for part in parts for file in part) == files
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_seal_of_a_file_is_its_checksum_and_its_size() -> None:
    seal = FileChecksum(sha256="ab", size=3)
    check_seal("x", seal, ("ab", 3))
    for actual in (("ab", 4), ("ac", 3), None):
        with pytest.raises(DamagedFile):
            check_seal("x", seal, actual)


def test_manifest_whose_content_was_changed_is_damaged() -> None:
    """A flipped bit may be another number in valid JSON."""
    about = {"version": MANIFEST_VERSION, "world_size": 2, "shared": [], "own": [], "files": {}, "about": {}}
    sealed = {**about, "seal": seal_manifest(about)}
    storage = MemoryStorage()
    storage.read = lambda path: json.dumps(sealed).encode()  # type: ignore[method-assign]
    assert read_manifest(storage, name_checkpoint(1, 1)).world_size == 2  # type: ignore[arg-type]
    sealed["world_size"] = 3
    with pytest.raises(DamagedFile, match="its own checksum"):
        read_manifest(storage, name_checkpoint(1, 1))  # type: ignore[arg-type]
