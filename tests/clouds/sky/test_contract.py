"""A cloud behind SkyPilot fulfils the contract of all clouds."""

from __future__ import annotations

from tests.clouds.contract import CloudContract


class TestSky(CloudContract):
    pass
