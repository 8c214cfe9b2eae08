"""Slows a bundled trainer: a sleep of TORTURE_PACE_S after each report of a step, so that faults meet it at work.

Python imports this at its start where this folder is on PYTHONPATH. The arithmetic of the run is untouched.
"""

import os
import time
from typing import Any

PACE_S = float(os.environ.get("TORTURE_PACE_S") or 0)

if PACE_S:
    from trainers.progress import Progress

    _report = Progress.report

    def report(self: Progress, **values: Any) -> None:
        _report(self, **values)
        if values.get("loss") is not None:
            time.sleep(PACE_S)

    Progress.report = report  # type: ignore[method-assign]
