"""A real Slurm for the tests of one file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clouds.slurm.real import RealSlurm, find_obstacle


@pytest.fixture(scope="module")
def slurm() -> Iterator[RealSlurm]:
    """Start it. Its folder has a short path, as sockets need one, and is none of the test's."""
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    root = Path(tempfile.mkdtemp(prefix="broker-slurm-test-", dir="/tmp"))
    real = RealSlurm(root)
    try:
        yield real.start()
    finally:
        real.stop()
        shutil.rmtree(root, ignore_errors=True)
