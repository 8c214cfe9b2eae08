from __future__ import annotations

from pathlib import Path

from tests.clouds.aws.bed import AwsBed
from tests.clouds.recording import ROOM, RecordingSuite, World


class TestRecording(RecordingSuite):
    """Over EC2."""

    def test_an_outage_neither_ends_the_recording_nor_counts_as_a_full_zone(self, bed: AwsBed, tmp_path: Path) -> None:
        world = World(bed, tmp_path)

        def break_down() -> None:
            for action in ("RunInstances", "CreateFleet"):
                bed.account.fail(action, "InternalError", status=500, times=1000)

        def come_back() -> None:
            bed.account.faults.clear()

        assert world.record([ROOM, break_down, come_back]).counts == (2, 2, 2)
        assert any("no clear answer" in line for line in world.messages)
        world.check_nothing_left()
