"""Slows a bundled trainer: a sleep of TORTURE_PACE_S after each report of a step, so that faults meet it at work.

At the step TORTURE_HELD_AT it waits until the file TORTURE_HELD_UNTIL exists, so that no fault comes too late.

Python imports this at its start where this folder is on PYTHONPATH. The arithmetic of the run is untouched.
"""

import os
import time
from pathlib import Path
from typing import Any

PACE_S = float(os.environ.get("TORTURE_PACE_S") or 0)
HELD_AT = int(os.environ.get("TORTURE_HELD_AT") or 0)

if PACE_S:
    from trainers.progress import Progress

    _report = Progress.report

    def report(self: Progress, **values: Any) -> None:
        _report(self, **values)
        if values.get("loss") is not None:
            time.sleep(PACE_S)
            while values.get("step") == HELD_AT and not Path(os.environ["TORTURE_HELD_UNTIL"]).exists():
                time.sleep(0.02)

    Progress.report = report  # type: ignore[method-assign]
