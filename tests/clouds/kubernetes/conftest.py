"""Our own API server, for the tests of one function."""

from __future__ import annotations

import itertools
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clouds.kubernetes.api_server import ApiServer
from tests.clouds.kubernetes.bed import KubernetesBed


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    # The pods of all tests share /tmp, and their names come from the tokens.
    monkeypatch.setattr("tests.clouds.beds.TOKENS", itertools.count(secrets.randbits(100)))
    folder = tmp_path / "kubernetes"
    folder.mkdir()
    monkeypatch.setenv("KUBECACHEDIR", str(folder / "cache"))
    server = ApiServer(folder)
    yield server
    server.close()


@pytest.fixture
def bed(server: ApiServer) -> KubernetesBed:
    return KubernetesBed(server)
