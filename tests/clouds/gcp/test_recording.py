from __future__ import annotations

from tests.clouds.recording import RecordingSuite


class TestRecording(RecordingSuite):
    """Over Compute Engine."""
