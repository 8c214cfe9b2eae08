"""The common region of a job group."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from broker.pipelines.groups import GroupPlace, can_start, keep_near, plan_group
from broker.types import Estimate, Offer, Placement, Plan, Task


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
def test_no_other_region_is_cheaper_and_apart_is_never_dearer(prices: list[dict[str, float]]) -> None:
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
