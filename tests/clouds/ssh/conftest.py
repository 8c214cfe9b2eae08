"""A pool whose nodes end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clouds.contract import OWNER
from tests.clouds.ssh.bed import PoolBed


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[PoolBed]:
    bed = PoolBed(tmp_path)
    yield bed
    bed.clean_up([OWNER, "another-owner"])
