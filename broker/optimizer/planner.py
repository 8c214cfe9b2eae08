"""Task + offers -> Plan: every placement that fits, cheapest to finish first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from broker.errors import NoOfferError
from broker.optimizer.cost import estimate_cost
from broker.optimizer.filters import apply_filters
from broker.optimizer.throughput import scale_work
from broker.types import AcceleratorFigures, EgressPrice, Estimate, Offer, Placement, Plan, Rejection, Resources, Task


def make_plan(
    task: Task,
    offers: Sequence[Offer],
    *,
    prices_as_of: str,
    usable_clouds: frozenset[str] | None = None,
    avoid: Callable[[Placement], bool] | None = None,
    figures: Mapping[str, AcceleratorFigures] | None = None,
    egress: Sequence[EgressPrice] = (),
) -> Plan:
    """Rank by expected dollars to finish, or by price per hour where no work is given. Pure.

    `avoid` takes out placements that were refused lately. Raises NoOfferError, saying which filter took what.
    """
    ranked: list[Estimate] = []
    rejections: list[Rejection] = []
    seen: set[tuple[str, str, str | None, str, bool]] = set()
    for resources in task.resources:
        estimates, rejected = _plan_alternative(task, resources, offers, usable_clouds, avoid, figures or {})
        rejections.extend(each for each in rejected if each not in rejections)
        estimates.sort(key=_rank)
        for each in estimates:
            key = _identify(each.placement)
            if key not in seen:
                seen.add(key)
                ranked.append(each)
    if not ranked:
        raise _explain_nothing(task, rejections)
    if not task.is_ordered:
        ranked.sort(key=_rank)
    return Plan(
        task=task,
        estimates=tuple(ranked),
        rejections=tuple(rejections),
        prices_as_of=prices_as_of,
        reason=_give_reason(task, ranked),
    )


def _plan_alternative(
    task: Task,
    resources: Resources,
    offers: Sequence[Offer],
    usable_clouds: frozenset[str] | None,
    avoid: Callable[[Placement], bool] | None,
    figures: Mapping[str, AcceleratorFigures],
) -> tuple[list[Estimate], list[Rejection]]:
    """All estimates of one alternative; filters go from what is asked to what is reached."""
    kept, rejections = apply_filters(resources, offers)
    if resources.cloud is None:
        kept = [offer for offer in kept if offer.cloud != "local"]  # rehearsal is asked for by name only

    def drop(
        name: str, passed: list[Estimate], before: list[Estimate], nearest: Callable[[Estimate], str]
    ) -> list[Estimate]:
        if len(passed) < len(before):
            lost = min((each for each in before if each not in passed), key=_rank)
            rejections.append(Rejection(filter=name, count=len(before) - len(passed), nearest=nearest(lost)))
        return passed

    if usable_clouds is not None:
        reached = [offer for offer in kept if offer.cloud in usable_clouds]
        if len(reached) < len(kept):
            lost = next(offer for offer in kept if offer.cloud not in usable_clouds)
            rejections.append(Rejection(filter="cloud not usable", count=len(kept) - len(reached), nearest=lost.cloud))
        kept = reached
    placements = [
        Placement(offer=offer, is_spot=is_spot, node_count=task.num_nodes)
        for offer in kept
        for is_spot in _list_pricing_models(task, resources)
        if (offer.spot_usd_hour if is_spot else offer.ondemand_usd_hour) is not None
    ]
    if kept and not placements:
        pricing = "spot" if resources.use_spot else "on-demand"
        rejections.append(Rejection(filter=f"no {pricing} price", count=len(kept), nearest=kept[0].instance_type))
    if avoid is not None:
        allowed = [each for each in placements if not avoid(each)]
        if len(allowed) < len(placements):
            rejections.append(Rejection(filter="refused lately", count=len(placements) - len(allowed)))
        placements = allowed
    estimates = [
        estimate_cost(
            each, work_hours=scale_work(task.goal, each.offer, figures), goal=task.goal, checkpoint=task.checkpoint
        )
        for each in placements
    ]
    goal = task.goal
    if goal and goal.deadline_hours is not None and goal.work_hours is not None:
        timely = [each for each in estimates if (each.deadline_chance or 0) >= goal.confidence]
        estimates = drop("deadline", timely, estimates, lambda each: f"{each.expected_hours or 0:.1f} h expected")
    if goal and goal.budget_usd is not None and goal.work_hours is not None:
        budget = goal.budget_usd
        affordable = [each for each in estimates if (each.expected_usd or 0) <= budget]
        estimates = drop("budget", affordable, estimates, lambda each: f"{each.expected_usd or 0:.2f} USD expected")
    return estimates, rejections


def _list_pricing_models(task: Task, resources: Resources) -> tuple[bool, ...]:
    """Spot as asked; not asked is on-demand, or both when a goal says what finishing means."""
    if resources.use_spot is None:
        return (False, True) if task.goal else (False,)
    return (resources.use_spot,)


def _rank(estimate: Estimate) -> tuple[float, float, str, str, str, str, bool]:
    """Cheapest first; equal costs in a fixed order."""
    placement, offer = estimate.placement, estimate.placement.offer
    usd_hour = placement.usd_hour
    usd = usd_hour if estimate.expected_usd is None else estimate.expected_usd
    return usd, usd_hour, offer.cloud, offer.region, offer.zone or "", offer.instance_type, placement.is_spot


def _identify(placement: Placement) -> tuple[str, str, str | None, str, bool]:
    offer = placement.offer
    return offer.cloud, offer.region, offer.zone, offer.instance_type, placement.is_spot


def _give_reason(task: Task, ranked: Sequence[Estimate]) -> str:
    best = ranked[0]
    if task.is_ordered:
        return "first in the order that the task gives"
    if best.expected_usd is not None:
        text = f"cheapest to finish: {best.expected_usd:.2f} USD expected"
    else:
        text = f"cheapest per hour: {best.placement.usd_hour:.2f} USD"
    place = best.placement.offer.cloud, best.placement.offer.region
    for other in ranked[1:]:
        offer = other.placement.offer
        if (offer.cloud, offer.region) != place:
            usd = other.placement.usd_hour if other.expected_usd is None else other.expected_usd
            return f"{text}; the next place is {offer.cloud} {offer.region} at {usd:.2f}"
    return text


def _explain_nothing(task: Task, rejections: Sequence[Rejection]) -> NoOfferError:
    resources = task.resources[0]
    words = [f"{task.num_nodes} x" if task.num_nodes > 1 else ""]
    if resources.accelerator:
        words.append(f"{resources.accelerator}:{resources.accelerator_count:g}")
    words += [
        f"{each}" for each in (resources.instance_type, resources.cloud, resources.region, resources.zone) if each
    ]
    words += [f"{resources.cpus} vCPU"] if resources.cpus else []
    words += [f"{resources.memory_gib} GiB"] if resources.memory_gib else []
    words.append("spot" if resources.use_spot else "")
    more = f" (or {len(task.resources) - 1} other alternatives)" if len(task.resources) > 1 else ""
    place = f" {resources.origin}" if resources.origin else ""
    lines = [f"no offer fits{place}: {' '.join(word for word in words if word) or 'any machine'}{more}"]
    for each in rejections:
        nearest = f", nearest {each.nearest}" if each.nearest else ""
        lines.append(f"  {each.filter:<18}{each.count:>7} offers out{nearest}")
    return NoOfferError("\n".join(lines), hints=[_advise(rejections)] if rejections else ())


def _advise(rejections: Sequence[Rejection]) -> str:
    last = rejections[-1].filter
    return {
        "deadline": "give more time with `deadline`, or ask for a lower `confidence`",
        "budget": "raise `budget`, or allow other accelerators with `any_of`",
        "accelerator count": "ask for another count, such as the nearest one",
        "cloud not usable": "`broker check` says how to enable a cloud; `--dryrun` plans without it",
        "no spot price": "write `use_spot: false`",
        "refused lately": "wait for the refusals to expire, or allow more places",
    }.get(last, f"loosen `{last}`")
