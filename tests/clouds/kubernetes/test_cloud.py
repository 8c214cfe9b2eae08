"""Kubernetes alone: forbidden namespaces, pods that never start, lists that fail, nodes that vanish."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from broker.clock import SystemClock
from broker.clouds.kubernetes import states
from broker.clouds.kubernetes.cloud import KubernetesCloud
from broker.clouds.kubernetes.manifest import FINALIZER, REQUEST_ANNOTATION, make_record, name_gang
from broker.errors import (
    AuthError,
    CapacityError,
    CloudError,
    DeniedError,
    InvalidRequestError,
    QuotaError,
    TransientError,
    UnknownOutcomeError,
)
from broker.sites.kubernetes import KubernetesContext
from broker.sites.openssh import Completed
from broker.types import MachineSpec, Node, NodeState
from tests.clouds.beds import OWNER, count_living, list_of, make_request, wait_for, wait_state
from tests.clouds.kubernetes.api_server import ApiServer
from tests.clouds.kubernetes.bed import KubernetesBed


def list_names(bed: KubernetesBed) -> list[str]:
    return [pod["metadata"]["name"] for pod in bed.server.cluster.list("ml")]


def test_forbidden_namespace_is_a_denial_with_the_role_as_hint(bed: KubernetesBed) -> None:
    bed.server.denied.add(("ml", "pods"))
    with pytest.raises(DeniedError) as caught:
        bed.run(bed.cloud.create_nodes(make_request(bed)))
    assert "--policy kubernetes" in caught.value.hints[0] and not list_names(bed)


def test_quota_for_a_part_of_the_gang_leaves_nothing(bed: KubernetesBed) -> None:
    bed.server.cluster.quota = 1
    with pytest.raises(QuotaError):
        bed.run(bed.cloud.create_nodes(make_request(bed, node_count=3)))
    # A pod that had started has its grace period; nothing but the deletion is left to do.
    assert all("deletionTimestamp" in pod["metadata"] for pod in bed.server.cluster.list("ml"))
    bed.server.cluster.wait_until(lambda pods: not pods)


def test_failed_rollback_is_an_unknown_outcome(bed: KubernetesBed) -> None:
    bed.server.cluster.quota = 1
    bed.server.errors = [("DELETE", 500, "InternalError")]
    with pytest.raises(UnknownOutcomeError):
        bed.run(bed.cloud.create_nodes(make_request(bed, node_count=2)))
    assert len(list_names(bed)) == 1


def test_gang_with_a_missing_pod_is_completed_by_a_repeated_call(bed: KubernetesBed) -> None:
    async def act() -> None:
        request = make_request(bed, node_count=2)
        bed.server.errors = [("POST", 500, "InternalError")]
        with pytest.raises(UnknownOutcomeError):
            await bed.cloud.create_nodes(request)
        assert len(list_names(bed)) == 1
        nodes = await bed.cloud.create_nodes(request)
        assert [node.rank for node in nodes] == [0, 1]

    bed.run(act())


def test_login_without_sight_of_other_namespaces_waits_for_room_instead(bed: KubernetesBed) -> None:
    bed.fill()
    bed.server.denied.add(("", "pods"))

    async def act() -> None:
        request = make_request(bed)
        (node,) = await bed.cloud.create_nodes(request)
        assert node.state is NodeState.PENDING

    bed.run(act())


def test_pod_without_room_ends_after_a_while_with_the_schedulers_reason(
    bed: KubernetesBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.fill()
    bed.server.denied.add(("", "pods"))

    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        await asyncio.sleep(0)
        (node,) = await list_of(bed, request.token)
        assert node.state is NodeState.PENDING, "it may wait for five minutes"
        monkeypatch.setattr(states, "UNSCHEDULABLE_S", 0.0)
        (node,) = await wait_state(bed, request.token, NodeState.TERMINATED)
        assert node.reason == "no room: 0/4 nodes are available"

    bed.run(act())


@pytest.mark.long
def test_autoscaled_pool_keeps_its_pods_waiting(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = KubernetesBed(server, is_autoscaled=True)
    bed.fill()
    monkeypatch.setattr(states, "UNSCHEDULABLE_S", 0.0)

    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        for _ in range(3):
            (node,) = await list_of(bed, request.token)
            assert node.state is NodeState.PENDING
        server.cluster.add_node("fresh", cpu="8")
        await wait_state(bed, request.token, NodeState.RUNNING)

    bed.run(act())


def test_image_that_cannot_be_pulled_ends_the_launch_with_its_name(
    bed: KubernetesBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(states.STUCK_S, "ImagePullBackOff", 0.0)  # type: ignore[arg-type]
    bed.server.cluster.images_missing.add("nosuch/image:1")

    async def act() -> None:
        request = make_request(bed, spec=MachineSpec(image_id="docker:nosuch/image:1"))
        await bed.cloud.create_nodes(request)
        await asyncio.to_thread(bed.server.cluster.wait_until, lambda pods: any(states.find_obstacle(p) for p in pods))
        bed.server.errors = [("DELETE", 500, "InternalError")]
        listed = await bed.cloud.list_nodes(OWNER)
        assert [each.state for each in listed] == [NodeState.PENDING] and not listed.unseen, "it hides no other pod"
        assert not bed.server.errors, "the deletion was tried"
        (node,) = await wait_state(bed, request.token, NodeState.TERMINATED)
        assert node.reason == "ImagePullBackOff: image `nosuch/image:1` (not found)"

    bed.run(act())


def test_context_that_does_not_answer_is_unseen_and_the_others_are_listed(bed: KubernetesBed) -> None:
    def make(*names: str) -> KubernetesCloud:
        contexts = {
            name: KubernetesContext(name=name, context=name, kubeconfig=bed.server.kubeconfig, namespace="ml")
            for name in names
        }
        return KubernetesCloud(lambda: (contexts, {"test": [bed.pool]}), clock=bed.clock)

    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        found = await make("test", "gone").list_nodes(OWNER)
        assert [node.token for node in found] == [request.token]
        assert list(found.unseen) == ["gone"]
        with pytest.raises(Exception, match="gone"):
            await make("gone").list_nodes(OWNER)

    bed.run(act())


def test_pods_of_a_context_or_namespace_that_left_the_file_do_not_count_as_gone() -> None:
    def find(node: Node, **contexts: KubernetesContext) -> CloudError | None:
        return KubernetesCloud(lambda: (contexts, {}), clock=SystemClock()).find_removal(node.region, node)

    node = Node(
        id="pod-1", cloud="kubernetes", owner=OWNER, cluster="c", attempt=1, rank=0, state=NodeState.RUNNING,
        region="lab", handle="k8s://lab/ml/pod-1",
    )  # fmt: skip
    lab = KubernetesContext(name="lab", context="lab", namespace="ml")
    assert find(node, lab=lab) is None and find(node, lab=replace(lab, is_off=True)) is None
    gone = find(node, other=lab)
    assert isinstance(gone, AuthError) and "add `lab: {}`" in gone.hints[0]
    moved = find(node, lab=replace(lab, namespace="new"))
    assert isinstance(moved, AuthError) and "set `namespace: ml` of `lab`" in moved.hints[0]


def test_failed_list_is_not_an_empty_list(bed: KubernetesBed) -> None:
    for code, reason in ((500, "InternalError"), (503, "ServiceUnavailable"), (504, "Timeout")):
        bed.server.errors = [("GET /api/v1/", code, reason)]
        with pytest.raises(TransientError):
            bed.run(bed.cloud.list_nodes(OWNER))


@pytest.mark.long
def test_terminate_attempts_every_pod_and_raises_the_first_failure(bed: KubernetesBed) -> None:
    async def act() -> None:
        request = make_request(bed, node_count=2)
        nodes = await bed.cloud.create_nodes(request)
        bed.server.errors = [("DELETE", 500, "InternalError")]
        with pytest.raises(TransientError):
            await bed.cloud.terminate_nodes(nodes)
        found = await wait_for(bed, request.token, lambda nodes: any(n.state is NodeState.TERMINATED for n in nodes))
        assert sorted(node.state for node in found) != [NodeState.TERMINATED, NodeState.TERMINATED]
        await bed.cloud.terminate_nodes(nodes)
        await wait_state(bed, request.token, NodeState.TERMINATED, 2)

    bed.run(act())


def test_node_that_vanishes_preempts_its_spot_pod(bed: KubernetesBed) -> None:
    async def act() -> None:
        request = make_request(bed, is_spot=True)
        await bed.cloud.create_nodes(request)
        (node,) = await wait_state(bed, request.token, NodeState.RUNNING)
        bed.server.cluster.lose_node(bed.server.cluster.find(node.id)["spec"]["nodeName"])
        (node,) = await wait_state(bed, request.token, NodeState.TERMINATED)
        assert node.reason == "preempted"

    bed.run(act())


def test_pod_does_not_outlive_its_deadline(server: ApiServer) -> None:
    bed = KubernetesBed(server, hours_max=1 / 3600)

    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        (node,) = await wait_state(bed, request.token, NodeState.TERMINATED)
        assert node.reason == "time limit"

    bed.run(act())


def test_unclaimed_pod_ends_itself(bed: KubernetesBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.clouds.kubernetes.manifest.UNCLAIMED_S", 0.1)

    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.create_nodes(request)
        (node,) = await wait_state(bed, request.token, NodeState.TERMINATED)
        assert node.reason == "lease"

    bed.run(act())


@pytest.mark.long
def test_sweep_keeps_recent_records_of_living_clusters(bed: KubernetesBed) -> None:
    async def act() -> None:
        request = make_request(bed)
        (node,) = await bed.cloud.create_nodes(request)
        assert await bed.cloud.sweep(OWNER, []) == 0, "a living pod is never swept"
        await bed.cloud.terminate_nodes([node])
        await wait_state(bed, request.token, NodeState.TERMINATED)
        assert await bed.cloud.sweep(OWNER, ["train"]) == 0
        pod = bed.server.cluster.find(node.id)
        assert pod["metadata"]["finalizers"] == [FINALIZER]
        assert await bed.cloud.sweep(OWNER, []) == 1
        assert not list_names(bed)

    bed.run(act())


def test_sweep_of_the_other_contexts_goes_on_without_one_that_does_not_answer(bed: KubernetesBed) -> None:
    contexts = {
        name: KubernetesContext(name=name, context=name, kubeconfig=bed.server.kubeconfig, namespace="ml")
        for name in ("gone", "test")
    }
    cloud = KubernetesCloud(lambda: (contexts, {"test": [bed.pool]}), clock=bed.clock)

    async def act() -> None:
        request = make_request(bed)
        await bed.cloud.terminate_nodes(await bed.cloud.create_nodes(request))
        await wait_state(bed, request.token, NodeState.TERMINATED)
        with pytest.raises(Exception, match="gone"):
            await cloud.sweep(OWNER, [])
        assert not list_names(bed)

    bed.run(act())


def test_pod_kept_by_a_container_of_others_is_deleted(bed: KubernetesBed) -> None:
    """The proxy of a service mesh runs on after our container, and would keep the pod's cards."""
    record = make_record(make_request(bed), 0, now_s=1.0)
    ended = {"name": "node", "state": {"terminated": {"exitCode": 71, "finishedAt": "2026-11-24T18:00:00Z"}}}
    pod = {
        "metadata": {"name": "p-0", "namespace": "ml", "annotations": {REQUEST_ANNOTATION: json.dumps(record)}},
        "spec": {"nodeName": "n0", "containers": [{"name": "node"}, {"name": "istio-proxy"}]},
        "status": {
            "phase": "Running", "podIP": "10.0.0.1",
            "containerStatuses": [{"name": "istio-proxy", "state": {"running": {}}}, ended],
        },
    }  # fmt: skip
    calls: list[Sequence[str]] = []

    async def run(context: KubernetesContext, words: Sequence[str], stdin: bytes) -> Completed:
        calls.append(words)
        return Completed(returncode=0, stdout=json.dumps({"items": [pod]}).encode(), stderr=b"")

    context = KubernetesContext(name="test", context="test", namespace="ml")
    cloud = KubernetesCloud(lambda: ({"test": context}, {}), clock=bed.clock, run=run)
    (node,) = asyncio.run(cloud.list_nodes(OWNER)).nodes
    assert (node.state, node.reason) == (NodeState.TERMINATED, "lease")
    assert [words[2].partition("?")[0] for words in calls if words[0] == "delete"] == ["/api/v1/namespaces/ml/pods/p-0"]


def test_pods_of_others_with_our_labels_are_left_alone(bed: KubernetesBed) -> None:
    async def act() -> None:
        request = make_request(bed)
        labels = {"broker-owner": OWNER, "broker-gang": name_gang(request)}
        bed.server.cluster.create("ml", {"metadata": {"name": "x", "labels": labels}, "spec": make_spec()})
        await bed.cloud.create_nodes(request)
        assert await count_living(bed) == 1
        assert await bed.cloud.sweep(OWNER, []) == 0
        assert "x" in list_names(bed)

    bed.run(act())


def test_unknown_context_is_an_invalid_request(bed: KubernetesBed) -> None:
    bed.offer = replace(bed.offer, region="elsewhere")
    with pytest.raises(InvalidRequestError, match="no context `elsewhere`"):
        bed.run(bed.cloud.create_nodes(make_request(bed)))


def test_room_for_exactly_the_gang_is_enough(bed: KubernetesBed) -> None:
    bed.leave_room(2)

    async def act() -> None:
        assert len(await bed.cloud.create_nodes(make_request(bed, node_count=2))) == 2

    bed.run(act())


def test_refused_room_names_the_switch_for_autoscaled_pools(bed: KubernetesBed) -> None:
    bed.leave_room(1)
    with pytest.raises(CapacityError, match="room for 1 of 2 pods") as caught:
        bed.run(bed.cloud.create_nodes(make_request(bed, node_count=2)))
    assert "autoscaled: true" in caught.value.hints[0]


def make_spec() -> dict[str, Any]:
    return {"containers": [{"name": "main", "image": "busybox", "command": ["sleep", "1000"]}]}
