"""The four verbs and stopping, through Google's own library, against a fake Compute Engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from broker.clouds.base import CanStop
from broker.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    QuotaError,
    ThrottledError,
    TransientError,
    UnknownOutcomeError,
)
from broker.types import MachineSpec, Node, NodeRequest, NodeState, Offer

Make = Callable[..., NodeRequest]
MakeOffer = Callable[..., Offer]
INSERT, BULK = "us-central1-a/instances", "bulkInsert"


def list_states(nodes: Sequence[Node]) -> list[tuple[int, NodeState, str]]:
    return sorted((node.rank, node.state, node.reason) for node in nodes)


def test_a_node_is_created_as_requested(bench: Any, request_of: Make, offer_of: MakeOffer) -> None:
    offer = offer_of("n1-highmem-4+1xT4")
    spec = MachineSpec(disk_size_gib=300, disk_tier="high", labels={"Team": "Vision & Co"})
    (node,) = bench.run(bench.cloud.create_nodes(request_of(offer, spec=spec, attempt=3, cluster="My.Run")))
    made = bench.gce.find(node.id.rpartition("/")[2])
    assert made["machineType"].endswith("/n1-highmem-4")
    assert made["guestAccelerators"][0]["acceleratorType"].endswith("/nvidia-tesla-t4")
    disk = made["disks"][0]["initializeParams"]
    assert (int(disk["diskSizeGb"]), disk["diskType"].rpartition("/")[2]) == (300, "pd-ssd")
    assert "nvidia" in disk["sourceImage"]
    assert made["scheduling"] == {
        "provisioningModel": "SPOT",
        "instanceTerminationAction": "DELETE",
        "maxRunDuration": {"seconds": str(7 * 86400)},
        "automaticRestart": False,
        "onHostMaintenance": "TERMINATE",
    }
    assert made["labels"]["broker-owner"] == node.owner and made["labels"]["broker-attempt"] == "3"
    assert made["labels"]["broker-cluster"].startswith("my-run-") and made["labels"].keys() >= {"team", "broker-token"}
    assert "serviceAccounts" not in made
    startup = {item["key"]: item["value"] for item in made["metadata"]["items"]}["startup-script"]
    assert startup.startswith("#!/bin/sh\n") and "echo hello" in startup
    assert (node.cluster, node.attempt, node.rank, node.is_spot, node.usd_hour) == ("My.Run", 3, 0, True, 0.25)
    assert node.state is NodeState.RUNNING and (node.region, node.zone) == ("us-central1", "us-central1-a")
    interface = made["networkInterfaces"][0]
    assert node.address == interface["networkIP"]
    assert node.handle == f"ssh://ubuntu@{interface['accessConfigs'][0]['natIP']}:22"


def test_an_ordinary_machine_starts_from_ubuntu_and_moves_when_its_host_does(bench: Any, request_of: Make) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of(is_spot=False)))
    made = bench.gce.find(node.id.rpartition("/")[2])
    assert made["scheduling"]["provisioningModel"] == "STANDARD"
    assert made["scheduling"]["onHostMaintenance"] == "MIGRATE"
    assert "ubuntu-os-cloud" in made["disks"][0]["initializeParams"]["sourceImage"]


@pytest.mark.parametrize(
    ("is_spot", "is_replaceable", "expected"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_only_machines_that_no_job_would_replace_restart_after_a_failure_of_their_host(
    bench: Any, request_of: Make, is_spot: bool, is_replaceable: bool, expected: bool
) -> None:
    """A broker server would stay down, with all of its jobs, until a person starts its machine."""
    spec = MachineSpec(is_replaceable=is_replaceable)
    (node,) = bench.run(bench.cloud.create_nodes(request_of(is_spot=is_spot, spec=spec)))
    assert bench.gce.find(node.id.rpartition("/")[2])["scheduling"]["automaticRestart"] is expected


@pytest.mark.parametrize("count", [1, 3])
def test_the_same_token_gives_the_same_nodes(bench: Any, request_of: Make, count: int) -> None:
    request = request_of(node_count=count)
    first = bench.run(bench.cloud.create_nodes(request))
    assert [node.rank for node in first] == list(range(count))
    assert bench.run(bench.cloud.create_nodes(request)) == first
    assert bench.run(bench.make_cloud().create_nodes(request)) == first  # after a crash
    assert len(bench.gce.instances) == count
    other = bench.run(bench.cloud.create_nodes(request_of(node_count=count, token="1" * 32)))
    assert not {node.id for node in other} & {node.id for node in first}


@pytest.mark.parametrize("count", [1, 3])
def test_a_lost_response_is_an_unknown_outcome_and_a_retry_creates_no_second_gang(
    bench: Any, request_of: Make, count: int
) -> None:
    request = request_of(node_count=count)
    bench.gce.fail("POST", BULK if count > 1 else INSERT, has_effect=True)
    with pytest.raises(UnknownOutcomeError):
        bench.run(bench.cloud.create_nodes(request))
    nodes = bench.run(bench.cloud.create_nodes(request))
    assert len(nodes) == len(bench.gce.instances) == count


def test_a_repeated_insert_is_found_by_name_if_google_forgot_its_id(bench: Any, request_of: Make) -> None:
    """Two of our processes run concurrently: neither sees the other's instance before its own insert."""
    request = request_of()
    first = bench.run(bench.cloud.create_nodes(request))
    bench.gce.forget_request_ids()
    bench.gce.fail("GET", "/instances/b-", status=404, code="notFound")
    assert bench.run(bench.make_cloud().create_nodes(request)) == first
    assert bench.gce.calls["POST zones/instances"] == 2 and len(bench.gce.instances) == 1


def test_a_gang_is_created_completely_or_not_at_all(bench: Any, request_of: Make) -> None:
    bench.gce.capacity["us-central1-a", "e2-standard-4"] = 2
    with pytest.raises(CapacityError) as caught:
        bench.run(bench.cloud.create_nodes(request_of(node_count=3)))
    assert caught.value.scope == "zone"
    assert bench.gce.list_names() == []
    assert [name for name in bench.gce.firewalls if not name.endswith("-shut")] == []


def test_a_region_is_asked_zone_by_zone_where_the_offer_names_none(
    bench: Any, request_of: Make, offer_of: MakeOffer
) -> None:
    bench.gce.capacity["us-central1-a", "e2-standard-4"] = 0
    request = request_of(offer_of(zone=None), node_count=2)
    nodes = bench.run(bench.cloud.create_nodes(request))
    assert {node.zone for node in nodes} == {"us-central1-b"}
    bench.gce.capacity["us-central1-a", "e2-standard-4"] = 9
    assert bench.run(bench.make_cloud().create_nodes(request)) == nodes
    bench.gce.capacity.update({(f"us-central1-{each}", "e2-standard-4"): 0 for each in "abc"})
    with pytest.raises(CapacityError):
        bench.run(bench.cloud.create_nodes(request_of(offer_of(zone=None), token="2" * 32)))


def test_a_quota_error_has_figures_and_precedes_every_create_call(
    bench: Any, request_of: Make, offer_of: MakeOffer
) -> None:
    for kind in ("", "PREEMPTIBLE_"):
        bench.gce.limits["us-central1", f"{kind}NVIDIA_T4_GPUS"] = 2
    with pytest.raises(QuotaError) as caught:
        bench.run(bench.cloud.create_nodes(request_of(offer_of("n1-standard-4+1xT4"), node_count=3)))
    assert "3 T4 GPUs requested in us-central1, 2 of 2 left" in caught.value.message
    assert "pretend" in caught.value.hints[0]
    assert not bench.gce.instances and not bench.gce.firewalls
    assert len(bench.run(bench.cloud.create_nodes(request_of(offer_of("n1-standard-4+1xT4"), node_count=2)))) == 2


def test_a_project_without_any_gpu_quota_is_refused_at_once(bench: Any, request_of: Make, offer_of: MakeOffer) -> None:
    bench.gce.limits["global", "GPUS_ALL_REGIONS"] = 1
    offer = offer_of("n1-standard-4+1xT4")
    with pytest.raises(QuotaError) as caught:
        bench.run(bench.cloud.create_nodes(request_of(offer, is_spot=False, node_count=2)))
    assert "2 GPUs of any kind requested in all regions together, 1 of 1 left" in caught.value.message
    assert bench.gce.calls["POST zones/instances/bulkInsert"] == 0
    assert len(bench.run(bench.cloud.create_nodes(request_of(offer, node_count=2)))) == 2  # spot


def test_existing_nodes_do_not_count_against_their_own_quota(bench: Any, request_of: Make) -> None:
    bench.gce.limits["us-central1", "PREEMPTIBLE_CPUS"] = 4
    bench.gce.limits["us-central1", "CPUS"] = 0
    nodes = bench.run(bench.cloud.create_nodes(request_of()))
    assert bench.run(bench.make_cloud().create_nodes(request_of())) == nodes


def test_a_spot_machine_draws_on_the_ordinary_quota_without_a_preemptible_one(bench: Any, request_of: Make) -> None:
    bench.gce.limits["us-central1", "PREEMPTIBLE_CPUS"] = 0
    assert len(bench.run(bench.cloud.create_nodes(request_of()))) == 1


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("rateLimitExceeded", 403, ThrottledError),
        ("forbidden", 403, AuthError),
        ("accessNotConfigured", 403, AuthError),
        ("quotaExceeded", 403, QuotaError),
        ("invalid", 400, InvalidRequestError),
        ("backendError", 503, UnknownOutcomeError),
        ("ZONE_RESOURCE_POOL_EXHAUSTED", 0, CapacityError),
        ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", 0, CapacityError),
        ("QUOTA_EXCEEDED", 0, QuotaError),
        ("INTERNAL_ERROR", 0, TransientError),
        ("RESOURCE_OPERATION_RATE_EXCEEDED", 0, ThrottledError),
    ],
)
def test_a_refused_insert_raises_its_class_and_leaves_nothing(
    bench: Any, request_of: Make, code: str, status: int, kind: type[Exception]
) -> None:
    bench.gce.fail("POST", INSERT, code=code, status=status)
    with pytest.raises(kind):
        bench.run(bench.cloud.create_nodes(request_of()))
    assert bench.gce.fault_counts == {f"POST {INSERT}": 1} and bench.gce.list_names() == []


@pytest.mark.parametrize("node_count", [1, 2])
@pytest.mark.parametrize("code", ["INTERNAL_ERROR", "RESOURCE_OPERATION_RATE_EXCEEDED"])
def test_an_insert_that_failed_is_not_answered_with_its_failure_again(
    bench: Any, request_of: Make, code: str, node_count: int
) -> None:
    """Google keeps a request id, and the failed operation with it, for an hour or more."""
    request = request_of(node_count=node_count)
    bench.gce.fail("POST", "/instances", code=code)
    with pytest.raises((TransientError, ThrottledError)):
        bench.run(bench.cloud.create_nodes(request))
    assert len(bench.run(bench.cloud.create_nodes(request))) == node_count


def test_tpu_machines_are_refused_with_the_way_to_them(bench: Any, request_of: Make, offer_of: MakeOffer) -> None:
    offer = offer_of("ct5lp-hightpu-8t", accelerator="TPU-v5e", accelerator_count=8)
    with pytest.raises(InvalidRequestError) as caught:
        bench.run(bench.cloud.create_nodes(request_of(offer)))
    assert "`sky check gcp`" in caught.value.hints[0] and not bench.gce.calls


def test_lists_distinguish_preempted_from_terminated_nodes(bench: Any, request_of: Make) -> None:
    nodes = bench.run(bench.cloud.create_nodes(request_of(node_count=2)))
    bench.gce.preempt(nodes[0].id.rpartition("/")[2])
    listed = bench.run(bench.cloud.list_nodes(nodes[0].owner))
    assert list_states(listed) == [(0, NodeState.TERMINATED, "preempted"), (1, NodeState.RUNNING, "")]
    bench.run(bench.cloud.terminate_nodes(nodes))
    listed = bench.run(bench.cloud.list_nodes(nodes[0].owner))
    assert list_states(listed) == [(0, NodeState.TERMINATED, "preempted"), (1, NodeState.TERMINATED, "terminated")]
    assert all(node.ended_s is not None and node.usd_hour == 0.25 for node in listed)


def test_another_process_knows_a_vanished_node_too(bench: Any, request_of: Make) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of()))
    bench.gce.preempt(node.id.rpartition("/")[2])
    (listed,) = bench.run(bench.make_cloud().list_nodes(node.owner))
    assert (listed.id, listed.state, listed.reason) == (node.id, NodeState.TERMINATED, "preempted")
    assert (listed.cluster, listed.token) == (node.cluster, node.token)


def test_a_node_that_is_not_listed_yet_does_not_count_as_gone(bench: Any, request_of: Make) -> None:
    bench.gce.list_lag_s = 3600.0
    (node,) = bench.run(bench.cloud.create_nodes(request_of()))
    assert bench.run(bench.cloud.list_nodes(node.owner)).nodes == (node,)


def test_a_node_of_another_owner_is_not_listed_whatever_its_label_says(bench: Any, request_of: Make) -> None:
    """Labels can be edited by everyone in the project, and nodes that are listed may be ended."""
    (theirs,) = bench.run(bench.cloud.create_nodes(request_of(owner="theirs")))
    (mine,) = bench.run(bench.cloud.create_nodes(request_of(token="1" * 32)))
    bench.gce.find(theirs.id.rpartition("/")[2])["labels"]["broker-owner"] = mine.owner
    assert [node.id for node in bench.run(bench.make_cloud().list_nodes(mine.owner))] == [mine.id]


def test_a_node_that_shut_itself_down_is_deleted_when_it_is_seen(bench: Any, request_of: Make) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of(is_spot=False)))
    bench.gce.shut_down(node.id.rpartition("/")[2])
    (seen,) = bench.run(bench.cloud.list_nodes(node.owner))
    assert seen.state is not NodeState.RUNNING and seen.reason == "lease"
    (gone,) = bench.run(bench.cloud.list_nodes(node.owner))
    assert (gone.state, gone.reason) == (NodeState.TERMINATED, "lease")
    assert bench.gce.list_names() == []


@pytest.mark.parametrize("is_spot", [False, True])
def test_a_node_whose_host_failed_keeps_its_disk_where_it_can_start_again(
    bench: Any, request_of: Make, is_spot: bool
) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of(is_spot=is_spot)))
    bench.gce.break_host(node.id.rpartition("/")[2])
    (seen,) = bench.run(bench.make_cloud().list_nodes(node.owner))
    assert (seen.state, seen.reason) == (NodeState.STOPPED, "crashed")
    bench.run(bench.cloud.list_nodes(node.owner))
    if is_spot:
        assert bench.gce.list_names() == []
    else:
        bench.run(bench.cloud.start_nodes([node.id]))
        assert bench.run(bench.cloud.list_nodes(node.owner)).nodes[0].state is NodeState.RUNNING


def test_a_disk_is_kept_if_the_reason_of_the_stop_is_unknown(bench: Any, request_of: Make) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of(is_spot=False)))
    bench.gce.shut_down(node.id.rpartition("/")[2])
    bench.gce.fail("GET", "aggregated/operations", code="forbidden", status=403)
    (seen,) = bench.run(bench.cloud.list_nodes(node.owner))
    assert seen.state is NodeState.STOPPED and len(bench.gce.list_names()) == 1


def test_a_disk_that_cannot_be_deleted_does_not_fail_the_list(bench: Any, request_of: Make) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of()))
    bench.gce.shut_down(node.id.rpartition("/")[2])
    bench.gce.fail("DELETE", "/instances/", code="backendError", status=503)
    assert len(bench.run(bench.cloud.list_nodes(node.owner))) == 1
    bench.run(bench.cloud.list_nodes(node.owner))
    assert bench.gce.list_names() == []


def test_nodes_with_local_disks_stop_and_start(bench: Any, request_of: Make, offer_of: MakeOffer) -> None:
    """SkyPilot's issue 2586: Google refuses a stop that does not state what happens to the local disks."""
    offer = offer_of("a3-highgpu-8g", accelerator="H100", accelerator_count=8)
    (node,) = bench.run(bench.cloud.create_nodes(request_of(offer, is_spot=False)))
    bench.run(bench.cloud.stop_nodes([node.id]))
    assert [each.state for each in bench.run(bench.cloud.list_nodes(node.owner))] == [NodeState.STOPPED]
    bench.run(bench.cloud.start_nodes([node.id]))
    assert [each.state for each in bench.run(bench.cloud.list_nodes(node.owner))] == [NodeState.RUNNING]


def test_a_refused_stop_leaves_a_node_that_ends_with_its_disk(bench: Any, request_of: Make) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of(is_spot=False)))
    bench.gce.fail("POST", "/stop", code="UNSUPPORTED_OPERATION")
    with pytest.raises(InvalidRequestError):
        bench.run(bench.cloud.stop_nodes([node.id]))
    bench.gce.shut_down(node.id.rpartition("/")[2])
    bench.run(bench.cloud.list_nodes(node.owner))
    assert bench.gce.list_names() == []


def test_stopped_nodes_keep_their_disk_and_start_again(bench: Any, request_of: Make) -> None:
    assert isinstance(bench.cloud, CanStop)
    nodes = bench.run(bench.cloud.create_nodes(request_of(is_spot=False, node_count=2)))
    ids = [node.id for node in nodes]
    bench.run(bench.cloud.stop_nodes(ids))
    for cloud in (bench.cloud, bench.make_cloud()):
        assert list_states(bench.run(cloud.list_nodes(nodes[0].owner))) == [
            (0, NodeState.STOPPED, ""),
            (1, NodeState.STOPPED, ""),
        ]
    bench.run(bench.cloud.stop_nodes(ids))  # requested twice
    bench.run(bench.cloud.start_nodes(ids))
    assert [node.state for node in bench.run(bench.cloud.list_nodes(nodes[0].owner))] == [NodeState.RUNNING] * 2
    bench.gce.shut_down(ids[0].rpartition("/")[2])  # now by itself: its label is removed again
    bench.run(bench.cloud.list_nodes(nodes[0].owner))
    assert bench.gce.list_names() == [ids[1].rpartition("/")[2]]


def test_a_full_zone_refuses_to_start_again(bench: Any, request_of: Make) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of(is_spot=False)))
    bench.run(bench.cloud.stop_nodes([node.id]))
    bench.gce.capacity["us-central1-a", "e2-standard-4"] = 0
    with pytest.raises(CapacityError):
        bench.run(bench.cloud.start_nodes([node.id]))


def test_terminate_tries_every_node_despite_a_failure_and_may_be_repeated(bench: Any, request_of: Make) -> None:
    nodes = bench.run(bench.cloud.create_nodes(request_of(node_count=3)))
    failing = nodes[1].id.rpartition("/")[2]
    bench.gce.fail("DELETE", failing, status=503, code="backendError")
    with pytest.raises(UnknownOutcomeError):
        bench.run(bench.cloud.terminate_nodes(nodes))
    assert bench.gce.list_names() == [failing]
    bench.run(bench.cloud.terminate_nodes(nodes))
    bench.run(bench.cloud.terminate_nodes([*nodes, replace(nodes[0], id="pretend/us-central1-a/b-nobody-0")]))
    assert bench.gce.list_names() == []


def test_a_delete_that_google_accepted_and_dropped_can_be_repeated(bench: Any, request_of: Make) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of()))
    bench.gce.fail("DELETE", "/instances/", code="INTERNAL_ERROR")
    bench.run(bench.cloud.terminate_nodes([node]))
    assert bench.run(bench.cloud.list_nodes(node.owner)).nodes[0].state is NodeState.RUNNING
    bench.run(bench.cloud.terminate_nodes([node]))
    assert bench.run(bench.cloud.list_nodes(node.owner)).nodes[0].state is NodeState.TERMINATED


def test_only_nodes_of_the_owner_are_listed(bench: Any, request_of: Make) -> None:
    bench.run(bench.cloud.create_nodes(request_of()))
    (other,) = bench.run(bench.cloud.create_nodes(request_of(owner="Somebody Else", token="3" * 32)))
    bench.gce.find(other.id.rpartition("/")[2])
    assert [node.owner for node in bench.run(bench.cloud.list_nodes("Somebody Else"))] == ["Somebody Else"]
    foreign = dict(bench.gce.find(other.id.rpartition("/")[2]), description="made by hand")
    bench.gce.instances["us-central1-a", foreign["name"]] = foreign
    assert bench.run(bench.make_cloud().list_nodes("0123456789ab")).nodes[0].owner == "0123456789ab"


def test_a_node_is_ended_in_the_project_it_was_made_in(bench: Any, request_of: Make) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of()))
    elsewhere = bench.make_cloud(project="another")
    bench.run(elsewhere.terminate_nodes([node]))
    assert bench.gce.list_names() == []


def test_nodes_invisible_to_another_login_are_assumed_to_exist(bench: Any, request_of: Make) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of()))
    bench.gce.fail("GET", "/instances/", code="forbidden", status=403)
    elsewhere = bench.make_cloud(project="another")
    bench.gce.others = {"another"}
    assert bench.run(elsewhere.list_nodes(node.owner)).nodes == (node,)


def test_a_zone_that_google_cannot_list_is_named(bench: Any, request_of: Make) -> None:
    """Its nodes are queried by name, so that they do not seem to be gone; a new login has none to query."""
    (node,) = bench.run(bench.cloud.create_nodes(request_of()))
    bench.gce.silent_zones = {node.zone}
    known, unknown = (bench.run(cloud.list_nodes(node.owner)) for cloud in (bench.cloud, bench.make_cloud()))
    assert known.unseen.keys() == {"us-central1"} and known.nodes[0].state is NodeState.RUNNING
    assert unknown.unseen.keys() == {"us-central1"} and known.account == node.account == "pretend"


def test_nothing_is_created_in_a_region_that_google_cannot_list(bench: Any, request_of: Make) -> None:
    bench.gce.silent_zones = {"us-central1-b"}
    with pytest.raises(TransientError, match="us-central1"):
        bench.run(bench.cloud.create_nodes(request_of()))
    assert bench.gce.list_names() == [] and not bench.gce.firewalls
    bench.gce.silent_zones = set()
    assert bench.run(bench.cloud.create_nodes(request_of()))


def test_unknown_end_reasons_do_not_fail_the_list(bench: Any, request_of: Make) -> None:
    (node,) = bench.run(bench.cloud.create_nodes(request_of()))
    bench.gce.preempt(node.id.rpartition("/")[2])
    bench.gce.fail("GET", "aggregated/operations", code="forbidden", status=403)
    (listed,) = bench.run(bench.cloud.list_nodes(node.owner))
    assert listed.state is NodeState.TERMINATED and listed.reason == "terminated"


def test_create_waits_for_googles_operation_to_finish(bench: Any, request_of: Make) -> None:
    bench.gce.latency_s = 0.05
    bench.gce.capacity["us-central1-a", "e2-standard-4"] = 2
    with pytest.raises(CapacityError):
        bench.run(bench.cloud.create_nodes(request_of(node_count=3)))
    assert bench.gce.list_names() == []
    nodes = bench.run(bench.cloud.create_nodes(request_of(node_count=2, token="1" * 32)))
    assert [node.state for node in nodes] == [NodeState.RUNNING] * 2


def test_a_token_is_for_one_cluster(bench: Any, request_of: Make) -> None:
    bench.run(bench.cloud.create_nodes(request_of()))
    with pytest.raises(InvalidRequestError):
        bench.run(bench.cloud.create_nodes(request_of(cluster="other")))


def test_without_a_project_nothing_is_listed_as_if_there_were_none(bench: Any, request_of: Make) -> None:
    lost = bench.make_cloud(project="")
    for work in (lost.list_nodes("me"), lost.create_nodes(request_of())):
        with pytest.raises(AuthError) as caught:
            bench.run(work)
        assert "gcloud config set project" in caught.value.hints[0]
