"""How fast a placement does the work, relative to the one the user measured on."""

from __future__ import annotations

from collections.abc import Mapping

from broker.types import AcceleratorFigures, Goal, Offer


def scale_work(goal: Goal | None, offer: Offer, figures: Mapping[str, AcceleratorFigures]) -> float | None:
    """Fault-free hours of the goal's work on this offer; None where no work is given.

    Work without `on` takes the same hours anywhere. Else time goes with the accelerator's peak times
    the count: a stated simplification that holds while compute bounds the step.
    """
    if goal is None or goal.work_hours is None:
        return None
    if goal.work_on is None or not offer.accelerator:
        return goal.work_hours
    name, _, count = goal.work_on.partition(":")
    reference = float(count or 1) * _peak(name, offer, figures)
    own = offer.accelerator_count * _peak(offer.accelerator, offer, figures)
    return goal.work_hours * reference / own if own and reference else goal.work_hours


def _peak(name: str, offer: Offer, figures: Mapping[str, AcceleratorFigures]) -> float:
    is_same = name.lower() == (offer.accelerator or "").lower()
    found = next((each for each in figures.values() if each.name.lower() == name.lower()), None)
    peak = found.training_tflops if found else None
    return peak or (1.0 if is_same else 0.0)
