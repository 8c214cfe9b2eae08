"""The common region of a job group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import NoOfferError
from broker.pipelines.groups import (
    NEAR_SHARE,
    GroupPlace,
    GroupPlan,
    can_start,
    keep_near,
    keep_together,
    locate,
    plan_group,
)
from broker.types import Estimate, GroupRole, Offer, Placement, Plan, Task


def make_plan(usd: Mapping[str, float]) -> Plan:
    """Make a plan from zone -> price; a zone is its region and one letter."""
    placements = [
        Placement(
            offer=Offer(
                cloud="c", region=zone[:-1], zone=zone, instance_type="i", vcpus=1, memory_gib=1, spot_usd_hour=price
            ),
            is_spot=True,
            node_count=1,
        )
        for zone, price in sorted(usd.items(), key=lambda each: each[1])
    ]
    estimates = tuple(Estimate(placement=each) for each in placements)
    return Plan(task=Task(), estimates=estimates, rejections=(), prices_as_of="", reason="cheapest")


def test_the_region_is_cheapest_for_all_tasks_together() -> None:
    plans = [make_plan({"easta": 8.0, "westa": 8.4}), make_plan({"easta": 3.0, "westa": 2.0})]
    found = plan_group(plans)
    assert found is not None and found.place == GroupPlace(cloud="c", region="west", zone="westa")
    assert (round(found.usd, 6), round(found.apart_usd, 6)) == (10.4, 10.0)


def test_plans_of_a_group_are_for_its_region_and_those_of_other_tasks_are_unchanged() -> None:
    plans = [make_plan({"easta": 8.0, "westa": 8.4}), make_plan({"easta": 3.0, "westa": 2.0})]
    assert keep_together(plans) == tuple(plans), "a pipeline"
    apart = [join(each, is_connected=False) for each in plans]
    assert keep_together(apart) == tuple(apart), "its tasks exchange no data"
    found = keep_together([join(each) for each in plans])
    assert [each.choice.placement.offer.region for each in found] == ["west", "west"]
    assert [each.choice.placement.usd_hour for each in found] == [8.4, 2.0]
    assert found[0].reason == "the tasks of group g run in one region; together they cost least in c west"
    assert keep_together([]) == ()


def test_group_without_a_common_region_is_refused_before_its_launch() -> None:
    with pytest.raises(NoOfferError, match="no region has a placement for every task of group g") as caught:
        keep_together([join(make_plan({"easta": 1.0})), join(make_plan({"westa": 1.0}))])
    assert "`inter_connection: false`" in caught.value.hints[0]


def join(plan: Plan, *, is_connected: bool = True) -> Plan:
    return replace(plan, task=replace(plan.task, group=GroupRole(name="g", is_connected=is_connected)))


def test_a_region_that_refuses_one_task_is_left_out() -> None:
    plans = [make_plan({"easta": 1.0, "westa": 2.0}), make_plan({"easta": 1.0, "westa": 2.0})]
    found = plan_group(plans, is_refused=lambda placement: placement.offer.region == "east")
    assert found is not None and found.place.region == "west"
    assert plan_group(plans, is_refused=lambda placement: True) is None
    assert plan_group([make_plan({"easta": 1.0}), make_plan({"westa": 1.0})]) is None


def test_a_common_zone_comes_first_where_it_costs_about_the_same() -> None:
    place = GroupPlace(cloud="c", region="east", zone="eastb")

    def list_zones(usd: Mapping[str, float]) -> list[str | None]:
        return [each.placement.offer.zone for each in keep_near(make_plan(usd), place).estimates]

    assert list_zones({"easta": 1.0, "eastb": 1.04, "westa": 0.1}) == ["eastb", "easta"]
    assert list_zones({"easta": 1.0, "eastb": 1.2}) == ["easta", "eastb"]


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["easta", "eastb", "westa", "northa"]), st.floats(1.0, 9.0), min_size=1),
        min_size=1,
        max_size=4,
    )
)
def test_no_other_region_is_cheaper_and_tasks_placed_apart_never_cost_more(prices: list[dict[str, float]]) -> None:
    plans = [make_plan(each) for each in prices]
    sums = {}
    for region in ("east", "west", "north"):
        best = [min((usd for zone, usd in each.items() if zone[:-1] == region), default=None) for each in prices]
        if None not in best:
            sums[region] = sum(usd for usd in best if usd is not None)
    found = plan_group(plans)
    assert (found is None) == (not sums)
    if found is not None:
        assert sums[found.place.region] == min(sums.values()) and found.usd <= 1.05 * min(sums.values()) + 1e-9
        assert found.apart_usd <= found.usd + 1e-9
        assert all(can_start(plan, found.place, lambda placement: False) for plan in plans)


def place(
    cloud: str, zone: str | None, usd: float, *, others: tuple[str, ...] = (), work_usd: float | None = None
) -> Estimate:
    """Make an estimate; a zone is its region and one letter, None: any zone of region "east"."""
    offer = Offer(
        cloud=cloud, region=zone[:-1] if zone else "east", zone=zone, instance_type="i", vcpus=1, memory_gib=1,
        ondemand_usd_hour=usd,
    )  # fmt: skip
    placement = Placement(offer=offer, is_spot=False, node_count=1, other_zones=others)
    return Estimate(placement=placement, expected_usd=work_usd, expected_hours=None if work_usd is None else 1.0)


def plan_of(*estimates: Estimate) -> Plan:
    return Plan(task=Task(), estimates=estimates, rejections=(), prices_as_of="", reason="")


def list_offers(plan: GroupPlan | None) -> list[tuple[str, str | None]]:
    assert plan is not None
    return [(each.placement.offer.cloud, each.placement.offer.zone) for each in plan.estimates]


def test_the_region_of_a_group_weighs_money_against_time_as_the_plans_do() -> None:
    east, west = place("c", "easta", 1.0, work_usd=10.0), place("c", "westa", 1.0, work_usd=11.0)
    east = replace(east, expected_hours=9.0)
    for value, region in ((None, "east"), (0.1, "east"), (0.2, "west")):
        found = plan_group([replace(plan_of(east, west), hour_value_usd=value)])
        assert found is not None and found.place.region == region


def test_the_work_of_a_task_counts_and_not_its_price_per_hour() -> None:
    """A slow cheap machine costs more in the end."""
    plans = [
        plan_of(place("c", "westa", 9.0, work_usd=2.0), place("c", "easta", 1.0, work_usd=5.0)),
        plan_of(place("c", "easta", 1.0), place("c", "westa", 2.0)),
    ]
    found = plan_group(plans)
    assert found is not None and found.place == GroupPlace(cloud="c", region="west", zone="westa")
    assert (found.usd, found.apart_usd) == (4.0, 3.0)


def test_regions_of_one_name_in_two_clouds_are_two_places() -> None:
    plans = [plan_of(place("c", "easta", 1.0), place("d", "easta", 3.0)), plan_of(place("d", "easta", 1.0))]
    found = plan_group(plans)
    assert list_offers(found) == [("d", "easta"), ("d", "easta")]
    assert found is not None and str(found.place) == "d easta"
    assert str(GroupPlace(cloud="d", region="east")) == "d east"
    assert not can_start(plans[1], GroupPlace(cloud="c", region="east"), lambda placement: False)
    assert locate(plans[0].choice.placement) == GroupPlace(cloud="c", region="east", zone="easta")


def test_equal_regions_and_zones_are_taken_by_name_whatever_the_order_of_the_plan() -> None:
    one, other = place("c", "westb", 1.0), place("c", "easta", 1.0)
    for plan in (plan_of(one, other), plan_of(other, one)):
        found = plan_group([plan])
        assert found is not None and found.place == GroupPlace(cloud="c", region="east", zone="easta")
    both = [place("c", "eastb", 1.0), place("c", "easta", 1.0)]
    found = plan_group([plan_of(*both), plan_of(*reversed(both))])
    assert list_offers(found) == [("c", "easta"), ("c", "easta")]


def test_an_offer_that_searches_several_zones_is_in_each_of_them() -> None:
    plans = [plan_of(place("c", "easta", 1.0, others=("eastb",))), plan_of(place("c", "eastb", 1.0))]
    found = plan_group(plans)
    assert found is not None and found.place.zone == "eastb"
    plans[0] = plan_of(place("c", None, 1.0))
    found = plan_group(plans)
    assert found is not None and found.place.zone == "eastb", "an offer of a region is in any zone"
    plans[0] = plan_of(place("c", "easta", 1.0))
    found = plan_group(plans)
    assert found is not None and found.place == GroupPlace(cloud="c", region="east"), "no common zone: any"


def test_a_zone_is_preferred_up_to_its_share_of_the_cheapest_price() -> None:
    home = GroupPlace(cloud="c", region="east", zone="eastb")
    for usd, is_preferred in ((NEAR_SHARE, True), (NEAR_SHARE + 1e-6, False)):
        kept = keep_near(plan_of(place("c", "easta", 1.0), place("c", "eastb", usd)), home).estimates
        assert (kept[0].placement.offer.zone == "eastb") is is_preferred and len(kept) == 2
    ranked = [place("c", "easta", 1.0), place("c", "eastb", 1.01), place("c", "eastb", 1.02), place("c", "eastc", 1.03)]
    kept = keep_near(plan_of(*ranked), home).estimates
    assert kept == (ranked[1], ranked[2], ranked[0], ranked[3]), "both parts keep the plan's order"
    anywhere = GroupPlace(cloud="c", region="east")
    assert keep_near(plan_of(*ranked, place("d", "easta", 0.1)), anywhere).estimates == tuple(ranked)
    assert keep_near(plan_of(place("d", "eastb", 1.0)), home).estimates == ()


def test_what_is_refused_is_neither_chosen_nor_counted() -> None:
    def refuse(placement: Placement) -> bool:
        return placement.offer.zone == "easta"

    plans = [
        plan_of(place("c", "easta", 1.0), place("c", "eastb", 2.0)),
        plan_of(place("c", "easta", 1.0), place("c", "eastb", 1.5)),
    ]
    found = plan_group(plans, is_refused=refuse)
    assert list_offers(found) == [("c", "eastb"), ("c", "eastb")]
    assert found is not None and (found.usd, found.apart_usd, found.place.zone) == (3.5, 3.5, "eastb")
    home = GroupPlace(cloud="c", region="east")
    assert can_start(plans[0], home, refuse) and not can_start(plan_of(place("c", "easta", 1.0)), home, refuse)
