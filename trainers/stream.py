"""Windows of token files that stay in a bucket: shuffled in blocks, fetched in chunks, addressed by global index.

An epoch is a shuffled sequence of chunks (adjacent windows of the files). A block is a run of consecutive chunks of
that sequence, and the windows of a block are shuffled among each other. With 2 windows per chunk and 2 chunks per
block, 8 windows may be read as 5 2 4 3 | 7 0 1 6: chunks 2 1 | 3 0, whose windows mix within their block.

The location of a sample is computed, so any rank of any world finds it; only this block and the next are on the disk.
"""

import dataclasses
import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from trainers.chunk_cache import ChunkCache, find_cache_folder
from trainers.config import DataConfig
from trainers.data import Batch, permute
from trainers.errors import TrainerError
from trainers.stream_source import UNFINISHED, UNFINISHED_HINT, ByteSource, open_source, probe_source

ABOUT = "tokens.json"


@dataclass(frozen=True, kw_only=True)
class ShuffleOrder:
    """The order in which `count` windows are read, for every epoch."""

    count: int
    chunk: int  # windows
    block: int  # chunks
    seed: int

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the chunk of a sample, given by its global index, and its position in the chunk."""
        epoch, place = divmod(sample, self.count)
        span = self.chunk * self.block
        first = place // span * span
        inside = permute(place - first, min(span, self.count - first), f"{self.seed}/{epoch}/{first}")
        position, offset = divmod(first + inside, self.chunk)
        return self._find_chunk(epoch, position), offset

    def find_block(self, sample: int, ahead: int = 0) -> list[int]:
        """Return the chunks of the block of a sample, or of the block `ahead` of it."""
        epoch, place = divmod(sample, self.count)
        blocks = -(-self.count // (self.chunk * self.block))
        epochs, index = divmod(place // (self.chunk * self.block) + ahead, blocks)
        last = min((index + 1) * self.block, -(-self.count // self.chunk))
        return [self._find_chunk(epoch + epochs, position) for position in range(index * self.block, last)]

    def _find_chunk(self, epoch: int, position: int) -> int:
        whole = self.count // self.chunk
        # A shorter chunk at the end of the data stays last, or the positions of all others would depend on it.
        return permute(position, whole, f"{self.seed}/{epoch}") if position < whole else position


class Shards:
    """The token files of a source as one sequence of windows of `context` tokens and the next one."""

    def __init__(self, source: ByteSource, sizes: Mapping[str, int], dtype: torch.dtype, context: int) -> None:
        """Use the files in `sizes`, in the order of their names."""
        self.source, self.dtype, self.context = source, dtype, context
        self._names = sorted(sizes)
        tokens = [sizes[name] // dtype.itemsize for name in self._names]
        self._ends = list(accumulate(max(0, (count - 1) // context) for count in tokens))
        self.window_count = self._ends[-1] if self._ends else 0

    def read(self, windows: range) -> bytes:
        """Return the bytes of consecutive whole windows; the token that two of them share is repeated."""
        width, parts, window = self.dtype.itemsize, [], windows.start
        while window < windows.stop:
            shard = bisect_right(self._ends, window)
            start = window - (self._ends[shard - 1] if shard else 0)
            count = min(windows.stop, self._ends[shard]) - window
            name, length = self._names[shard], (count * self.context + 1) * width
            try:
                content = self.source.read_range(name, start * self.context * width, length)
            except OSError as error:
                raise TrainerError(f"`--data.stream`: `{name}` cannot be read: {error}") from error
            if len(content) != length:
                raise TrainerError(f"`--data.stream`: `{name}` is shorter than it was when the run began")
            stride = self.context * width
            parts += [content[place * stride : (place + 1) * stride + width] for place in range(count)]
            window += count
        return b"".join(parts)


class StreamCorpus:
    """Samples from token files that are fetched as needed."""

    def __init__(
        self, shards: Shards, fingerprint: str, config: DataConfig, windows: range, *, is_prefetched: bool = True
    ) -> None:
        """Use the windows in the range `windows`; `is_prefetched` fetches the next block of chunks ahead."""
        self._shards, self._windows, self._is_prefetched = shards, windows, is_prefetched
        seed = config.seed
        window_bytes = (shards.context + 1) * shards.dtype.itemsize
        chunk = max(1, int(config.chunk_mib * 2**20) // window_bytes)
        self.order = ShuffleOrder(count=len(windows), chunk=chunk, block=config.shuffle_chunks, seed=seed)
        shape = f"{shards.context}/{seed}/{windows.start}-{windows.stop}/{chunk}x{config.shuffle_chunks}"
        self.fingerprint = f"{fingerprint}/{shape}"
        bytes_max = int(config.cache_gib * 2**30)
        # Ranks are in the same block or in adjacent ones, and each prefetches the next.
        needed = 3 * min(chunk * config.shuffle_chunks, len(windows)) * window_bytes
        if needed > bytes_max:
            raise TrainerError(
                f"three blocks of {config.shuffle_chunks} chunks need {needed / 2**30:.2f} GiB on the disk; raise "
                "`--data.cache_gib`, or lower `--data.shuffle_chunks` or `--data.chunk_mib`"
            )
        name = hashlib.sha256(f"{fingerprint}/{shards.context}/{chunk}/{windows}".encode()).hexdigest()[:16]
        folder = find_cache_folder(config.cache) / name
        self._cache = ChunkCache(folder, self._fetch, bytes_max=bytes_max, open_max=2 * config.shuffle_chunks)

    @property
    def window_count(self) -> int:
        """The number of windows in one epoch."""
        return len(self._windows)

    def read(self, sample_first: int, sample_count: int) -> Batch:
        """Return token ids [sample_count, context] and, in the same shape, the id that follows each of them."""
        rows = [self._read_window(*self.order.locate(sample_first + offset)) for offset in range(sample_count)]
        if self._is_prefetched:
            last = sample_first + sample_count - 1
            self._cache.prefetch([*self.order.find_block(last), *self.order.find_block(last, ahead=1)])
        windows = torch.stack(rows).long()
        return windows[:, :-1], windows[:, 1:]

    def _read_window(self, chunk: int, offset: int) -> Tensor:
        width = self._shards.context + 1
        return torch.frombuffer(
            self._cache.read(chunk),
            dtype=self._shards.dtype,
            offset=offset * width * self._shards.dtype.itemsize,
            count=width,
        )

    def _fetch(self, chunk: int) -> bytes:
        first = chunk * self.order.chunk
        return self._shards.read(self._windows[first : first + self.order.chunk])


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A source of token files, and the description of its ids."""

    source: ByteSource
    training: Mapping[str, int]  # sizes by name
    validation: Mapping[str, int]
    about: Mapping[str, object]  # the content of `tokens.json`, {} if there is none
    fingerprint: str


def open_stream(url: str) -> Stream:
    """List the token files of a bucket or folder. Raises TrainerError if there are none."""
    source = open_source(url)
    try:
        listed = source.list_sizes()
        sizes = {name: size for name, size in listed.items() if name.endswith(".bin")}
        about = json.loads(source.read_range(ABOUT, 0, listed[ABOUT])) if ABOUT in listed else {}
        fingerprint = probe_source(source, sizes)
    except (OSError, ValueError) as error:
        raise TrainerError(f"`--data.stream {url}` cannot be read: {error}") from error
    if UNFINISHED in listed:
        raise TrainerError(f"the token files of `--data.stream {url}` are incomplete\n\n{UNFINISHED_HINT}")
    validation = {name: size for name, size in sizes.items() if name.startswith("val")}
    training = {name: size for name, size in sizes.items() if name not in validation}
    if not training:
        raise TrainerError(
            f"`{url}` has no token file to train on\n\n"
            "hint: `python -m trainers.prepare TEXT --output tokens` creates them; copy that folder there"
        )
    return Stream(source=source, training=training, validation=validation, about=about, fingerprint=fingerprint)


def open_stream_corpora(
    config: DataConfig, stream: Stream, dtype: torch.dtype, context: int
) -> tuple[StreamCorpus, StreamCorpus | None]:
    """Return the samples for training, and those for evaluation if any are kept."""
    shards = Shards(stream.source, stream.training, dtype, context)
    kept = 0 if stream.validation else int(shards.window_count * config.validation_share)
    split = shards.window_count - kept
    if split <= 0:
        raise TrainerError(f"the data of `--data.stream` is shorter than one window of {context + 1} tokens")
    training = StreamCorpus(shards, stream.fingerprint, config, range(split))
    held = Shards(stream.source, stream.validation, dtype, context) if stream.validation else shards
    windows = range(held.window_count) if stream.validation else range(split, shards.window_count)
    if not windows:
        return training, None
    fingerprint = f"validation-{stream.fingerprint}" if stream.validation else stream.fingerprint
    few = dataclasses.replace(config, seed=0, shuffle_chunks=1)  # an evaluation reads few windows, the same each time
    return training, StreamCorpus(held, fingerprint, few, windows, is_prefetched=False)
