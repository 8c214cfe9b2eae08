"""AWS fulfils the contract of all clouds, over our fake of EC2."""

from __future__ import annotations

from tests.clouds.contract import CloudContract


class TestAws(CloudContract):
    pass
