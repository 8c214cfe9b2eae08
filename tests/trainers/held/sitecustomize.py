"""Holds a training run after the report of the step HELD_AT until it gets SIGTERM, or the file HELD_UNTIL exists: it
cannot end before its reader signals it.

Python imports this at its start where this folder is on PYTHONPATH. The arithmetic of the run is untouched.
"""

import os
import time
from pathlib import Path
from types import FrameType
from typing import Any

if step := int(os.environ.get("HELD_AT") or 0):
    from trainers.preemption import PreemptionNotice
    from trainers.progress import Progress

    _report, _remember, _signals = Progress.report, PreemptionNotice._remember, list[int]()

    def report(self: Progress, **values: Any) -> None:
        _report(self, **values)
        is_held = values.get("step") == step and values.get("loss") is not None
        while is_held and not _signals and not Path(os.environ["HELD_UNTIL"]).exists():
            time.sleep(0.02)

    def remember(self: PreemptionNotice, signal_number: int, frame: FrameType | None) -> None:
        _remember(self, signal_number, frame)
        _signals.append(signal_number)

    Progress.report = report  # type: ignore[method-assign]
    PreemptionNotice._remember = remember  # type: ignore[method-assign]
