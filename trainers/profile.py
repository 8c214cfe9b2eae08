"""Record a trace of some steps of every rank."""

from pathlib import Path
from typing import Any

from trainers.config import ProfileConfig
from trainers.ranks import Ranks


class Profile:
    """Counts the steps of this attempt and records the requested ones."""

    def __init__(self, config: ProfileConfig, ranks: Ranks) -> None:
        """Set the steps to record; recording starts in `step`."""
        self._config, self._ranks = config, ranks
        self._steps = 0
        self._recording: Any = None

    def step(self) -> None:
        """Start or stop recording if due. Call after each step."""
        if not self._config.steps:
            return
        self._steps += 1
        if self._steps == self._config.first:
            self._start()
        elif self._steps == self._config.first + self._config.steps:
            self.stop()

    def stop(self) -> None:
        """Write the recorded steps, even if the run ends before the last requested one."""
        if self._recording is None:
            return
        self._recording.stop()
        folder = Path(self._config.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._recording.export_chrome_trace(str(folder / f"rank-{self._ranks.rank}.json"))
        self._recording = None

    def _start(self) -> None:
        from torch import profiler  # imported here because few runs are traced

        activities = [profiler.ProfilerActivity.CPU]
        if self._ranks.device.type == "cuda":
            activities.append(profiler.ProfilerActivity.CUDA)
        self._recording = profiler.profile(activities=activities)
        self._recording.start()
