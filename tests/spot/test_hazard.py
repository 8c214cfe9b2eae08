"""Hazards from bands and from observations."""

from __future__ import annotations

import math

import pytest

from broker.spot.hazard import find_hazard_per_node_hour


def test_hazard_grows_with_the_band() -> None:
    bands = [find_hazard_per_node_hour(band) for band in (5, 10, 15, 20, 100)]
    assert bands == sorted(bands)
    assert 1 - math.exp(-bands[0] * 730) == pytest.approx(0.05)
