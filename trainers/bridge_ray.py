"""Ray Train and the broker: progress lines written by the driver, wherever Ray puts the first rank."""

from __future__ import annotations

from typing import Any

from ray.train import UserCallback

from trainers import bridge


class BridgeRayCallback(UserCallback):
    """Report the `step`, `total` and `loss` that the first rank passes to `ray.train.report`.

    Ray runs it beside the driver, so the lines reach the first node; a worker may be on any node.
    """

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        found = dict(metrics[0])
        step = found.pop("step")
        bridge.progress(step, found.pop("total"), found.pop("loss", None), step if checkpoint else None, **found)
