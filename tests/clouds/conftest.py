from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clouds.clock_jumps import count_calls

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
from local_gang import Rig


@pytest.fixture(autouse=True)
def counted_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    count_calls(monkeypatch)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "nodes")
    yield rig
    rig.end_all()
