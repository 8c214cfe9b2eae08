"""Streams and requests survive killed replicas and rolling updates, with real processes and SIGKILL."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.serve.live_bed import LiveBed, survive, update

pytestmark = pytest.mark.long


def test_fifty_open_streams_survive_eight_kills_identically(tmp_path: Path) -> None:
    async def run() -> None:
        bed = LiveBed(tmp_path, pause_s=0.1)
        async with bed.run(3):
            tally = await survive(bed, streams=50, kills=8, tokens=30, seed=1)
            load = bed.read_load()
        assert (tally.broken, tally.different) == (0, 0) and tally.ended >= 50
        assert load is not None and load.broken == 0
        assert load.resumed >= 8  # every kill met open streams

    asyncio.run(run())


def test_rolling_updates_under_load_fail_no_request(tmp_path: Path) -> None:
    async def run() -> None:
        bed = LiveBed(tmp_path, pause_s=0.0)
        async with bed.run(2):
            requests, failed = await update(bed, updates=2, clients=8)
        assert failed == 0 and requests > 0

    asyncio.run(run())
