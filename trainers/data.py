"""The samples of a run and their order.

The position of a sample depends only on its global index, never on the rank or the world size that reads it.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from trainers.errors import TrainerError

# Balanced Feistel networks are hard to distinguish from random from four rounds on (Luby and Rackoff, 1988).
ROUND_COUNT = 4

Batch = Any  # a pair (inputs, targets) or a dict of tensors, possibly nested; dimension 0 is the sample


class Samples(Protocol):
    """An endless sequence of samples with random access by global index, for any rank."""

    fingerprint: str  # equal for sequences with the same samples in the same order

    def read(self, sample_first: int, sample_count: int) -> Batch:
        """Return the samples of consecutive global indexes as one batch, on the CPU."""
        ...


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return the batch with `change` applied to every tensor; other values are kept."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(map_tensors(value, change) for value in batch)
    return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device. A copy from pinned memory does not block the caller."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def split_batch(batch: Batch) -> tuple[Any, Any]:
    """Return the inputs of the model and those of the loss: the two parts of a pair; any other batch is both."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, batch


class Corpus:
    """Tokens cut into windows that are shuffled every epoch; finding a sample takes O(1)."""

    def __init__(self, shards: Sequence[Tensor], fingerprint: str, context: int, seed: int, windows: range) -> None:
        """Cut each shard, a 1-D tensor of token ids, into windows of `context` + 1 tokens that overlap by one.

        Use only the windows in the range `windows`. The fingerprint includes `seed`, which sets the order.
        """
        self._shards, self._context, self._seed = shards, context, seed
        self._windows = windows
        self._ends = list(accumulate(count_windows(shard, context) for shard in shards))
        if not windows:
            longest = max((len(shard) for shard in shards), default=0)
            raise TrainerError(
                f"the data has {longest} tokens in a row; a context of {context} needs {context + 1} "
                "for each window, and at least one window"
            )
        assert windows.stop <= self._ends[-1]
        self.fingerprint = f"{fingerprint}/{context}/{seed}/{windows.start}-{windows.stop}"

    @property
    def window_count(self) -> int:
        """The number of windows in one epoch."""
        return len(self._windows)

    def read(self, sample_first: int, sample_count: int) -> Batch:
        """Return token ids [sample_count, context] and, in the same shape, the id that follows each of them."""
        rows = [self._window(self.window_of(sample_first + offset)) for offset in range(sample_count)]
        windows = torch.stack(rows).long()
        return windows[:, :-1], windows[:, 1:]

    def window_of(self, sample: int) -> int:
        """Return the index of the window for a sample, given by its global index."""
        epoch, place = divmod(sample, len(self._windows))
        return self._windows[permute(place, len(self._windows), f"{self._seed}/{epoch}")]

    def _window(self, window: int) -> Tensor:
        shard = bisect_right(self._ends, window)
        start = (window - (self._ends[shard - 1] if shard else 0)) * self._context
        return self._shards[shard][start : start + self._context + 1]


class Prefetch:
    """Read the samples of the next step, one batch ahead, in a thread."""

    def __init__(self, samples: Samples, batch: int, *, is_pinned: bool) -> None:
        """Read one global batch of `batch` samples ahead; `is_pinned` copies them to pinned memory, for a GPU."""
        self._samples, self._batch, self._is_pinned = samples, batch, is_pinned
        self._ahead: dict[tuple[int, int], Future[Batch]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self.fingerprint = samples.fingerprint

    def read(self, sample_first: int, sample_count: int) -> Batch:
        """Return the samples that were read ahead, or read them now. The result is the same."""
        future = self._ahead.pop((sample_first, sample_count), None)
        # Drop reads of earlier samples, which will not be used.
        self._ahead = {key: pending for key, pending in self._ahead.items() if key[0] >= sample_first}
        following = sample_first + self._batch
        self._ahead[following, sample_count] = self._thread.submit(self._read, following, sample_count)
        return future.result() if future else self._read(sample_first, sample_count)

    def _read(self, sample_first: int, sample_count: int) -> Batch:
        batch = self._samples.read(sample_first, sample_count)
        # `pin_memory` preserves strides, and torch copies a strided tensor to a GPU through ordinary memory, for which
        # the host waits until the device has finished the steps before.
        return map_tensors(batch, lambda tensor: tensor.contiguous().pin_memory()) if self._is_pinned else batch


def split_windows(window_count: int, validation_share: float) -> tuple[range, range]:
    """Return the windows to train on and, from the end of the data, those kept for evaluation."""
    kept = int(window_count * validation_share)
    return range(window_count - kept), range(window_count - kept, window_count)


def count_windows(shard: Tensor, context: int) -> int:
    """Return the number of whole windows in a shard, each with the token after it."""
    return max(0, (len(shard) - 1) // context)


def samples_of_rank(sample_first: int, batch: int, rank: int, world_size: int) -> range:
    """Return the global indexes of a rank's samples in a step. Ranks take consecutive parts of the batch, in order."""
    if batch < world_size:
        raise TrainerError(f"a batch of {batch} leaves some of {world_size} ranks without a sample")
    return range(sample_first + batch * rank // world_size, sample_first + batch * (rank + 1) // world_size)


def permute(place: int, count: int, key: str) -> int:
    """Return the position at which a keyed shuffle of `count` cards puts the card at `place`, without shuffling.

    A Feistel network permutes the next power of four; a result past the end is permuted again until it falls inside.
    """
    assert 0 <= place < count
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    # The walk follows a cycle that contains `place`, so it ends within 4 * count steps, on average after 4.
    for _ in range(4 * count + 4):
        left, right = place >> half_bits, place & mask
        for turn in range(ROUND_COUNT):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        place = left << half_bits | right
        if place < count:
            return place
    raise AssertionError("the permutation left its cycle")
