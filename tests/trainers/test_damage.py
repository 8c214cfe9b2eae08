"""Twenty checkpoints with a torn or flipped part: none is loaded, none is fatal."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainers.checkpoint import CheckpointManager, list_checkpoints
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
