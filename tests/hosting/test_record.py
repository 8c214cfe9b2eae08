"""The record of an installation's server: private, whole or not there, and without its key once it is forgotten."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import StateError
from broker.hosting.record import FOLDER, HostedRecord, HostedServer, HostedStatus, MachineLogin

SERVER = HostedServer(
    infra="aws/us-east-1", folder="~/server", port=8471, status=HostedStatus.UP, options=("--x",), config="a = 1\n",
    extras=("aws",), cluster="broker-server", login=MachineLogin(name="r", is_own=True, buckets=("b",)),
    fingerprint="sha256:0", version="1",
)  # fmt: skip


def test_record_is_read_as_it_was_written_and_only_its_user_may_read_it(tmp_path: Path) -> None:
    record = HostedRecord(tmp_path)
    assert record.read() is None
    record.write(SERVER)
    assert record.read() == SERVER and SERVER.cloud == "aws"
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / FOLDER).iterdir()} == {0o600}


def test_record_that_could_not_be_replaced_is_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = HostedRecord(tmp_path)
    record.write(SERVER)

    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        record.write(replace(SERVER, status=HostedStatus.ENDING))
    assert record.read() == SERVER, "it is on the disk before it takes the place of the one before"


def test_forgotten_server_leaves_the_key_of_its_backups_and_no_token(tmp_path: Path) -> None:
    record = HostedRecord(tmp_path)
    record.write(SERVER)
    record.write_private("admin.token", "t\n")
    record.write_private("secret.key", "k")
    record.forget()
    assert record.read() is None and not record.token_path.exists() and record.key_path.read_text() == "k"
    record.forget()


def test_damaged_record_is_no_missing_server(tmp_path: Path) -> None:
    record = HostedRecord(tmp_path)
    record.write(SERVER)
    (tmp_path / FOLDER / "server.json").write_text("{")
    with pytest.raises(StateError, match="cannot be read"):
        record.read()
