"""Locks between processes: one holder, released with the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from broker.locks import hold_lock, is_locked, try_lock

HOLD = """
import sys
from pathlib import Path
from broker.locks import hold_lock
with hold_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_has_one_holder_and_is_free_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with hold_lock(path):
        assert is_locked(path)
        with try_lock(path) as is_held:
            assert not is_held
        assert is_locked(path)  # the failed try released nothing
    assert not is_locked(path)
    with try_lock(path) as is_held:
        assert is_held


def test_the_file_and_its_folder_are_private(tmp_path: Path) -> None:
    with hold_lock(tmp_path / "new" / "lock"):
        assert (tmp_path / "new").stat().st_mode & 0o077 == 0
        assert (tmp_path / "new" / "lock").stat().st_mode & 0o077 == 0


def test_a_killed_process_releases_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with try_lock(path) as is_held:
            assert not is_held
        holder.kill()
        holder.wait()
        with hold_lock(path):
            assert is_locked(path)


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), try_lock(tmp_path / "file" / "lock"):
        pass
