"""Google fulfils the contract of all clouds, over our fake of Compute Engine with lagging lists."""

from __future__ import annotations

from tests.clouds.contract import CloudContract


class TestGcp(CloudContract):
    pass
