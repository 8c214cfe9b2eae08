"""A user of an AWS account on the loopback, without any other login."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.config import Config
from tests.testbed.sts import FakeStore, serve_store


@pytest.fixture
def config(tmp_path: Path) -> Config:
    home = tmp_path / "state"
    home.mkdir()
    return Config(home=home, owner="0wner")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    for name in [name for name in os.environ if name.startswith(("AWS_", "BROKER_ACCESS"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with serve_store() as served:
        for name, value in served.variables.items():
            monkeypatch.setenv(name, value)
        yield served
