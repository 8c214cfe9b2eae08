"""The driver's connection to the job's own Ray, and a callback for Ray Train that reports progress from the driver."""

from __future__ import annotations

import os
import time
from typing import Any

import ray
from ray.train import UserCallback

from trainers import bridge


def connect() -> None:
    """Connect to the head, which may still be starting. Raises ConnectionError after five minutes."""
    end_s = time.monotonic() + 300
    while True:
        try:
            ray.init(_node_ip_address=os.environ["NODE_ADDRESS"])  # local nodes share a machine
            return
        except ConnectionError:
            if time.monotonic() > end_s:
                raise
            time.sleep(2)


class BridgeRayCallback(UserCallback):
    """Report the `step`, `total` and `loss` that the first rank passes to `ray.train.report`.

    Ray calls it in the driver, which runs on the first node; workers may run on any node.
    """

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        found = dict(metrics[0])
        step = found.pop("step")
        bridge.progress(step, found.pop("total"), found.pop("loss", None), step if checkpoint else None, **found)
