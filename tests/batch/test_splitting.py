"""Shards of a map's input: they cover each file once, and their number is limited."""

from __future__ import annotations

import pytest

from broker.batch import splitting
from broker.batch.splitting import MIB, SHARD_BYTES_MAX, SHARDS_WANTED, split
from broker.errors import UsageError
from broker.storage.base import StoredKey


def make_key(key: str, size: int, *, etag: str = "", modified_s: float = 5.9) -> StoredKey:
    return StoredKey(key=key, size_bytes=size, modified_s=modified_s, etag=etag)


@pytest.mark.parametrize("size", [1, 9, 10, 11, 20, 21])
def test_shards_cover_each_file_once(size: int) -> None:
    found = split([make_key("a.txt", size), make_key("b.txt", 7)], shard_bytes=10)
    for index, length in enumerate((size, 7)):
        ends = [(each.start, each.end) for each in found.shards if each.file == index]
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])] and ends[-1][1] == length
        assert all(0 < end - start <= 10 for start, end in ends)


def test_input_is_split_into_a_thousand_shards_of_a_size_within_bounds() -> None:
    assert len(split([make_key("a.txt", 100 * MIB)]).shards) == SHARDS_WANTED
    big = split([make_key("a.txt", 3 * SHARDS_WANTED * SHARD_BYTES_MAX)])
    assert len(big.shards) == 3 * SHARDS_WANTED and big.shards[0].end == SHARD_BYTES_MAX


def test_part_names_have_room_for_all_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "SHARDS_MAX", 11)
    assert len(split([make_key("a.txt", 100)], shard_bytes=10).shards) == 10
    with pytest.raises(UsageError, match="more than 11 shards") as refused:
        split([make_key("a.txt", 20 * MIB)], shard_bytes=MIB)
    assert "`--shard-mib 2` or more" in refused.value.hints[0]
    assert len(split([make_key("a.txt", 20 * MIB)], shard_bytes=2 * MIB).shards) == 10


def test_mark_of_a_file_is_its_etag_or_the_second_of_its_last_write() -> None:
    found = split([make_key("a.txt", 1, etag="e1"), make_key("b.txt", 1)])
    assert found.marks == ("e1", "5")


def test_input_without_lines_is_explained() -> None:
    with pytest.raises(UsageError, match="none of its 2 files"):
        split([make_key("a.png", 9), make_key("b.txt", 0)])
