"""Keys of gangs: made by OpenSSH's `ssh-keygen`, whose errors are reported."""

from __future__ import annotations

import shutil
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
