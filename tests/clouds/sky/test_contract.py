"""A cloud behind SkyPilot keeps the contract of all clouds."""

from __future__ import annotations

from tests.clouds.contract import CloudContract


class TestSky(CloudContract):
    pass
