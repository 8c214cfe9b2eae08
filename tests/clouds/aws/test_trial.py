from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.clouds.aws.cloud import AwsCloud
from broker.clouds.base import Cloud
from tests.clouds.aws.bed import AwsBed, open_session
from tests.clouds.beds import Bed
from tests.clouds.trial import TrialSuite

PUBLIC = "93.184.216.34"


class TestTrial(TrialSuite):
    """Over EC2."""

    private = (PUBLIC, "AKIA")

    @pytest.fixture(autouse=True)
    def set_address(self, bed: Bed) -> None:
        """The other tests use addresses that are reserved for documentation, and therefore not private."""
        assert isinstance(bed, AwsBed)
        bed.settings = replace(bed.settings, ssh_from=(f"{PUBLIC}/32",))

    def reopen_at(self, bed: Bed, url: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Cloud:
        assert isinstance(bed, AwsBed)
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        return AwsCloud(replace(bed.settings, address_url=url), clock=bed.clock, open_session=open_session)
