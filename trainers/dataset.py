"""Samples of a map-style Dataset, shuffled every epoch and addressed by their index in the whole run."""

import hashlib
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from trainers.data import Batch, Samples, map_tensors, permute
from trainers.errors import TrainerError

# Samples are read ahead in a thread, but datasets that share an open file, as for training and validation, must not be
# read by two threads at once.
ONE_READER = threading.Lock()


class DatasetSamples:
    """An endless sequence of the items of a dataset."""

    def __init__(self, dataset: Any, *, seed: int, collate: Callable[[list[Any]], Any] | None = None) -> None:
        """Shuffle `dataset`, any object with `len()` and `[index]`. An empty one raises TrainerError."""
        self._dataset, self._seed, self._collate = dataset, seed, collate
        try:
            self._count = len(dataset)
        except TypeError:
            raise TrainerError(
                f"`{type(dataset).__name__}` has no length. Exact resume needs a map-style Dataset, with `len()` and "
                "`[index]`, or an object with `fingerprint` and `read(first, count)`"
            ) from None
        if not hasattr(dataset, "__getitem__"):
            raise TrainerError(
                f"`{type(dataset).__name__}` has no `[index]`. Pass the Dataset itself instead of a DataLoader: "
                "`--train.batch` and `--train.micro_batch` set the sizes, and `collate` makes a batch from items"
            )
        if not self._count:
            raise TrainerError("the dataset is empty")
        self.fingerprint = f"{describe(self.read(0, 1))}/{self._count}/{seed}"

    def read(self, sample_first: int, sample_count: int) -> Batch:
        """Return items as one batch. Their order within an epoch depends only on the seed and the epoch."""
        with ONE_READER:
            items = [self._dataset[self._find_index(sample_first + offset)] for offset in range(sample_count)]
            if self._collate is not None:
                return self._collate(items)
            from torch.utils.data import default_collate

            return default_collate(items)

    def _find_index(self, sample: int) -> int:
        epoch, place = divmod(sample, self._count)
        return permute(place, self._count, f"{self._seed}/{epoch}")


def open_samples(source: Any, *, seed: int, collate: Callable[[list[Any]], Any] | None = None) -> Samples:
    """Return the samples of a dataset; `source` may also be samples already, or a function that returns either."""
    if callable(source) and not hasattr(source, "__getitem__") and not hasattr(source, "read"):
        source = source()
    if hasattr(source, "read") and hasattr(source, "fingerprint"):
        samples: Samples = source
        return samples
    return DatasetSamples(source, seed=seed, collate=collate)


def describe(batch: Batch) -> str:
    """Return a digest of names, shapes and dtypes. Values are left out: items may be augmented at random."""
    parts: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        parts.append(f"{tensor.dtype}{list(tensor.shape[1:])}")
        return tensor

    map_tensors(batch, note)
    keys = sorted(map(str, batch)) if isinstance(batch, dict) else []
    return hashlib.sha256(" ".join([*keys, *parts]).encode()).hexdigest()[:16]
