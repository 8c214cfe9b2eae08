"""Placements of a plan that differ in their zone only are joined, if the cloud can search several zones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from broker.provision.refusals import draw_backoff_s
from broker.provision.zones import find_actual_placement, join_zones, split_zones, unite_zones
from broker.types import Estimate, MachineSpec, Node, NodeState, Offer, Placement
from tests.simulation.world import make_offer


class Searching:
    """A cloud that can search several zones."""

    name = "simulated"

    def __init__(self, *, is_worth: bool = True) -> None:
        self.is_worth = is_worth
        self.asked: list[int] = []

    def is_search_worth(self, spec: MachineSpec, *, zone_count: int) -> bool:
        self.asked.append(zone_count)
        return self.is_worth


def make_estimate(zone: str | None, *, region: str = "east1", usd: float = 1.0, kind: str = "big") -> Estimate:
    offer: Offer = replace(make_offer("east1a"), zone=zone, region=region, spot_usd_hour=usd, instance_type=kind)
    return Estimate(placement=Placement(offer=offer, is_spot=True, node_count=2), preemptions_per_hour=0.1)


def as_alternative(estimate: Estimate, number: int) -> Estimate:
    """Return one that a user listed as another alternative of the task."""
    return replace(estimate, placement=replace(estimate.placement, alternative=number))


A, B, C = (make_estimate(f"east1{letter}") for letter in "abc")


def join(estimates: Sequence[Estimate], *, cloud: Any = None) -> list[tuple[str | None, tuple[str, ...]]]:
    clouds: Mapping[str, Any] = {"simulated": cloud or Searching()}
    found = join_zones(estimates, clouds, lambda placement: MachineSpec())
    return [(each.offer.zone, each.other_zones) for each in found]


def test_the_test_cloud_supports_zone_search() -> None:
    from broker.clouds.base import SupportsZoneSearch

    assert isinstance(Searching(), SupportsZoneSearch) and A.placement.offer.cloud == "simulated"


def test_rows_that_differ_only_by_zone_are_joined() -> None:
    cloud = Searching()
    assert join([A, B, C], cloud=cloud) == [("east1a", ("east1b", "east1c"))]
    assert cloud.asked == [3]


@pytest.mark.parametrize(
    "other",
    [
        make_estimate("east1b", usd=1.1),
        make_estimate("west1b", region="west1"),
        make_estimate("east1b", kind="small"),
        make_estimate(None),
        replace(B, preemptions_per_hour=0.2),
    ],
)
def test_placements_with_other_differences_stay_separate_and_in_order(other: Estimate) -> None:
    zone = other.placement.offer.zone
    assert join([A, other, C]) == [("east1a", ()), (zone, ()), ("east1c", ())]
    assert join([other, A, B]) == [(zone, ()), ("east1a", ("east1b",))]


def test_zones_are_not_joined_if_unsupported_not_worthwhile_or_listed_by_the_user() -> None:
    apart = [("east1a", ()), ("east1b", ())]
    assert join([A, B], cloud=object()) == apart
    assert join([A, B], cloud=Searching(is_worth=False)) == apart
    assert join([A, as_alternative(B, 1)]) == apart
    assert join([A, B, as_alternative(C, 1)]) == [("east1a", ("east1b",)), ("east1c", ())]
    assert join([]) == []


def test_zones_are_split_best_first_and_joined_again() -> None:
    first, second, third = (each.placement for each in (A, B, C))
    united = unite_zones([first, second, third])
    assert united == replace(first, other_zones=("east1b", "east1c"))
    assert list(split_zones(united)) == [first, second, third]
    assert split_zones(first) == [first] and unite_zones([second]) == second


def test_the_actual_placement_is_the_zone_of_the_nodes() -> None:
    united = unite_zones([A.placement, B.placement])

    def land(zone: str) -> Placement:
        node = Node(
            id="n", cloud="x", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING, zone=zone
        )  # fmt: skip
        return find_actual_placement(united, [node])

    assert (land("east1a"), land("east1b"), land("elsewhere")) == (A.placement, B.placement, united)


def test_the_backoff_grows_with_each_try_up_to_a_cap_and_is_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[tuple[float, float]] = []
    monkeypatch.setattr("random.uniform", lambda low, high: bounds.append((low, high)) or high)
    assert [draw_backoff_s(tries) for tries in (0, 1, 2, 10)] == [1.0, 2.0, 4.0, 30.0]
    assert draw_backoff_s(3, base_s=0.5, cap_s=3.0) == 3.0
    assert draw_backoff_s(10_000) == 30.0, "a night of tries ended in an OverflowError"
    assert {low for low, _ in bounds} == {0.05}
