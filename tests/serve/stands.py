"""Programs that tests of the balancer require and that may be missing."""

from __future__ import annotations

import shutil

import pytest

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed: `apt-get install haproxy`")
