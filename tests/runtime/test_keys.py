"""Keys of gangs: made by OpenSSH's `ssh-keygen`, whose errors are reported."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from broker.errors import StateError
from broker.runtime import keys

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


def test_output_of_ssh_keygen_is_shown(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"`ssh-keygen` failed: .*No such file or directory"):
        keys.make_pair(tmp_path / "no folder" / "login", comment="c")


def test_missing_and_hanging_ssh_keygen_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*words: object, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired("ssh-keygen", timeout)

    monkeypatch.setattr(keys.subprocess, "run", hang)
    with pytest.raises(StateError, match=f"did not finish within {keys.KEYGEN_S:g} s"):
        keys.make_pair(tmp_path / "login", comment="c")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StateError, match="requires `ssh-keygen`") as caught:
        keys.make_pair(tmp_path / "login", comment="c")
    assert "openssh-client" in caught.value.hints[0]


def test_keys_of_a_token_are_made_once_and_private(tmp_path: Path) -> None:
    own = keys.Keys(tmp_path / "keys")
    assert own.find("dev", "t1") is None
    made = own.ensure("dev", "t1")
    assert own.ensure("dev", "t1") == own.find("dev", "t1") == made
    assert own.ensure("dev", "t2") != made, "a later launch of the same name has keys of its own"
    for folder in (tmp_path / "keys", made.folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    private = [path for path in made.folder.iterdir() if path.suffix != ".pub"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert made.known_hosts.read_text().startswith(f"{made.alias} ssh-ed25519 ")
    assert not list((tmp_path / "keys").glob(".new-*"))


def test_keys_that_could_not_be_completed_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = keys.Keys(tmp_path / "keys")

    def fail(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keys, "write_private", fail)
    with pytest.raises(StateError, match="No space left on device"):
        own.ensure("dev", "t1")
    assert own.find("dev", "t1") is None and not list((tmp_path / "keys").iterdir())


def test_only_keys_of_ended_gangs_are_removed(tmp_path: Path) -> None:
    own = keys.Keys(tmp_path / "keys")
    kept, gone = own.ensure("dev", "t1"), own.ensure("dev", "t2")
    under_way = tmp_path / "keys" / ".new-0"  # another process makes keys
    under_way.mkdir()
    assert own.forget(but=[("dev", "t1")]) == 1
    assert kept.folder.exists() and not gone.folder.exists() and under_way.exists()
    assert keys.Keys(tmp_path / "none").forget(but=[]) == 0
