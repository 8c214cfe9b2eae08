"""The key of a shared store's secrets: made once, kept private, and refused with a reason if it is invalid."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from broker.errors import StateError
from broker.state.secret_rows import load_key


def test_a_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    key = load_key(tmp_path)
    assert len(key) == 32 and load_key(tmp_path) == key
    (path,) = tmp_path.iterdir()
    assert path.name == "secret.key" and path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_not_a_key_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    (tmp_path / "secret.key").write_text("hunter2")
    with pytest.raises(StateError, match="is not a valid key: expected 32 bytes") as caught:
        load_key(tmp_path)
    assert "openssl rand" in caught.value.hints[0] and "hunter2" not in str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_folder_where_no_key_can_be_made_is_reported_with_the_systems_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *given: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *given, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StateError) as caught:
        load_key(tmp_path)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == number
