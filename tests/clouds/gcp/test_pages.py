"""Lists of Google come in pages, and what is remembered of them expires."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker.clouds.base import CanSweep
from broker.clouds.gcp import check
from broker.clouds.gcp.sdk import Sdk
from broker.errors import AuthError, CapacityError, ThrottledError, TransientError
from broker.types import NodeRequest, NodeState, Offer

Make = Callable[..., NodeRequest]
MakeOffer = Callable[..., Offer]
OWNER = "0123456789ab"


def test_nodes_on_every_page_are_listed_by_a_process_that_made_none(
    bench: Any, request_of: Make, offer_of: MakeOffer
) -> None:
    made = []
    for number, zone in enumerate(("us-central1-a", "us-central1-b", "us-east4-c")):
        offer = offer_of(zone=zone, region=zone[:-2])
        made += bench.run(bench.cloud.create_nodes(request_of(offer, node_count=2, token=str(number) * 32)))
    bench.gce.page_size = 1
    bench.folder = bench.folder / "another"
    listed = bench.run(bench.make_cloud().list_nodes(OWNER))
    assert {node.id for node in listed} == {node.id for node in made} and not listed.unseen
    assert {(node.region, node.zone) for node in listed} == {(node.region, node.zone) for node in made}


def test_the_end_of_a_node_is_found_on_any_page(bench: Any, request_of: Make) -> None:
    """Each call to Google leaves an operation; the one with the reason is far from the first."""
    nodes = bench.run(bench.cloud.create_nodes(request_of(node_count=3)))
    bench.gce.preempt(nodes[1].id.rpartition("/")[2])
    for number in range(1, 5):
        bench.run(bench.cloud.create_nodes(request_of(token=str(number) * 32)))
    bench.gce.page_size = 1
    reasons = {node.id: node.reason for node in bench.run(bench.cloud.list_nodes(OWNER))}
    assert [reasons[node.id] for node in nodes] == ["", "preempted", ""]


def test_rules_on_every_page_are_swept(bench: Any, request_of: Make) -> None:
    assert isinstance(bench.cloud, CanSweep)
    for number in range(3):
        nodes = bench.run(
            bench.cloud.create_nodes(request_of(token=str(number) * 32, node_count=2, cluster=f"c{number}"))
        )
        bench.gce.instances.clear()
        assert nodes
    bench.gce.page_size = 2
    rules = [name for name in bench.gce.firewalls if not name.endswith("-shut")]
    assert len(rules) == 6
    bench.folder = bench.folder / "another"
    assert bench.run(bench.make_cloud().sweep(OWNER, {"c1"})) == 4
    bench.gce.list_names()
    assert {rule["description"] for name, rule in bench.gce.firewalls.items() if not name.endswith("-shut")} == {
        bench.gce.firewalls[name]["description"] for name in rules[2:4]
    }


def test_zones_of_a_machine_type_are_found_on_every_page(bench: Any, request_of: Make, offer_of: MakeOffer) -> None:
    bench.gce.page_size = 1
    bench.gce.capacity.update({(f"us-east4-{each}", "e2-standard-4"): 0 for each in "ab"})
    offer = offer_of(zone=None, region="us-east4")
    (node,) = bench.run(bench.cloud.create_nodes(request_of(offer)))
    assert (node.region, node.zone) == ("us-east4", "us-east4-c")
    bench.gce.capacity["us-east4-c", "e2-standard-4"] = 0
    with pytest.raises(CapacityError):
        bench.run(bench.cloud.create_nodes(request_of(offer, token="1" * 32)))


def test_quotas_of_regions_on_later_pages_are_reported(bench: Any) -> None:
    bench.gce.page_size = 1
    bench.gce.limits.update({(region, "NVIDIA_T4_GPUS"): 0.0 for region in ("us-central1", "us-east4")})
    bench.gce.limits.update({(region, "PREEMPTIBLE_NVIDIA_T4_GPUS"): 0.0 for region in ("us-central1", "us-east4")})
    found = bench.run(check.inspect_project(Sdk(bench.make_cloud()._login)))
    assert next(each.note for each in found if each.name == "quota T4") == "europe-west4 1000"
    bench.gce.limits.update({("us-east4", "NVIDIA_T4_GPUS"): 8.0, ("us-central1", "PREEMPTIBLE_NVIDIA_T4_GPUS"): 16.0})
    found = bench.run(check.inspect_project(Sdk(bench.make_cloud()._login)))
    note = next(each.note for each in found if each.name == "quota T4")
    assert note == "europe-west4 1000, us-central1 16, us-east4 8", "the largest first, spot or on-demand"


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        ("PROVISIONING", NodeState.PENDING), ("STAGING", NodeState.PENDING), ("REPAIRING", NodeState.PENDING),
        ("RUNNING", NodeState.RUNNING), ("STOPPING", NodeState.RUNNING), ("SUSPENDING", NodeState.RUNNING),
        ("SUSPENDED", NodeState.STOPPED), ("TERMINATED", NodeState.STOPPED),
    ],
)  # fmt: skip
def test_a_machine_is_billed_until_google_has_stopped_it(
    bench: Any, request_of: Make, status: str, wanted: NodeState
) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of(is_spot=False)))
    bench.run(bench.cloud.stop_nodes([node.id]))
    bench.gce.find(node.id.rpartition("/")[2])["status"] = status
    (seen,) = bench.run(bench.cloud.list_nodes(OWNER))
    assert seen.state is wanted and seen.reason == ""
    assert (seen.ended_s is not None) == (wanted is NodeState.STOPPED)


def test_an_ended_node_is_listed_for_an_hour(bed: Any, request_of: Make) -> None:
    async def act() -> None:
        (node,) = await bed.cloud.create_nodes(request_of())
        bed.gce.preempt(node.id.rpartition("/")[2])
        (ended,) = await bed.cloud.list_nodes(OWNER)
        assert ended.state is NodeState.TERMINATED and ended.ended_s is not None
        await bed.clock.sleep(3599)
        assert (await bed.cloud.list_nodes(OWNER)).nodes == (ended,)
        await bed.clock.sleep(1)
        assert (await bed.reopen().list_nodes(OWNER)).nodes == ()

    bed.run(act())


def test_access_is_renewed_for_a_gang_of_which_one_node_still_runs(bench: Any, request_of: Make) -> None:
    """This does not depend on which of its nodes is named last."""
    nodes = bench.run(bench.cloud.create_nodes(request_of(node_count=2)))
    bench.gce.preempt(nodes[1].id.rpartition("/")[2])
    other = bench.run(bench.cloud.create_nodes(request_of(token="1" * 32)))
    bench.gce.preempt(other[0].id.rpartition("/")[2])
    last = bench.run(bench.cloud.create_nodes(request_of(token="2" * 32)))
    for caller, order in (("198.51.100.9/32", nodes), ("198.51.100.10/32", nodes[::-1])):
        moved = bench.make_cloud()
        moved._launcher._find_callers = lambda login, caller=caller: (caller,)
        assert bench.run(moved.renew_access([*other, *order, *last])) is True
        assert bench.run(moved.renew_access([*last, *order, *other])) is False
    admitted = {name: rule["sourceRanges"] for name, rule in bench.gce.firewalls.items() if name.endswith("-ssh")}
    assert sorted(map(len, admitted.values())) == [1, 3, 3]


def test_a_node_that_could_not_start_keeps_the_label_of_its_stop(bench: Any, request_of: Make) -> None:
    """Without it the next list would take it for one that ended itself, and delete its disk."""
    (node,) = bench.run(bench.cloud.create_nodes(request_of(is_spot=False)))
    bench.run(bench.cloud.stop_nodes([node.id]))
    bench.gce.capacity["us-central1-a", "e2-standard-4"] = 0
    with pytest.raises(CapacityError):
        bench.run(bench.cloud.start_nodes([node.id]))
    (seen,) = bench.run(bench.cloud.list_nodes(OWNER))
    assert (seen.state, seen.reason) == (NodeState.STOPPED, "") and len(bench.gce.list_names()) == 1


def test_a_node_is_not_stopped_before_its_label_is_set(bench: Any, request_of: Make) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of(is_spot=False)))
    bench.gce.fail("POST", "/setLabels", code="forbidden", status=403)
    with pytest.raises(AuthError):
        bench.run(bench.cloud.stop_nodes([node.id]))
    assert bench.run(bench.cloud.list_nodes(OWNER)).nodes == (node,)
    bench.gce.fail("POST", "/stop", code="rateLimitExceeded", status=403)
    with pytest.raises(ThrottledError):
        bench.run(bench.cloud.stop_nodes([node.id]))
    assert bench.run(bench.cloud.list_nodes(OWNER)).nodes == (node,), "a label alone says nothing of one that runs"


def test_an_end_is_dated_by_google_and_not_by_when_it_was_seen(bed: Any, request_of: Make) -> None:
    async def act() -> None:
        nodes = await bed.cloud.create_nodes(request_of(node_count=2))
        bed.gce.preempt(nodes[0].id.rpartition("/")[2])
        bed.gce.list_names()
        ended_s = bed.clock.now_s()
        await bed.clock.sleep(600)
        await bed.cloud.terminate_nodes([nodes[1]])
        bed.gce.list_names()
        await bed.clock.sleep(60)
        ends = {node.id: node.ended_s for node in await bed.reopen().list_nodes(OWNER)}
        after_s = [(ends[node.id] or 0.0) - ended_s for node in nodes]
        assert after_s == pytest.approx([0.0, 600.0], abs=1.0)

    bed.run(act())


def test_a_minute_of_creates_shares_one_look_for_this_machines_address(bed: Any, request_of: Make) -> None:
    looks: list[str] = []
    cloud = bed.reopen()
    cloud._launcher._find_callers = lambda login: looks.append("look") or ("203.0.113.7/32",)

    async def act() -> None:
        for number, pause_s, count in ((1, 59.0, 1), (2, 1.0, 1), (3, 0.0, 2)):
            await cloud.create_nodes(request_of(token=str(number) * 32))
            assert len(looks) == count
            await bed.clock.sleep(pause_s)
        await cloud.renew_access(list((await cloud.list_nodes(OWNER)).nodes[:1]))
        assert len(looks) == 3, "a renewal looks again"

    bed.run(act())


def test_nothing_is_swept_while_a_zone_does_not_answer(bench: Any, request_of: Make) -> None:
    """A gang that cannot be seen now would lose its rules, and could no longer be reached."""
    (node,) = bench.run(bench.cloud.create_nodes(request_of()))
    bench.folder = bench.folder / "another"
    bench.gce.silent_zones = {node.zone}
    assert bench.run(bench.make_cloud().sweep(OWNER, set())) == 0
    bench.gce.silent_zones = set()
    assert bench.run(bench.make_cloud().sweep(OWNER, set())) == 0, "it runs"
    bench.gce.list_names()
    assert len(bench.gce.firewalls) == 2
    bench.gce.instances.clear()
    bench.folder = bench.folder / "a third"
    assert bench.run(bench.make_cloud().sweep(OWNER, set())) == 1


def test_the_newest_end_of_a_node_that_was_started_again_counts(bench: Any, request_of: Make) -> None:
    """Its host failed first, so it was started again; then it ended itself, and is deleted."""
    (node,) = bench.run(bench.cloud.create_nodes(request_of(is_spot=False)))
    bench.gce.break_host(node.id.rpartition("/")[2])
    assert bench.run(bench.cloud.list_nodes(OWNER)).nodes[0].reason == "crashed"
    bench.run(bench.cloud.start_nodes([node.id]))
    assert bench.run(bench.cloud.list_nodes(OWNER)).nodes[0].state is NodeState.RUNNING
    bench.gce.shut_down(node.id.rpartition("/")[2])
    assert bench.run(bench.cloud.list_nodes(OWNER)).nodes[0].reason == "lease"
    assert bench.gce.list_names() == []


def test_a_silent_zone_fails_no_other_region(bench: Any, request_of: Make, offer_of: MakeOffer) -> None:
    """Google fails a list over all zones as a whole unless partial success is asked for."""
    bench.gce.silent_zones = {"us-east4-a", "us-east4-b", "us-east4-c"}
    elsewhere = offer_of(zone=None, region="us-east4")
    with pytest.raises(TransientError, match="us-east4"):
        bench.run(bench.cloud.create_nodes(request_of(elsewhere, token="1" * 32)))
    (node,) = bench.run(bench.cloud.create_nodes(request_of(offer_of(zone=None))))
    listed = bench.run(bench.cloud.list_nodes(OWNER))
    assert [each.id for each in listed] == [node.id] and listed.unseen.keys() == {"us-east4"}


def test_a_node_whose_end_google_cannot_tell_now_is_not_gone_yet(bench: Any, request_of: Make) -> None:
    """Its instance is known to be gone, but not yet why: a preemption must not be recorded as something else."""
    (node,) = bench.run(bench.cloud.create_nodes(request_of()))
    bench.gce.preempt(node.id.rpartition("/")[2])
    bench.gce.silent_zones = {node.zone}
    listed = bench.run(bench.cloud.list_nodes(OWNER))
    assert [each.state for each in listed] == [node.state] and listed.unseen.keys() == {node.region}
    bench.gce.silent_zones = set()
    (ended,) = bench.run(bench.cloud.list_nodes(OWNER))
    assert (ended.state, ended.reason) == (NodeState.TERMINATED, "preempted")
