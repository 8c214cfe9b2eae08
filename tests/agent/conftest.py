from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
from local_gang import Rig

from tests.agent.fake_gpus import FakeGpus, make_fake_gpus


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "nodes")
    yield rig
    rig.end_all()


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    fake = make_fake_gpus(tmp_path / "gpus")
    monkeypatch.setenv("PATH", str(fake.folder), prepend=os.pathsep)
    return fake
