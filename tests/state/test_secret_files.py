"""Files of secrets, also for the rows that damage has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.state.secret_files import SecretFiles


@pytest.mark.parametrize("uid", ["k7wq2", "", "\0", "a\0b", "../../x", "a/b", "\udcff", "\n"])
def test_a_damaged_uid_neither_fails_nor_leads_out_of_the_folder(tmp_path: Path, uid: str) -> None:
    folder = tmp_path / "a" / "secrets"
    folder.parent.mkdir()
    files = SecretFiles(folder)
    files.forget(3, uid)
    files.write(3, uid, {"TOKEN": "t"})
    assert [path.parent for path in tmp_path.rglob("*.json")] == [folder]
    assert files.read(3, uid, ("TOKEN", "OTHER")) == {"TOKEN": "t", "OTHER": ""}
    files.forget(3, uid)
    assert not list(tmp_path.rglob("*.json"))
    assert files.read(3, uid, ("TOKEN",)) == {"TOKEN": ""}
