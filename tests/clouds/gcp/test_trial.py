from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.clouds.base import Cloud
from broker.clouds.gcp.cloud import GcpCloud
from broker.clouds.gcp.state_file import GcpStateFile
from tests.clouds.beds import Bed
from tests.clouds.gcp.conftest import GcpBed
from tests.clouds.trial import TrialSuite


class TestTrial(TrialSuite):
    """Over Compute Engine."""

    def reopen_at(self, bed: Bed, url: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Cloud:
        assert isinstance(bed, GcpBed)
        return GcpCloud(replace(bed.login, endpoint=url), state_file=GcpStateFile(folder), clock=bed.clock)
