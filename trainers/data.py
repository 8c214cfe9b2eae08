"""The training text and its order.

A sample's place depends on its global index only, never on the rank or world size that reads it.
"""

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from trainers.config import DataConfig
from trainers.errors import TrainerError

# Balanced Feistel networks are hard to tell from random from four rounds on (Luby and Rackoff, 1988).
ROUND_COUNT = 4


class Corpus:
    """A text cut into windows, shuffled anew every epoch; any sample is found in O(1)."""

    def __init__(self, text: bytes, context: int, seed: int) -> None:
        """Cut `text` into windows of `context` bytes and the byte after each."""
        self._context = context
        self._seed = seed
        self.window_count = (len(text) - 1) // context
        if self.window_count < 1:
            raise TrainerError(f"the text has {len(text)} bytes; a context of {context} needs {context + 1}")
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.fingerprint = hashlib.sha256(text).hexdigest()

    def windows(self, sample_first: int, sample_count: int) -> Tensor:
        """Samples of consecutive global indexes, `[count, context + 1]` byte ids."""
        starts = [self.window_of(sample_first + each) * self._context for each in range(sample_count)]
        return torch.stack([self._bytes[start : start + self._context + 1] for start in starts]).long()

    def window_of(self, sample: int) -> int:
        """The window that the sample of this global index shows."""
        epoch, place = divmod(sample, self.window_count)
        return permute(place, self.window_count, f"{self._seed}/{epoch}")


def samples_of_rank(sample_first: int, batch: int, rank: int, world_size: int) -> range:
    """The global indexes that one rank reads of a step's batch: ranks in a row read it in order, without gaps."""
    if batch < world_size:
        raise TrainerError(f"a batch of {batch} leaves some of {world_size} ranks without a sample")
    return range(sample_first + batch * rank // world_size, sample_first + batch * (rank + 1) // world_size)


def permute(place: int, count: int, key: str) -> int:
    """Where a keyed shuffle of `count` cards puts the card at `place`, without shuffling them.

    A Feistel network permutes the next power of four; a result past the end walks on until it falls inside.
    """
    assert 0 <= place < count
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    # The walk follows a cycle that holds `place` itself, so it ends within 4 * count steps; 4 on average.
    for _ in range(4 * count + 4):
        left, right = place >> half_bits, place & mask
        for turn in range(ROUND_COUNT):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        place = left << half_bits | right
        if place < count:
            return place
    raise AssertionError("a permutation did not come back to where it began")


def read_text(config: DataConfig) -> bytes:
    """The named file, or text that every Python brings along: its language reference and some of its library."""
    if config.path:
        return Path(config.path).read_bytes()
    # Read as files rather than imported: the text is the same, and no module runs.
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("pydoc_data/topics.py", "argparse.py", "datetime.py", "decimal.py", "typing.py", "this.py")
    found = [path for path in (library / name for name in names) if path.exists()]
    return b"\n".join(path.read_bytes() for path in found)
