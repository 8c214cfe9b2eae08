"""Place the tasks of a job group together, in the region in which their total is lowest.

Pure. The value of the tasks' hours counts, as in their plans; a task without work counts as one hour.

Example: a trainer costs 8.00 in east and 8.40 in west, its rollout workers 3.00 and 2.00: each alone would take east
and west; together west (10.40) is cheaper than east (11.00).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from broker.errors import NoOfferError
from broker.frozen import frozen
from broker.types import Estimate, Placement, Plan

Refused = Callable[[Placement], bool]
NEAR_SHARE = 1.05  # a common zone may cost this much more: traffic between zones is billed and slower


@frozen
class GroupPlace:
    """A region of a cloud, and the preferred zone in it, None for any."""

    cloud: str
    region: str
    zone: str | None = None

    def contains(self, placement: Placement) -> bool:
        """Return whether the placement is in this region, whatever its zone."""
        return (placement.offer.cloud, placement.offer.region) == (self.cloud, self.region)

    def __str__(self) -> str:
        return f"{self.cloud} {self.zone or self.region}"


@frozen
class GroupPlan:
    """A placement for each task in one region, and the cost; `apart_usd` is the cost of each in its cheapest region."""

    place: GroupPlace
    estimates: tuple[Estimate, ...]
    usd: float
    apart_usd: float


def locate(placement: Placement) -> GroupPlace:
    """Return the location of a placement whose zone is known."""
    return GroupPlace(cloud=placement.offer.cloud, region=placement.offer.region, zone=placement.offer.zone)


def keep_together(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return the plans of a job group's tasks with the placements in the region that is cheapest for all of them.

    The plans of other tasks, and of a group whose tasks exchange no data, are unchanged. Raises NoOfferError if no
    region has a placement for every task.
    """
    role = plans[0].task.group if plans else None
    if role is None or not role.is_connected:
        return tuple(plans)
    whole = plan_group(plans)
    if whole is None:
        raise make_no_region_error(role.name)
    reason = (
        f"the tasks of group {role.name} run in one region; together they cost least in {whole.place.cloud} "
        f"{whole.place.region}"
    )
    return tuple(replace(keep_near(plan, whole.place), reason=reason) for plan in plans)


def make_no_region_error(group: str) -> NoOfferError:
    """Make the error for a group whose tasks fit in no common region."""
    return NoOfferError(
        f"no region has a placement for every task of group {group}",
        hints=["write `inter_connection: false` in the header to place each task on its own"],
    )


def plan_group(plans: Sequence[Plan], *, is_refused: Refused = lambda placement: False) -> GroupPlan | None:
    """Return the cheapest region in which every task has a placement that is not refused; None if there is none."""
    options = [_list_cheapest(plan, is_refused) for plan in plans]
    common = set(options[0]).intersection(*options[1:])
    if not common:
        return None
    by_plan = list(zip(plans, options, strict=True))
    cloud, region = min(common, key=lambda key: (sum(_measure_cost(plan, each[key]) for plan, each in by_plan), key))
    zone = _find_zone(plans, GroupPlace(cloud=cloud, region=region), is_refused)
    place = GroupPlace(cloud=cloud, region=region, zone=zone)
    near = [_drop(keep_near(plan, place), is_refused).estimates[0] for plan in plans]
    return GroupPlan(
        place=place,
        estimates=tuple(near),
        usd=sum(_measure_usd(each) for each in near),
        apart_usd=sum(min(map(_measure_usd, each.values())) for each in options),
    )


def keep_near(plan: Plan, place: GroupPlace) -> Plan:
    """Return the plan with the placements in this region; those in its zone come first if they cost about the same."""
    near = [each for each in plan.estimates if place.contains(each.placement)]
    if near and place.zone is not None:
        limit_usd = NEAR_SHARE * _measure_usd(near[0])
        near.sort(key=lambda each: not (_has_zone(each.placement, place.zone) and _measure_usd(each) <= limit_usd))
    return replace(plan, estimates=tuple(near))


def can_start(plan: Plan, place: GroupPlace, is_refused: Refused) -> bool:
    """Return whether the task has a placement in this region that is not refused."""
    return any(place.contains(each.placement) and not is_refused(each.placement) for each in plan.estimates)


def _has_zone(placement: Placement, zone: str | None) -> bool:
    return placement.offer.zone is None or zone in (placement.offer.zone, *placement.other_zones)


def _measure_usd(estimate: Estimate) -> float:
    return estimate.placement.usd_hour if estimate.expected_usd is None else estimate.expected_usd


def _measure_cost(plan: Plan, estimate: Estimate) -> float:
    return _measure_usd(estimate) + (plan.hour_value_usd or 0.0) * (estimate.expected_hours or 0.0)


def _drop(plan: Plan, is_refused: Refused) -> Plan:
    return replace(plan, estimates=tuple(each for each in plan.estimates if not is_refused(each.placement)))


def _list_cheapest(plan: Plan, is_refused: Refused) -> dict[tuple[str, str], Estimate]:
    """Return the plan's first placement in each region."""
    found: dict[tuple[str, str], Estimate] = {}
    for each in _drop(plan, is_refused).estimates:
        found.setdefault((each.placement.offer.cloud, each.placement.offer.region), each)
    return found


def _find_zone(plans: Sequence[Plan], place: GroupPlace, is_refused: Refused) -> str | None:
    """Return the cheapest zone with a placement for every task; None if there is none."""
    cost_by_zone: dict[str, float] = {}
    zones = {each.placement.offer.zone for plan in plans for each in plan.estimates if place.contains(each.placement)}
    for zone in sorted(zone for zone in zones if zone is not None):
        first = [
            next(
                (
                    _measure_cost(plan, each)
                    for each in _drop(plan, is_refused).estimates
                    if place.contains(each.placement) and _has_zone(each.placement, zone)
                ),
                None,
            )
            for plan in plans
        ]
        if None not in first:
            cost_by_zone[zone] = sum(cost for cost in first if cost is not None)
    return min(cost_by_zone, key=lambda zone: (cost_by_zone[zone], zone), default=None)
