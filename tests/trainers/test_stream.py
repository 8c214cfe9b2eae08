"""Data that is fetched while it is needed: each window once an epoch, each chunk once a node."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from trainers.chunk_cache import ChunkCache
from trainers.config import Config, DataConfig, find_problem
from trainers.data import Batch
from trainers.errors import TrainerError
from trainers.stream import Shards, ShuffleOrder, StreamCorpus, open_stream
from trainers.stream_source import FolderSource
from trainers.tokens import open_corpora, open_tokens

from .strategies.conftest import Worlds, read_lines, write_documents

CONTEXT = 8
SMALL = {"chunk_mib": 9 * 2 * 5 / 2**20, "shuffle_chunks": 3, "cache_gib": 1.0}  # 5 windows of 9 uint16 a chunk


@settings(max_examples=examples(60))
@given(count=st.integers(1, 200), chunk=st.integers(1, 12), block=st.integers(1, 5), epoch=st.integers(0, 3))
def test_epoch_shows_each_window_once_and_a_block_its_own_chunks_only(
    count: int, chunk: int, block: int, epoch: int
) -> None:
    order = ShuffleOrder(count=count, chunk=chunk, block=block, seed=7)
    samples = range(epoch * count, (epoch + 1) * count)
    shown = [order.locate(sample) for sample in samples]
    assert sorted(part * chunk + offset for part, offset in shown) == list(range(count))
    for sample, (part, _) in zip(samples, shown, strict=True):
        assert part in order.find_block(sample)
    following = order.find_block(samples.start, ahead=1)
    assert following == order.find_block(samples.start + min(chunk * block, count))


def test_each_epoch_and_each_seed_has_its_own_order_within_a_block() -> None:
    orders = {
        tuple(ShuffleOrder(count=30, chunk=30, block=1, seed=seed).locate(30 * epoch + place) for place in range(30))
        for seed in (7, 8)
        for epoch in range(3)
    }
    assert len(orders) == 6


class Counting(FolderSource):
    """A folder that counts requests."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: Counter[tuple[str, int]] = Counter()

    def read_range(self, name: str, start: int, length: int) -> bytes:
        self.requests[name, start] += 1
        return super().read_range(name, start, length)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name, first, count in (("train-0", 0, 403), ("train-1", 1000, 90), ("train-2", 2000, 7), ("val-0", 5000, 100)):
        ids = torch.arange(first, first + count).to(torch.uint16)
        (folder / f"{name}.bin").write_bytes(bytes(ids.view(torch.uint8).tolist()))
    (folder / "tokens.json").write_text(json.dumps({"dtype": "uint16", "tokenizer": "bytes", "vocabulary": 9000}))
    return folder


def open_corpus(tokens: Path, cache: Path, source: FolderSource | None = None) -> StreamCorpus:
    stream = open_stream(str(tokens))
    shards = Shards(source or stream.source, stream.training, torch.uint16, CONTEXT)
    config = DataConfig(cache=str(cache), **SMALL)
    return StreamCorpus(shards, stream.fingerprint, config, range(shards.window_count), is_prefetched=False)


def test_windows_are_those_of_the_files_and_none_spans_two(tokens: Path, tmp_path: Path) -> None:
    corpus = open_corpus(tokens, tmp_path / "cache")
    assert corpus.window_count == 50 + 11 + 0
    inputs, targets = corpus.read(0, corpus.window_count)
    assert bool((targets == inputs + 1).all())
    assert sorted(inputs[:, 0].tolist()) == [*range(0, 400, 8), *range(1000, 1088, 8)]


@pytest.mark.parametrize(("count", "windows"), [(0, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_a_window_needs_the_token_after_it_in_its_own_file(tmp_path: Path, count: int, windows: int) -> None:
    ids = torch.arange(count).to(torch.uint16)
    (tmp_path / "a.bin").write_bytes(bytes(ids.view(torch.uint8).tolist()))
    (tmp_path / "b.bin").write_bytes(bytes(range(2 * 9)))
    shards = Shards(FolderSource(tmp_path), {"a.bin": 2 * count, "b.bin": 18}, torch.uint16, CONTEXT)
    assert shards.window_count == windows + 1
    assert len(shards.read(range(shards.window_count))) == 2 * (CONTEXT + 1) * (windows + 1)


def test_any_rank_reads_the_same_sample_at_any_time(tokens: Path, tmp_path: Path) -> None:
    whole = open_corpus(tokens, tmp_path / "cache").read(30, 60)[0]
    other = open_corpus(tokens, tmp_path / "elsewhere")  # of another world, on another node, after a resume
    parts = [other.read(30 + 7 * place, min(7, 60 - 7 * place))[0] for place in range(9)]
    assert torch.equal(torch.cat(parts), whole)


def test_successor_of_a_dead_rank_fetches_nothing_twice(tokens: Path, tmp_path: Path) -> None:
    first, second = Counting(tokens), Counting(tokens)
    open_corpus(tokens, tmp_path / "cache", first).read(0, 40)
    corpus = open_corpus(tokens, tmp_path / "cache", second)
    corpus.read(0, 40)
    assert first.requests and not second.requests
    corpus.read(40, 21)
    assert not set(first.requests) & set(second.requests) and set((first.requests + second.requests).values()) == {1}


def test_chunk_that_a_crash_left_damaged_is_fetched_again(tokens: Path, tmp_path: Path) -> None:
    expected = open_corpus(tokens, tmp_path / "cache").read(0, 61)
    files = sorted((tmp_path / "cache").rglob("*.chunk"))
    files[0].write_bytes(files[0].read_bytes()[:-40])
    files[1].write_bytes(b"")
    content = bytearray(files[2].read_bytes())
    content[3] ^= 1
    files[2].write_bytes(content)
    source = Counting(tokens)
    found = open_corpus(tokens, tmp_path / "cache", source).read(0, 61)
    assert torch.equal(found[0], expected[0]) and source.requests.total() >= 3


def test_next_block_is_fetched_ahead_and_failures_of_that_are_left_to_the_read(tmp_path: Path) -> None:
    fetched, is_broken = threading.Semaphore(0), True

    def fetch(chunk: int) -> bytes:
        fetched.release()
        if is_broken:
            raise TrainerError("no network")
        return bytes([chunk]) * 10

    cache = ChunkCache(tmp_path, fetch, bytes_max=10_000, open_max=2)
    cache.prefetch([1, 2])
    for _ in range(2):
        assert fetched.acquire(timeout=300)
    with pytest.raises(TrainerError, match="no network"):
        cache.read(1)
    is_broken = False
    assert cache.read(1)[:10] == bytes([1]) * 10


def test_chunk_that_another_rank_is_fetching_is_not_fetched_ahead(tmp_path: Path) -> None:
    calls: list[int] = []

    def fetch(chunk: int) -> bytes:
        calls.append(chunk)
        return b"x"

    cache = ChunkCache(tmp_path, fetch, bytes_max=10_000, open_max=2)
    with (tmp_path / "5.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache._ensure(5, is_waiting=False)
        assert not calls
    cache._ensure(5, is_waiting=False)
    cache._ensure(5, is_waiting=True)
    assert calls == [5]


def test_least_recently_used_chunks_make_room(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, lambda chunk: bytes([chunk]) * 68, bytes_max=300, open_max=1)
    for chunk in range(6):
        assert cache.read(chunk)[0] == chunk
    kept = {int(path.stem) for path in tmp_path.glob("*.chunk")}
    assert kept == {3, 4, 5}


def test_chunks_from_before_the_clock_was_set_back_make_room_for_those_in_use(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, lambda chunk: bytes([chunk]) * 68, bytes_max=300, open_max=1)
    later_s = time.time() + 3600
    for chunk in range(6):
        cache.read(chunk)
        if chunk < 3:
            os.utime(tmp_path / f"{chunk}.chunk", (later_s, later_s))
    assert {int(path.stem) for path in tmp_path.glob("*.chunk")} == {3, 4, 5}


def test_chunks_are_read_from_memory_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk ended the run, although it needed the disk only to save requests."""
    fetched: list[int] = []

    def fetch(chunk: int) -> bytes:
        fetched.append(chunk)
        return bytes([chunk]) * 68

    cache, write, capacity = ChunkCache(tmp_path, fetch, bytes_max=300, open_max=1), Path.write_bytes, 210

    def write_while_there_is_space(path: Path, content: bytes) -> int:
        if sum(each.stat().st_size for each in tmp_path.iterdir()) + len(content) > capacity:
            write(path, b"a part")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_while_there_is_space)
    for chunk in range(4):  # two of the same size fit
        assert cache.read(chunk)[:68] == bytes([chunk]) * 68
    assert capsys.readouterr().err == "" and fetched == [0, 1, 2, 3]
    capacity = 0
    for chunk in (4, 5, 4):
        assert cache.read(chunk)[:68] == bytes([chunk]) * 68
        cache.prefetch([chunk + 1])
    assert capsys.readouterr().err.count("is full") == 1 and fetched == [0, 1, 2, 3, 4, 5, 4]
    assert not list(tmp_path.glob("*.partial"))
    capacity = 300
    assert cache.read(6)[0] == 6 and (tmp_path / "6.chunk").exists() and not cache._is_full


def test_chunk_that_another_rank_deletes_while_it_is_written_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rank finds the disk full, and makes room."""
    cache = ChunkCache(tmp_path, lambda chunk: bytes([chunk]) * 68, bytes_max=300, open_max=1)
    other = ChunkCache(tmp_path, lambda chunk: b"", bytes_max=300, open_max=1)
    write = Path.write_bytes
    deleted: list[Path] = []

    def write_and_be_deleted(path: Path, content: bytes) -> int:
        count = write(path, content)
        if not deleted:
            deleted.append(path)
            other._make_room(300)
        return count

    monkeypatch.setattr(Path, "write_bytes", write_and_be_deleted)
    assert cache.read(5)[:68] == bytes([5]) * 68
    assert deleted and (tmp_path / "5.chunk").exists()


def test_language_model_s_data_is_streamed_with_its_validation_files(tokens: Path, tmp_path: Path) -> None:
    config = DataConfig(stream=str(tokens), cache=str(tmp_path / "cache"), **SMALL)
    opened = open_tokens(config)
    assert (opened.vocabulary, opened.separator) == (9000, 0)
    training, validation = open_corpora(config, opened, CONTEXT)
    assert validation is not None and validation.window_count == 12
    assert int(validation.read(0, 12)[0].min()) == 5000 and int(training.read(0, 61)[0].max()) < 5000
    (tokens / "val-0.bin").unlink()
    kept = DataConfig(stream=str(tokens), cache=str(tmp_path / "cache"), validation_share=0.2, **SMALL)
    training, validation = open_corpora(kept, open_tokens(kept), CONTEXT)
    assert validation is not None

    def starts(batch: Batch) -> set[int]:
        return set(batch[0][:, 0].tolist())

    assert not starts(training.read(0, 49)) & starts(validation.read(0, 12))


def test_chunks_have_the_size_that_was_asked_for_and_the_next_block_is_asked_for_ahead(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(stream=str(tokens), cache=str(tmp_path / "cache"), **SMALL)
    training, _ = open_corpora(config, open_tokens(config), CONTEXT)
    assert isinstance(training, StreamCorpus)
    assert (training.order.chunk, training.order.block) == (5, 3)
    asked: list[list[int]] = []
    monkeypatch.setattr(ChunkCache, "prefetch", lambda cache, chunks: asked.append(list(chunks)))
    training.read(0, 2)
    assert asked == [[*training.order.find_block(0), *training.order.find_block(15)]]


def test_an_evaluation_reads_the_same_windows_whatever_the_seed_of_the_training(tokens: Path, tmp_path: Path) -> None:
    read = []
    for seed in (1, 2):
        config = DataConfig(stream=str(tokens), cache=str(tmp_path / "cache"), seed=seed, **SMALL)
        training, validation = open_corpora(config, open_tokens(config), CONTEXT)
        assert validation is not None
        read.append((training.read(0, 10)[0].tolist(), validation.read(0, 5)[0].tolist()))
    assert read[0][0] != read[1][0] and read[0][1] == read[1][1]


def test_fingerprint_differs_by_the_content_and_between_training_and_evaluation(tokens: Path, tmp_path: Path) -> None:
    def fingerprint() -> tuple[str, str]:
        config = DataConfig(stream=str(tokens), cache=str(tmp_path / "cache"), **SMALL)
        training, validation = open_corpora(config, open_tokens(config), CONTEXT)
        assert validation is not None
        return training.fingerprint, validation.fingerprint

    before = fingerprint()
    (tokens / "train-0.bin").write_bytes(bytes(806))  # of the same size
    after = fingerprint()
    assert len({*before, *after}) == 4, "a resumed run would read other tokens without notice"


def test_three_blocks_must_fit_on_the_disk(tokens: Path, tmp_path: Path) -> None:
    block = 9 * 2 * 5 * 3
    for share, is_enough in ((3.0, True), (2.9, False)):
        values = {**SMALL, "cache_gib": share * block / 2**30}
        config = DataConfig(stream=str(tokens), cache=str(tmp_path / "cache"), **values)
        if is_enough:
            open_corpora(config, open_tokens(config), CONTEXT)
        else:
            with pytest.raises(TrainerError, match="three blocks of 3 chunks"):
                open_corpora(config, open_tokens(config), CONTEXT)


def test_token_files_that_are_still_written_are_refused(tokens: Path) -> None:
    (tokens / "tokens.json.partial").touch()
    with pytest.raises(TrainerError, match="are incomplete"):
        open_stream(str(tokens))


def test_unreadable_stream_is_a_one_line_error(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="cannot be read"):
        open_stream(str(tmp_path / "missing"))
    with pytest.raises(TrainerError, match="no token file to train on"):
        open_stream(str(tmp_path))
    with pytest.raises(TrainerError, match="is neither a folder nor one of s3, gs, az"):
        open_stream("ftp://host/folder")
    with pytest.raises(TrainerError, match="raise `--data"):
        config = DataConfig(stream=str(tokens), cache=str(tmp_path / "c"), **{**SMALL, "cache_gib": 1e-9})
        open_corpora(config, open_tokens(config), CONTEXT)
    corpus = open_corpus(tokens, tmp_path / "cache")
    (tokens / "train-0.bin").write_bytes(b"short")
    with pytest.raises(TrainerError, match="shorter than it was"):
        corpus.read(0, 61)
    assert "takes the place" in (find_problem(Config(data=DataConfig(stream="x", path="y"))) or "")


@pytest.mark.long
def test_killed_run_with_stream_masks_and_fused_loss_resumes_bit_identically(worlds: Worlds, tmp_path: Path) -> None:
    flags = write_documents(tmp_path / "tokens")
    whole = worlds.train(tmp_path / "whole", "ddp", *flags, ranks=2)
    # The node that is killed keeps its chunks, so its successor's own cache is a folder of its own.
    worlds.train(tmp_path / "killed", "ddp", *flags, ranks=2, kill_after=5)
    elsewhere = ["--data.cache", str(tmp_path / "elsewhere")]
    killed = worlds.train(tmp_path / "killed", "ddp", *flags, *elsewhere, ranks=2, attempt=2)
    assert [line["event"] for line in read_lines(tmp_path / "killed")].count("resumed") == 1
    for step, losses in killed.items():
        assert [loss.hex() for loss in losses] == [whole[step][0].hex()] * len(losses)
    # Masks and a stream change what is learnt from; the number of ranks does not.
    alone = worlds.train(tmp_path / "alone", "ddp", *flags, ranks=1)
    assert {step: losses[0] for step, losses in alone.items()} == pytest.approx(
        {step: losses[0] for step, losses in whole.items()}, abs=1e-4
    )
