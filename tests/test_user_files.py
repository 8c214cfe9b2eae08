"""A file that its user edits: what a process of days reads while it is being saved."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from broker.config import Config, find_admin_policy, find_queue_settings, keep_settings
from broker.errors import UsageError
from broker.user_files import SETTLE_S, UserFile

NOW_S = 1_000_000.0


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time_s = NOW_S

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s


class Pools:
    """A file of names, one a line; `?` is a syntax error. `beside` is read with it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.beside, self.clock = folder / "file", folder / "beside", Hand()
        self.read_count = 0
        self.file = UserFile(self.path, self._parse, beside=[self.beside], clock=self.clock)

    def _parse(self) -> list[str]:
        self.read_count += 1
        try:
            names = self.path.read_text().split()
        except FileNotFoundError:
            return []
        if "?" in names:
            raise UsageError("a syntax error")
        return names + (self.beside.read_text().split() if self.beside.exists() else [])

    def save(self, text: str, *, age_s: float = 0.0) -> None:
        self.path.write_text(text)
        os.utime(self.path, (self.clock.time_s - age_s,) * 2)

    def pass_time(self) -> None:
        self.clock.time_s += SETTLE_S


@pytest.fixture
def pools(tmp_path: Path) -> Pools:
    return Pools(tmp_path)


def test_a_command_reads_a_new_file_as_it_is(pools: Pools) -> None:
    pools.save("a")
    assert pools.file.read() == ["a"]


@pytest.mark.parametrize("text", ["", "a", "?", None], ids=["empty", "cut off", "invalid", "missing"])
def test_a_file_that_is_being_saved_keeps_its_last_content(pools: Pools, text: str | None) -> None:
    pools.save("a b", age_s=60.0)
    assert pools.file.read() == ["a", "b"]
    pools.clock.time_s += 1.0
    pools.path.unlink() if text is None else pools.save(text)
    assert pools.file.read() == ["a", "b"]
    pools.save("a b c")
    pools.pass_time()
    assert pools.file.read() == ["a", "b", "c"]


def test_a_change_counts_once_it_is_a_few_seconds_old(pools: Pools) -> None:
    pools.save("a b", age_s=60.0)
    pools.file.read()
    pools.save("a")
    assert pools.file.read() == ["a", "b"]
    pools.pass_time()
    assert pools.file.read() == ["a"]
    pools.path.unlink()
    assert pools.file.read() == ["a"]
    pools.pass_time()
    assert pools.file.read() == [], "it was removed, not saved"


def test_an_invalid_file_keeps_the_last_valid_content_and_is_logged_once(
    pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    pools.save("a", age_s=60.0)
    pools.file.read()
    pools.save("?", age_s=60.0)
    with caplog.at_level(logging.WARNING):
        assert [pools.file.read(), pools.file.read()] == [["a"], ["a"]]
    assert len(caplog.records) == 1 and "a syntax error" in caplog.text
    pools.save("b", age_s=60.0)
    assert pools.file.read() == ["b"]


def test_a_file_that_was_never_valid_is_an_error_until_it_is(pools: Pools) -> None:
    pools.save("?")
    for _ in range(2):
        with pytest.raises(UsageError):
            pools.file.read()
    pools.save("a")
    assert pools.file.read() == ["a"]


def test_an_unchanged_file_is_read_once_and_again_with_its_neighbour(pools: Pools) -> None:
    pools.save("a", age_s=60.0)
    assert [pools.file.read(), pools.file.read()] == [["a"], ["a"]] and pools.read_count == 1
    pools.beside.write_text("b")
    assert pools.file.read() == ["a", "b"] and pools.read_count == 2


def test_a_file_dated_in_the_future_does_not_stay_unread(pools: Pools) -> None:
    pools.save("a")
    pools.file.read()
    pools.save("b", age_s=-3600.0)
    assert pools.file.read() == ["b"]


@pytest.mark.parametrize("text", ["", "max_live_jobs = 2\n", "max_live_jobs = "], ids=["empty", "cut off", "invalid"])
def test_a_daemon_keeps_the_settings_while_they_are_being_saved(tmp_path: Path, text: str) -> None:
    path, config = tmp_path / "config.toml", Config(home=tmp_path, owner="me")
    path.write_text('max_live_jobs = 2\nadmin_policy = "rules:check"\n')
    keep_settings(tmp_path)
    path.write_text(text)
    assert find_queue_settings(config) == {"max_live_jobs": 2}
    assert find_admin_policy(tmp_path) == "rules:check", "no task escapes the policy meanwhile"
    path.write_text("max_live_jobs = 3\n")
    os.utime(path, (NOW_S, NOW_S))
    assert find_queue_settings(config) == {"max_live_jobs": 3} and find_admin_policy(tmp_path) is None


def test_settings_that_are_invalid_at_the_start_of_a_daemon_are_named_by_their_reader(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("max_live_jobs = ")
    keep_settings(tmp_path)
    with pytest.raises(UsageError, match=r"config\.toml"):
        find_queue_settings(Config(home=tmp_path, owner="me"))
