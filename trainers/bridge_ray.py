"""A callback for Ray Train: the driver writes the progress lines, wherever Ray places the first rank."""

from __future__ import annotations

from typing import Any

from ray.train import UserCallback

from trainers import bridge


class BridgeRayCallback(UserCallback):
    """Report the `step`, `total` and `loss` that the first rank passes to `ray.train.report`.

    Ray calls it in the driver, which runs on the first node; workers may run on any node.
    """

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        found = dict(metrics[0])
        step = found.pop("step")
        bridge.progress(step, found.pop("total"), found.pop("loss", None), step if checkpoint else None, **found)
