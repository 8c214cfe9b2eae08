"""A pod's status as the state of a node, and kubectl's errors as error classes."""

from __future__ import annotations

from typing import Any

import pytest

from broker.clouds.kubernetes.states import (
    DISRUPTIONS,
    ERRORS,
    REASONS,
    STUCK_S,
    UNSCHEDULABLE_S,
    ObjectMissingError,
    find_error,
    find_obstacle,
    find_state,
    is_outlived,
)
from broker.errors import (
    AuthError,
    CloudError,
    DeniedError,
    InvalidRequestError,
    QuotaError,
    ThrottledError,
    TransientError,
    UnknownOutcomeError,
)
from broker.types import NodeState

NOW = "2026-11-24T18:00:00Z"
# StatusReason of k8s.io/apimachinery/pkg/apis/meta/v1/types.go, without the empty one.
STATUS_REASONS = (
    "Unauthorized", "Forbidden", "NotFound", "AlreadyExists", "Conflict", "Gone", "Invalid", "ServerTimeout",
    "StoreReadError", "Timeout", "TooManyRequests", "BadRequest", "MethodNotAllowed", "NotAcceptable",
    "RequestEntityTooLarge", "UnsupportedMediaType", "InternalError", "Expired", "ServiceUnavailable",
)  # fmt: skip


def make_pod(
    phase: str = "Running", *, state: Any = None, reason: str = "", disruption: str = "", is_deleted: bool = False,
    node: str | None = "n0",
) -> dict[str, Any]:  # fmt: skip
    status: dict[str, Any] = {"phase": phase, "conditions": [], "startTime": NOW}
    if state:
        status |= {"containerStatuses": [{"name": "node", "state": state}], "podIP": "10.0.0.1"}
    if reason:
        status["reason"] = reason
    if disruption:
        status["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": disruption}]
    metadata = {"name": "p", **({"deletionTimestamp": NOW} if is_deleted else {})}
    spec = {"containers": [{"name": "node", "image": "python"}], **({"nodeName": node} if node else {})}
    return {"metadata": metadata, "spec": spec, "status": status}


def end_with(code: int, reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": NOW}}


RUNNING = {"running": {"startedAt": NOW}}


def test_every_reason_of_the_api_server_has_a_class() -> None:
    assert set(ERRORS) == set(STATUS_REASONS)


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        ('Error from server (Forbidden): pods is forbidden: User "a" cannot create resource "pods"', DeniedError),
        ('Error from server (Forbidden): pods "a" is forbidden: exceeded quota: team, requested: pods=1', QuotaError),
        ('Error from server (Forbidden): pods "a" is forbidden: status unknown for quota: team, resources: pods',
         TransientError),
        ('Error from server (Forbidden): pods "a" is forbidden: [maximum memory usage per Container is 4Gi, but limit '
         "is 16Gi]", InvalidRequestError),
        ('Error from server (Forbidden): pods "a" is forbidden: violates PodSecurity "restricted:latest": '
         "runAsNonRoot != true", DeniedError),
        ('Error from server: admission webhook "validate.kyverno.svc-fail" denied the request: label `team` is missing',
         DeniedError),
        ('Error from server (Forbidden): admission webhook "validation.gatekeeper.sh" denied the request: [team] x',
         DeniedError),
        ("error: You must be logged in to the server (Unauthorized)", AuthError),
        ("error: You must be logged in to the server (the server has asked for the client to provide credentials)",
         AuthError),
        ("Unable to connect to the server: getting credentials: exec: executable aws failed with exit code 255",
         AuthError),
        ("Unable to connect to the server: tls: failed to verify certificate: x509: unknown authority", AuthError),
        ('error: context "x" does not exist', AuthError),
        ("Error from server (TooManyRequests): too many requests", ThrottledError),
        ("Error from server (InternalError): etcd is away", UnknownOutcomeError),
        ("Error from server (Timeout): request did not complete", UnknownOutcomeError),
        ("Error from server (ServiceUnavailable): the server is currently unable", TransientError),
        ('Error from server (NotFound): namespaces "x" not found', ObjectMissingError),
        ("The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?",
         TransientError),
        ("Unable to connect to the server: dial tcp: lookup api.example.org: no such host", TransientError),
        ("Unable to connect to the server: EOF", UnknownOutcomeError),
        ("Unable to connect to the server: net/http: request canceled (Client.Timeout exceeded)", UnknownOutcomeError),
        ("", UnknownOutcomeError),
    ],
)  # fmt: skip
def test_errors_of_kubectl_have_classes(stderr: str, kind: type[CloudError]) -> None:
    error = find_error(stderr, "lab")
    assert type(error) is kind
    assert "lab" in error.message
    assert error.hints or kind not in (AuthError, DeniedError, QuotaError)


def test_hint_of_a_refusal_names_what_refused() -> None:
    """The hint about the Role sends the user to an administrator who can do nothing."""
    forbidden = 'Error from server (Forbidden): pods "a" is forbidden: '
    for text, word in (
        (f"{forbidden}[maximum cpu usage per Pod is 2, but limit is 8]", "describe limits"),
        (f'{forbidden}violates PodSecurity "restricted:latest": x', "securityContext"),
        ('Error from server: admission webhook "w" denied the request: no', "policy of the cluster"),
        (f"{forbidden}unable to create new content in namespace ml because it is being terminated", "`namespace`"),
        (f'{forbidden}error looking up service account ml/x: serviceaccount "x" not found', "`service_account`"),
        (f"{forbidden}no PriorityClass with name x was found", "`priority_class`"),
        (f"{forbidden}failed quota: team: must specify limits.ephemeral-storage", "describe quota"),
    ):
        hints = find_error(text, "lab").hints
        assert word in hints[0] and "--policy kubernetes" not in hints[0], text


def add_sidecar(pod: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Add the container that a service mesh injects; the kubelet lists statuses by name, not in the order of `spec`."""
    pod["spec"]["containers"].append({"name": "istio-proxy", "image": "proxy"})
    own = pod["status"].get("containerStatuses", [])
    pod["status"]["containerStatuses"] = [{"name": "istio-proxy", "state": state}, *own]
    return pod


def test_container_of_others_neither_starts_nor_keeps_a_node() -> None:
    ended = add_sidecar(make_pod(state=end_with(71)), RUNNING)
    assert find_state(ended, is_spot=False)[:2] == (NodeState.TERMINATED, "lease")
    assert is_outlived(ended), "it would keep its cards"
    waiting = add_sidecar(make_pod("Pending", state={"waiting": {"reason": "ImagePullBackOff"}}), RUNNING)
    assert find_state(waiting, is_spot=False)[0] is NodeState.PENDING and not is_outlived(waiting)
    running = add_sidecar(make_pod(state=RUNNING), end_with(71))
    assert find_state(running, is_spot=False)[0] is NodeState.RUNNING and not is_outlived(running)
    assert not is_outlived(make_pod("Failed", state=end_with(1)))


def test_pod_that_was_deleted_by_force_on_a_silent_host_is_gone() -> None:
    pod = make_pod(state=RUNNING, is_deleted=True)
    pod["metadata"]["deletionGracePeriodSeconds"] = 0
    assert find_state(pod, is_spot=False)[0] is NodeState.RUNNING, "its kubelet ends it"
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    assert find_state(pod, is_spot=False)[:2] == (NodeState.TERMINATED, "node lost")
    assert find_state(pod, is_spot=True)[1] == "preempted"
    pod["metadata"]["deletionGracePeriodSeconds"] = 1  # broker's own request
    assert find_state(pod, is_spot=False)[0] is NodeState.RUNNING


@pytest.mark.parametrize(
    ("pod", "state", "reason"),
    [
        (make_pod("Pending", node=None), NodeState.PENDING, ""),
        (make_pod("Pending", state={"waiting": {"reason": "ContainerCreating"}}), NodeState.PENDING, ""),
        (make_pod(state=RUNNING), NodeState.RUNNING, ""),
        (make_pod(state=RUNNING, is_deleted=True), NodeState.RUNNING, ""),  # its processes may live
        (make_pod("Pending", node=None, is_deleted=True), NodeState.TERMINATED, "terminated"),
        (make_pod("Failed", state=end_with(137), is_deleted=True), NodeState.TERMINATED, "terminated"),
        (make_pod("Running", state=end_with(137), is_deleted=True), NodeState.TERMINATED, "terminated"),
        (make_pod("Failed", state=end_with(71)), NodeState.TERMINATED, "lease"),
        (make_pod("Failed", state=end_with(72)), NodeState.TERMINATED, "done"),
        (make_pod("Failed", state=end_with(1)), NodeState.TERMINATED, "crashed"),
        (make_pod("Failed", state=end_with(137, "OOMKilled")), NodeState.TERMINATED, "out of memory"),
        (make_pod("Failed", reason="DeadlineExceeded"), NodeState.TERMINATED, "time limit"),
        (make_pod("Failed", reason="Terminated"), NodeState.TERMINATED, "preempted"),
        (make_pod("Failed", state=end_with(137), disruption="DeletionByPodGC"), NodeState.TERMINATED, "node lost"),
        (make_pod("Failed", disruption="EvictionByEvictionAPI", is_deleted=True), NodeState.TERMINATED, "preempted"),
    ],
)
def test_status_of_a_pod_is_the_state_of_a_node(pod: dict[str, Any], state: NodeState, reason: str) -> None:
    found = find_state(pod, is_spot=False)
    assert found[:2] == (state, reason)
    has_time = "terminated" in str(pod["status"]) or "deletionTimestamp" in pod["metadata"]
    assert (found[2] is not None) == (state is NodeState.TERMINATED and has_time)


def test_lost_node_of_a_spot_pool_is_a_preemption() -> None:
    pod = make_pod("Failed", disruption="DeletionByPodGC")
    assert find_state(pod, is_spot=True)[1] == "preempted"
    assert find_state(pod, is_spot=False)[1] == "node lost"


def test_node_pressure_is_not_a_preemption() -> None:
    pod = make_pod("Failed", reason="Evicted", disruption="TerminationByKubelet")
    assert find_state(pod, is_spot=True)[1].startswith("evicted")


def test_every_disruption_has_a_reason() -> None:
    for name, reason in {**DISRUPTIONS, **REASONS}.items():
        pod = make_pod("Failed", disruption=name) if name in DISRUPTIONS else make_pod("Failed", reason=name)
        assert find_state(pod, is_spot=False)[1] == reason


def test_obstacles_say_why_and_since_when() -> None:
    for reason, limit_s in STUCK_S.items():
        found = find_obstacle(make_pod("Pending", state={"waiting": {"reason": reason}}))
        assert found is not None
        assert found[0] == f"{reason}: image `python`" and found[1] == limit_s and found[2] is not None
    pod = make_pod("Pending", node=None)
    assert find_obstacle(pod) is None
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    pod["status"]["conditions"] = [{**condition, "lastTransitionTime": NOW}]
    found = find_obstacle(pod)
    assert found is not None and found[:2] == ("no room: 0/3 nodes", UNSCHEDULABLE_S)
    pod["status"]["conditions"] = [{**condition, "reason": "SchedulingGated"}]
    assert find_obstacle(pod) is None, "Kueue holds it in its queue"


def test_image_without_python3_is_the_reason_of_the_end() -> None:
    message = 'failed to create containerd task: unable to start container process: exec: "python3": not found in $PATH'
    ended = end_with(128, "StartError")
    ended["terminated"]["message"] = message
    reason = find_state(make_pod("Failed", state=ended), is_spot=False)[1]
    assert reason == f"StartError: image `python` ({message})"


def test_message_of_the_kubelet_says_what_a_pod_waits_for() -> None:
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "registry"\nnot found'}
    obstacle = find_obstacle(make_pod("Pending", state={"waiting": waiting}))
    assert obstacle and obstacle[0] == 'CreateContainerConfigError: image `python` (secret "registry" not found)'
    waiting["message"] = "x" * 1000
    obstacle = find_obstacle(make_pod("Pending", state={"waiting": waiting}))
    assert obstacle and len(obstacle[0]) < 300
