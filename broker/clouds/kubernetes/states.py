"""Map a pod's status to the state of a node, and the API server's refusals to error classes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from broker.clouds.kubernetes.manifest import FINALIZER
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
from broker.sites.kubernetes import CONTAINER_NAME
from broker.types import NodeEnd, NodeState


class ObjectExistsError(UnknownOutcomeError):
    """The object to be created exists: an earlier request created it."""


class ObjectMissingError(InvalidRequestError):
    """The object, or its namespace, does not exist."""


# Exit codes of the machine (`EXIT_CODES` in local_machine.py).
EXIT_REASONS = {71: NodeEnd.LEASE, 72: NodeEnd.DONE, 73: "autostop", 74: "stopped", 75: NodeEnd.TERMINATED}
# Reasons of the condition DisruptionTarget: the pod was ended in favour of others, or because of its node.
DISRUPTIONS: Mapping[str, str] = {
    "PreemptionByScheduler": NodeEnd.PREEMPTED,
    "PreemptionByKubeScheduler": NodeEnd.PREEMPTED,  # its name in Kubernetes 1.25
    "DeletionByTaintManager": NodeEnd.PREEMPTED,
    "EvictionByEvictionAPI": NodeEnd.PREEMPTED,  # a drain, a cluster autoscaler, Karpenter
    "TerminationByKubelet": NodeEnd.PREEMPTED,  # a node that shuts down, or runs short of memory or disk
    "WorkloadEvictedDueToPreempted": NodeEnd.PREEMPTED,
    "DeletionByPodGC": "node lost",
}
# Reasons in `status.reason`.
REASONS: Mapping[str, str] = {
    "Preempting": NodeEnd.PREEMPTED,
    "Terminated": NodeEnd.PREEMPTED,  # graceful shutdown of its node
    "NodeShutdown": NodeEnd.PREEMPTED,
    "Shutdown": NodeEnd.PREEMPTED,
    "NodeLost": "node lost",
    "DeadlineExceeded": "time limit",
    "Evicted": "evicted: the node ran short of a resource",
}
# Waiting containers that will never start, and how long they may try: a registry may fail for a while.
STUCK_S: Mapping[str, float] = {
    "InvalidImageName": 0.0,
    "ErrImageNeverPull": 0.0,
    "CreateContainerConfigError": 120.0,
    "ImagePullBackOff": 120.0,
    "ErrImagePull": 300.0,
    "CreateContainerError": 120.0,
}
MESSAGE_MAX = 200
# Ends of a container whose program never started, as its image has no python3: of containerd, of older runtimes.
UNSTARTED = ("StartError", "ContainerCannotRun")
UNSCHEDULABLE_S = 300.0  # Kubernetes evicts pods of a silent node after as long: their room is free again
# `reason` of the API server's Status objects (k8s.io/apimachinery/pkg/apis/meta/v1, StatusReason) -> class.
ERRORS: Mapping[str, type[CloudError]] = {
    "Unauthorized": AuthError,
    "Forbidden": DeniedError,
    "NotFound": ObjectMissingError,
    "AlreadyExists": ObjectExistsError,
    "Conflict": TransientError,
    "Gone": TransientError,
    "Invalid": InvalidRequestError,
    "ServerTimeout": TransientError,  # the server could not begin the request
    "StoreReadError": TransientError,
    "Timeout": UnknownOutcomeError,
    "TooManyRequests": ThrottledError,
    "BadRequest": InvalidRequestError,
    "MethodNotAllowed": InvalidRequestError,
    "NotAcceptable": InvalidRequestError,
    "RequestEntityTooLarge": InvalidRequestError,
    "UnsupportedMediaType": InvalidRequestError,
    "InternalError": UnknownOutcomeError,
    "Expired": TransientError,
    "ServiceUnavailable": TransientError,
}
POLICY_DENIAL = "denied the request"  # by an admission webhook (Kyverno, Gatekeeper), often without a reason
ROLE_HINT = "`broker check --policy kubernetes` prints the Role that suffices, for the cluster's administrator"
# Text of a refusal -> class and hint, in the order in which they are looked for.
DENIALS: Sequence[tuple[str, type[CloudError], str]] = (
    ("exceeded quota", QuotaError, "`kubectl --context={context} describe quota` shows the namespace's limits"),
    ("status unknown for quota", TransientError, "the server has not counted the namespace's quota yet"),
    ("failed quota", DeniedError, "`kubectl --context={context} describe quota` shows what each pod must state"),
    # A LimitRange refuses sizes: another share of a node may be within it.
    (" usage per ", InvalidRequestError, "`kubectl --context={context} describe limits` shows the sizes it admits"),
    (" limit to request ratio per ", InvalidRequestError, "`kubectl --context={context} describe limits` shows them"),
    ("violates PodSecurity", DeniedError, "set the required `securityContext` in `pod_config` (docs/KUBERNETES.md)"),
    (POLICY_DENIAL, DeniedError, "a policy of the cluster refuses the pod; `pod_config` can add what it requires"),
    ("because it is being terminated", DeniedError, "name another `namespace` in `kubernetes.yaml`"),
    ("service account", DeniedError, "name an existing `service_account` in `kubernetes.yaml`"),
    ("PriorityClass", DeniedError, "name an existing `priority_class` in `kubernetes.yaml`"),
)
_STATUS = re.compile(r"(?:Error from server|error: [^()]*server) \((\w+)\)")
# kubectl's own messages for requests that never reached a server. They have no codes.
UNSENT = ("connection refused", "was refused", "no such host", "no route to host", "network is unreachable")
UNTRUSTED = ("certificate", "x509:")
LOGGED_OUT = ("must be logged in", "provide credentials", "getting credentials", "Unauthorized")
UNKNOWN_CONTEXT = ("does not exist", "no context exists", "no configuration has been provided", "stat ")
LOGIN_HINT = "log in to the cluster again, and try `kubectl get pods`"


def find_error(stderr: str, context: str) -> CloudError:
    """Return the error for kubectl's output. Without a code of the API server the outcome may be unknown."""
    line = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "no answer")
    message = f"context `{context}`: {re.sub(r'^(error|Error from server)( [(][A-Za-z]+[)])?: ', '', line)[:400]}"
    found = _STATUS.search(stderr)
    kind = ERRORS.get(found[1]) if found else _guess_kind(stderr)
    if kind is DeniedError or (found is None and POLICY_DENIAL in stderr):
        return _explain_denial(message, stderr, context)
    return (kind or UnknownOutcomeError)(message, hints=(LOGIN_HINT,) if kind is AuthError else ())


def _explain_denial(message: str, stderr: str, context: str) -> CloudError:
    """Return the error for a refused request.

    The server has one reason for missing permissions, limits and policies, and none for the policy of a webhook.
    """
    for text, kind, hint in DENIALS:
        if text in stderr:
            return kind(message, hints=(hint.format(context=context),))
    return DeniedError(message, scope="region", hints=(ROLE_HINT,))


def _guess_kind(stderr: str) -> type[CloudError] | None:
    for kind, texts in (
        (AuthError, LOGGED_OUT),
        (AuthError, UNTRUSTED),
        (TransientError, UNSENT),
        (AuthError, UNKNOWN_CONTEXT),
    ):
        if any(each in stderr for each in texts):
            return kind
    return None


def find_state(pod: Mapping[str, Any], *, is_spot: bool) -> tuple[NodeState, str, float | None]:
    """Return the node's state, why it ended, and when.

    Only our container's end makes a node TERMINATED, or the word of an administrator that its silent host is off.

    A cluster may add containers of its own to a pod, such as the proxy of a service mesh, which run on.
    """
    metadata, status = pod["metadata"], pod.get("status", {})
    own = _find_container(pod).get("state", {})
    ended = own.get("terminated")
    is_unplaced = bool(metadata.get("deletionTimestamp")) and not pod["spec"].get("nodeName")
    if status.get("phase") in ("Succeeded", "Failed") or is_unplaced or ended or _is_given_up(pod):
        ended_s = read_time((ended or {}).get("finishedAt") or metadata.get("deletionTimestamp"))
        return NodeState.TERMINATED, find_reason(pod, ended, is_spot=is_spot), ended_s
    return (NodeState.RUNNING if "running" in own and status.get("podIP") else NodeState.PENDING), "", None


def is_outlived(pod: Mapping[str, Any]) -> bool:
    """Return whether our container has ended, but others keep the pod, with its cards, until it is deleted."""
    is_ended = "terminated" in _find_container(pod).get("state", {})
    return is_ended and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def _is_given_up(pod: Mapping[str, Any]) -> bool:
    """Return whether the pod was deleted by force (`kubectl delete --force`) on a host that is silent.

    The finalizer keeps its object, and no kubelet will ever report the end of its containers. The node's controller has
    set its condition Ready to False; on a living host the kubelet ends the containers and reports it.
    """
    is_forced = pod["metadata"].get("deletionGracePeriodSeconds") == 0
    return is_forced and bool(_list_conditions(pod, "Ready", value="False"))


def find_reason(pod: Mapping[str, Any], ended: Mapping[str, Any] | None, *, is_spot: bool) -> str:
    """Return why a pod ended.

    The reason is a disruption by the cluster, the exit code of the machine (in `ended`, the end of our container), or
    the request to delete the pod.
    """
    status = pod.get("status", {})
    disruption = next((each for each in _list_conditions(pod, "DisruptionTarget")), {})
    code = ended.get("exitCode") if ended else None
    if code in EXIT_REASONS:
        return EXIT_REASONS[code]
    reason = REASONS.get(status.get("reason", "")) or DISRUPTIONS.get(disruption.get("reason", ""), "")
    if not reason and not ended and _is_given_up(pod):
        reason = "node lost"
    if reason == "node lost" and is_spot:
        return NodeEnd.PREEMPTED
    if reason:
        return reason
    if ended and ended.get("reason") == "OOMKilled":
        return NodeEnd.OUT_OF_MEMORY
    if ended and ended.get("reason") in UNSTARTED:
        return f"{ended['reason']}: image `{_find_image(pod, CONTAINER_NAME)}`{_quote(ended)}"
    if stuck := find_obstacle(pod):
        return stuck[0]
    if pod["metadata"].get("deletionTimestamp"):
        return NodeEnd.TERMINATED
    return str(status.get("reason") or "crashed")


def find_obstacle(pod: Mapping[str, Any]) -> tuple[str, float, float | None] | None:
    """Return why a pod does not start, how long that may last, and since when; None if nothing is known."""
    for each in _list_containers(pod):
        waiting = each.get("state", {}).get("waiting", {})
        if (reason := waiting.get("reason", "")) in STUCK_S:
            why = f"{reason}: image `{_find_image(pod, each['name'])}`{_quote(waiting)}"
            return why, STUCK_S[reason], read_time(pod["status"].get("startTime"))
    for condition in _list_conditions(pod, "PodScheduled", value="False"):
        if condition.get("reason") == "Unschedulable":
            why = f"no room: {condition.get('message', 'Unschedulable')}"
            return why, UNSCHEDULABLE_S, read_time(condition.get("lastTransitionTime"))
    return None


def _find_image(pod: Mapping[str, Any], container: str) -> str:
    return str(next(each for each in pod["spec"]["containers"] if each["name"] == container)["image"])


def _quote(state: Mapping[str, Any]) -> str:
    """Return the kubelet's message, such as the secret that is missing; its last part says most."""
    message = " ".join(str(state.get("message", "")).split())
    return f" ({message if len(message) <= MESSAGE_MAX else '...' + message[-MESSAGE_MAX:]})" if message else ""


def is_kept(pod: Mapping[str, Any]) -> bool:
    """Return whether our finalizer keeps the pod's object."""
    return FINALIZER in pod["metadata"].get("finalizers", ())


def read_time(text: str | None) -> float | None:
    """Parse a time of the API server, to seconds since the epoch; None if it is missing."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None


def _list_containers(pod: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return pod.get("status", {}).get("containerStatuses") or ()


def _find_container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the status of our container; empty while the kubelet has not reported any."""
    return next((each for each in _list_containers(pod) if each.get("name") == CONTAINER_NAME), {})


def _list_conditions(pod: Mapping[str, Any], kind: str, *, value: str = "True") -> Sequence[Mapping[str, Any]]:
    conditions = pod.get("status", {}).get("conditions") or ()
    return [each for each in conditions if each.get("type") == kind and each.get("status") == value]
