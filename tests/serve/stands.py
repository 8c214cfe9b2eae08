"""Programs that tests of the balancer require and that may be missing."""

from __future__ import annotations

import shutil

import pytest

from broker.serve.router_process import find_router
from broker.types import BalancerType

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed: `apt-get install haproxy`")
with_router = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            each, marks=pytest.mark.skipif(find_router(each) is None, reason=f"not installed: `pip install {each}`")
        )
        for each in (BalancerType.SMG, BalancerType.VLLM_ROUTER)
    ],
    ids=str,
)
