"""Fixtures for real hosts in a sealed network; where that is impossible, such tests are skipped with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.metadata import MetadataServer
from tests.testbed.world import INSIDE, build, find_obstacle


@pytest.fixture(scope="session")
def metadata() -> Iterator[MetadataServer]:
    """Return the metadata server of the sealed network, which this fixture requires."""
    if INSIDE not in os.environ:
        pytest.skip(find_obstacle() or "runs in a world of its own: `make testbed`")
    build()
    server = MetadataServer()
    yield server
    server.close()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a folder that hosts and broker share, as a bucket or a network disk would be."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder
