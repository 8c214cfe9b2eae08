"""A region without clear answers: the search soon continues elsewhere, and otherwise ends within a limit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from broker.errors import CapacityError, CloudError, TransientError, UnknownOutcomeError
from broker.provision import candidates
from broker.provision.creation import UNCLEAR_S_MAX
from broker.provision.refusals import REASK_S, REFUSAL_S_SHORT
from broker.types import Cluster, Node, NodeRequest
from broker.wording import describe_event
from tests.simulation.world import World, make_plan

FAULTS: list[Callable[[str], CloudError]] = [TransientError, UnknownOutcomeError]
EAST, WEST = ("east1a", "east1b"), ("west1a",)


class Search:
    """A search in which create calls in region east1 fail `times` times."""

    def __init__(self, folder: Path, fault: Callable[[str], CloudError], *, times: float = float("inf")) -> None:
        self.world = World(folder)
        self.messages: list[str] = []
        self.asked: list[str] = []
        self.end_s = 0.0
        create, left = self.world.cloud.create_nodes, times

        async def fail(request: NodeRequest) -> Sequence[Node]:
            nonlocal left
            self.asked.append(str(request.placement.offer.zone))
            if request.placement.offer.region == "east1" and left > 0:
                left -= 1
                raise fault("InternalError")
            return await create(request)

        self.world.cloud.create_nodes = fail  # type: ignore[method-assign]

    def up(self, *zones: str, hedge: int = 2, name: str = "c") -> Cluster:
        """Run the search; `end_s` is its duration, even if it fails."""
        provisioner, start_s = self.world.make_provisioner(), self.world.clock.now_s()

        async def act() -> Cluster:
            try:
                plan = make_plan(self.world.task, *zones)
                return await provisioner.up(
                    name, plan, hedge=hedge, on_event=lambda event: self.messages.append(describe_event(event))
                )
            finally:
                self.end_s = self.world.clock.now_s() - start_s
                await provisioner.finish()

        cluster = self.world.clock.run(act)
        assert isinstance(cluster, Cluster)
        return cluster


@pytest.mark.parametrize("fault", FAULTS)
def test_another_region_is_requested_soon_and_zones_of_the_suspect_one_are_skipped(
    tmp_path: Path, fault: Callable[[str], CloudError]
) -> None:
    search = Search(tmp_path, fault)
    assert search.up(*EAST, *WEST).placement.offer.zone == "west1a"
    usual_s = search.world.cloud.settle_s + search.world.cloud.timings.boot_s_max
    assert search.end_s <= usual_s + 10.0, "one list of what was created, then the other region's usual time"
    assert set(search.asked) == {"east1a", "west1a"}
    assert "has given no clear answer; also requesting 2 x big spot in west1a" in "\n".join(search.messages)
    assert not search.world.store.intents.list_open() and search.world.count_live(lambda node: True) == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_without_hedging_an_unclear_launch_is_abandoned_and_terminated_while_the_next_one_runs(
    tmp_path: Path, fault: Callable[[str], CloudError]
) -> None:
    search = Search(tmp_path, fault)
    assert search.up(*EAST, *WEST, hedge=1).placement.offer.zone == "west1a"
    assert search.end_s <= UNCLEAR_S_MAX + search.world.cloud.timings.boot_s_max + 10.0
    assert set(search.asked) == {"east1a", "west1a"}
    assert not any("remains to be tried" in line for line in search.messages)
    (hedged,) = (line for line in search.messages if "also requesting" in line)
    assert "up to 2.00 USD/h at once" in hedged, "the abandoned one no longer costs anything"
    assert not search.world.store.intents.list_open()


@pytest.mark.parametrize("hedge", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_search_without_other_regions_reports_so_and_ends(
    tmp_path: Path, fault: Callable[[str], CloudError], hedge: int
) -> None:
    """Regression: it alternated between two zones forever, because one was due again by the time the other failed."""
    search = Search(tmp_path, fault)
    with pytest.raises(CapacityError) as caught:
        search.up(*EAST, hedge=hedge)
    assert search.end_s <= 5 * UNCLEAR_S_MAX
    assert (
        len([line for line in search.messages if "no location outside east1 (simulated) remains to be tried" in line])
        == 1
    )
    assert "east1a" in str(caught.value.details) and "east1b" in str(caught.value.details)
    assert not search.world.store.intents.list_open() and not search.world.list_live_nodes()


@pytest.mark.parametrize("fault", FAULTS)
def test_all_searches_avoid_a_suspect_region_until_its_refusal_expires(
    tmp_path: Path, fault: Callable[[str], CloudError]
) -> None:
    search = Search(tmp_path, fault)
    with pytest.raises(CapacityError):
        search.up("east1a")
    search.asked.clear()
    assert search.up("east1b", *WEST, name="two").placement.offer.zone == "west1a"
    assert search.asked == ["west1a"], "another zone of the same region, another job"
    search.world.cloud.create_nodes = type(search.world.cloud).create_nodes.__get__(search.world.cloud)  # type: ignore[method-assign]
    search.world.clock.run(lambda: search.world.clock.sleep(REFUSAL_S_SHORT + REASK_S))
    assert search.up("east1b", *WEST, name="three").placement.offer.zone == "east1b"


def test_a_placement_that_recovers_after_one_fault_is_kept(tmp_path: Path) -> None:
    search = Search(tmp_path, TransientError, times=1)
    cluster = search.up(*EAST, hedge=1)
    assert cluster.placement.offer.zone == "east1a" and search.asked == ["east1a", "east1a"]


def test_a_postponed_placement_is_requested_once_its_region_recovers(tmp_path: Path) -> None:
    """The region recovers and its first zone is full: its second zone still precedes the more expensive region."""
    search = Search(tmp_path, TransientError, times=2)
    world, create = search.world, search.world.cloud.create_nodes

    async def answer(request: NodeRequest) -> Sequence[Node]:
        zone = str(request.placement.offer.zone)
        if zone == "west1a" or (zone == "east1a" and search.asked.count("east1a") >= 2):
            search.asked.append(zone)
            await world.clock.sleep(15.0 if zone == "west1a" else 2.0)
            raise CapacityError("full", scope="zone")
        return await create(request)

    world.cloud.create_nodes = answer  # type: ignore[method-assign]
    assert search.up(*EAST, "east1c", *WEST, "north1a").placement.offer.zone == "east1b"
    assert search.asked == ["east1a", "east1a", "west1a", "east1a", "east1b"], "the better of the two that were skipped"


def test_one_search_requests_a_placement_at_most_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal takes long enough for the other placement to be due again."""
    search = Search(tmp_path, TransientError, times=0)
    world = search.world

    async def refuse_late(request: NodeRequest) -> Sequence[Node]:
        search.asked.append(str(request.placement.offer.zone))
        await world.clock.sleep(2 * REASK_S * len(search.asked))
        raise CapacityError("full", scope="zone")

    world.cloud.create_nodes = refuse_late  # type: ignore[method-assign]
    with pytest.raises(CapacityError):
        search.up(*EAST, hedge=1)
    assert search.asked == [*EAST, *EAST]
    monkeypatch.setattr(candidates, "LAST_RESORT_MAX", 1)
    world.clock.run(lambda: world.clock.sleep(4 * 3600.0))
    search.asked.clear()
    with pytest.raises(CapacityError):
        search.up(*EAST, hedge=1, name="d")
    assert search.asked == [*EAST, EAST[0]], "a plan may have thousands of places: only a limited number is remembered"


def test_a_place_that_has_refused_is_not_requested_again_while_a_launch_makes_its_region_suspect(
    tmp_path: Path,
) -> None:
    random.seed(1)  # of the retries in `east1b`: with other pauses, its region may be clear when `west1a` refuses
    search = Search(tmp_path, TransientError)
    world, create = search.world, search.world.cloud.create_nodes

    async def answer(request: NodeRequest) -> Sequence[Node]:
        zone = str(request.placement.offer.zone)
        if zone == "east1b":
            return await create(request)
        search.asked.append(zone)
        if zone == "west1a":  # when it refuses, `east1a` is due again
            await world.clock.sleep(REASK_S + 10.0)
        raise CapacityError("full", scope="zone")

    world.cloud.create_nodes = answer  # type: ignore[method-assign]
    with pytest.raises(CapacityError):
        search.up(*EAST, *WEST)
    assert search.asked.count("east1b") > 2 and search.asked.count("west1a") == 2
    assert search.asked.count("east1a") == 1, "another launch there would reveal nothing new"
