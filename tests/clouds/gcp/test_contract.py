"""Google keeps the contract of all clouds, over our fake of Compute Engine and its lagging lists."""

from __future__ import annotations

from tests.clouds.contract import CloudContract


class TestGcp(CloudContract):
    pass
