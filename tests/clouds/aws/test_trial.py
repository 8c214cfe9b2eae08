from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.clouds.aws.cloud import AwsCloud
from broker.clouds.base import Cloud
from tests.clouds.aws.bed import AwsBed, open_session
from tests.clouds.beds import Bed
from tests.clouds.trial import TrialSuite


class TestTrial(TrialSuite):
    """Over EC2."""

    private = ("203.0.113.7/32", "AKIA")

    def reopen_at(self, bed: Bed, url: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Cloud:
        assert isinstance(bed, AwsBed)
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        return AwsCloud(replace(bed.settings, address_url=url), clock=bed.clock, open_session=open_session)
