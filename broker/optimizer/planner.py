"""Task + offers -> Plan: all feasible placements, cheapest to finish first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from broker.errors import NoOfferError
from broker.formatting import format_usd
from broker.optimizer.abilities import leave_unable_clouds
from broker.optimizer.filters import OfferIndex, apply_filters
from broker.optimizer.ranking import IDENTITY, RANK, LazyEstimates, RankedOffer, rank_by_score
from broker.optimizer.rating import CostModel, History, list_pricing_models, place
from broker.types import AcceleratorFigures, EgressPrice, Offer, Placement, Plan, Rejection, Resources, Task

Show = Callable[[RankedOffer], str]


def make_plan(
    task: Task,
    offers: Sequence[Offer],
    *,
    prices_as_of: str,
    usable_clouds: frozenset[str] | None = None,
    avoid: Callable[[Placement], bool] | None = None,
    figures: Mapping[str, AcceleratorFigures] | None = None,
    egress: Sequence[EgressPrice] = (),
    history: History | None = None,
    is_refused: Callable[[Placement], bool] | None = None,
    interval_factor: float = 1.0,
) -> Plan:
    """Rank placements by expected dollars to finish and the value of the time; without work, by price per hour. Pure.

    Alternatives work as in SkyPilot: all of `any_of` compete, and in `ordered` all placements of an alternative precede
    those of the next; those of equal preference compete. `avoid` excludes placements that were refused recently;
    `history` holds observed preemptions; spot counts as unavailable now where `is_refused` is true of all candidate
    places. Raises NoOfferError, which says what each filter rejected.
    """
    costs, index = CostModel(task, figures or {}, egress, history, is_refused), OfferIndex(offers)
    groups = dict[int, list[RankedOffer]]()  # by preference, most preferred first
    preferences = task.list_preferences()
    rejections = list[Rejection]()
    seen = set[tuple[object, ...]]()
    accepted = [_filter_offers(task, each, index.pick(each), usable_clouds) for each in task.resources]
    if len(accepted) > 1 and len(set(preferences)) == 1:
        costs.join_alternatives({number: kept for number, (kept, _) in enumerate(accepted)})
    for number, (kept, filtered) in enumerate(accepted):
        candidates, rejected = _plan_alternative(task, number, kept, filtered, costs, avoid)
        rejections += [each for each in rejected if each not in rejections]
        if len(task.resources) > 1:
            candidates = [candidate for candidate in candidates if IDENTITY(candidate) not in seen]
            seen.update(map(IDENTITY, candidates))
        groups.setdefault(preferences[number], []).extend(candidates)
    if not any(groups.values()):
        raise NoOfferError(describe_rejections(task, rejections))
    hour_value_usd = costs.hour_value_usd
    if hour_value_usd is not None:
        ranked = [each for group in groups.values() for each in rank_by_score(group, hour_value_usd)]
    else:
        ranked = [each for group in groups.values() for each in sorted(group, key=RANK)]
    return Plan(
        task=task,
        estimates=LazyEstimates(ranked, costs.make_estimate),
        rejections=tuple(rejections),
        prices_as_of=prices_as_of,
        reason=_explain_choice(task, ranked, hour_value_usd),
        hour_value_usd=hour_value_usd,
        interval_factor=interval_factor,
    )


def _filter_offers(
    task: Task, resources: Resources, offers: Sequence[Offer], usable_clouds: frozenset[str] | None
) -> tuple[Sequence[Offer], list[Rejection]]:
    """Return the offers that fit the request, on clouds that are set up and able, and what was rejected."""
    fitting, rejections = apply_filters(resources, offers)
    kept, unable = leave_unable_clouds(task, resources, fitting)
    rejections += unable
    if usable_clouds is not None:
        reached = [offer for offer in kept if offer.cloud in usable_clouds]
        if len(reached) < len(kept):
            lost = next(offer for offer in kept if offer.cloud not in usable_clouds)
            rejections.append(Rejection(filter="cloud not set up", count=len(kept) - len(reached), nearest=lost.cloud))
        kept = reached
    return kept, rejections


def _plan_alternative(
    task: Task,
    alternative: int,
    kept: Sequence[Offer],
    filtered: Sequence[Rejection],
    costs: CostModel,
    avoid: Callable[[Placement], bool] | None,
) -> tuple[list[RankedOffer], list[Rejection]]:
    """Rank the candidates of one alternative, of the offers `kept` by the filters on its request."""
    resources, rejections = task.resources[alternative], list(filtered)
    candidates = costs.rate(alternative, kept)
    if kept and not candidates:
        pricing = " or ".join("spot" if model else "on-demand" for model in list_pricing_models(task, resources))
        rejections.append(Rejection(filter=f"no {pricing} price", count=len(kept), nearest=kept[0].instance_type))
    candidates.sort(key=RANK)

    def keep(name: str, test: Callable[[RankedOffer], bool], show: Show) -> None:
        nonlocal candidates
        passed = [candidate for candidate in candidates if test(candidate)]
        if len(passed) < len(candidates):
            nearest = next(candidate for candidate in candidates if not test(candidate))
            rejections.append(
                Rejection(filter=name, count=len(candidates) - len(passed), nearest=show(nearest) or None)
            )
        candidates = passed

    limit, goal = resources.usd_hour_max, task.goal
    if limit is not None:
        most = limit * task.num_nodes
        keep("price", lambda each: each.usd_hour <= most, _show_price(task))
    if avoid is not None:
        keep("recently refused", lambda each: not avoid(place(each, task.num_nodes)), lambda each: "")
    if goal is not None and goal.work_hours is not None:
        if goal.deadline_hours is not None and not goal.keeps_late:
            keep("deadline", lambda each: _is_timely(each, goal.confidence), _show_chance)
        if goal.budget_usd is not None:
            budget = goal.budget_usd
            keep("budget", lambda each: each.usd <= budget, lambda each: f"{format_usd(each.usd)} USD expected")
    return candidates, rejections


def _is_timely(candidate: RankedOffer, confidence: float) -> bool:
    return candidate.forecast is not None and (candidate.forecast.deadline_chance or 0.0) >= confidence


def _show_chance(candidate: RankedOffer) -> str:
    """Describe the miss: hours, and on spot alone the chance, which the mean of the hours does not show."""
    forecast = candidate.forecast
    chance = (forecast.deadline_chance or 0.0) if forecast else 0.0
    hours = f"{candidate.hours:.1f} h expected"
    return f"{hours}, {chance * 100:.0f} % chance" if 0 < chance < 1 else hours


def _show_price(task: Task) -> Show:
    return lambda each: f"{each.cloud} {each.region} at {format_usd(each.usd_hour / task.num_nodes)} USD/h"


def _explain_choice(task: Task, ranked: Sequence[RankedOffer], hour_value_usd: float | None) -> str:
    best = ranked[0]
    if len(set(task.list_preferences())) > 1:
        return "first in the order given by the task"
    kind = "cheapest per hour" if best.forecast is None else "cheapest to finish"
    if hour_value_usd is not None and any(each.usd < best.usd for each in ranked[1:]):
        kind = f"best with an hour worth {format_usd(hour_value_usd)} USD"
    text = f"{kind}: {format_usd(best.usd)} USD" + ("" if best.forecast is None else " expected")
    other = next((each for each in ranked[1:] if (each.cloud, each.region) != (best.cloud, best.region)), None)
    return (
        text if other is None else f"{text}; the next best is {other.cloud} {other.region} at {format_usd(other.usd)}"
    )


def describe_rejections(task: Task, rejections: Sequence[Rejection]) -> str:
    """Describe the request, its position in the file, and what each filter rejected."""
    first, *others = task.resources
    more = f" (or {len(others)} other alternative{'s' if len(others) > 1 else ''})" if others else ""
    origin = f" {first.origin}" if first.origin else ""
    lines = [f"no offer fits{origin}: {describe_request(task, first)}{more}"]
    for each in rejections:
        nearest = f", nearest {each.nearest}" if each.nearest else ""
        lines.append(f"  {each.filter:<18}{each.count:>7} offers excluded{nearest}")
    return "\n".join(lines)


def describe_request(task: Task, resources: Resources) -> str:
    """Describe the request in a few words: `8 x H100:8, eu-west-1, spot, at most 20 USD/h`."""
    machine = (
        f"{resources.accelerator}:{resources.accelerator_count:g}" if resources.accelerator else resources.instance_type
    )
    words = [machine or "any machine", resources.instance_type if resources.accelerator else None]
    words += [resources.cloud, resources.region, resources.zone]
    words.append(f"{resources.cpus} vCPU" if resources.cpus else None)
    words.append(f"{resources.memory_gib} GiB" if resources.memory_gib else None)
    words.append(f"{resources.memory_gib_per_vcpu:g}+ GiB per vCPU" if resources.memory_gib_per_vcpu else None)
    words.append(None if resources.use_spot is None else "spot" if resources.use_spot else "on-demand")
    words.append(None if resources.usd_hour_max is None else f"at most {resources.usd_hour_max:g} USD/h per node")
    text = ", ".join(word for word in words if word)
    return f"{task.num_nodes} x {text}" if task.num_nodes > 1 else text
