"""How fast a placement does the work, relative to the one the user measured on."""

from __future__ import annotations

from collections.abc import Mapping

from broker.types import Goal, Offer


def scale_work(goal: Goal | None, offer: Offer, tflops: Mapping[str, float]) -> float | None:
    """Fault-free hours of the goal's work on this offer; None where no work is given.

    Work without `on` takes the same hours anywhere. Else time goes with the peak of `tflops` (training TFLOPS by
    accelerator) times the count: a stated simplification that holds while compute bounds the step.
    """
    if goal is None or goal.work_hours is None:
        return None
    if goal.work_on is None or not offer.accelerator:
        return goal.work_hours
    name, _, count = goal.work_on.partition(":")
    reference = float(count or 1) * _peak(name, offer, tflops)
    own = offer.accelerator_count * _peak(offer.accelerator, offer, tflops)
    return goal.work_hours * reference / own if own and reference else goal.work_hours


def _peak(name: str, offer: Offer, tflops: Mapping[str, float]) -> float:
    if name.lower() == (offer.accelerator or "").lower():
        return tflops.get(offer.accelerator or "", 1.0)
    by_lower = {each.lower(): value for each, value in tflops.items()}
    return by_lower.get(name.lower(), 0.0)
