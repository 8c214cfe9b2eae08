"""The pods of a gang, and how they are read back. Pure; the API server is the only record of them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from broker.errors import InvalidRequestError
from broker.sites.kubernetes import CONTAINER_NAME, NODE_ROOT, KubernetesContext, Pool
from broker.task.pod_config import CONTAINER as CONTAINER_PARTS
from broker.task.pod_config import METADATA, POD, find_unsupported
from broker.types import NodeRequest
from broker.types.task import CONTAINER

OWNER_LABEL, CLUSTER_LABEL, ATTEMPT_LABEL, GANG_LABEL = (
    "broker-owner", "broker-cluster", "broker-attempt", "broker-gang",
)  # fmt: skip
REQUEST_ANNOTATION = "broker/request"
# Keeps an ended pod readable until it is swept: why and when it ended, and that it has really ended.
FINALIZER = "broker/record"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
GROUP_COUNT = "kueue.x-k8s.io/pod-group-total-count"
KEYS = frozenset({"owner", "cluster", "attempt", "token", "count", "rank", "zone", "is_spot", "usd_hour", "created_s"})
NOTICE_S = 30  # Kubernetes' default grace period; spot nodes of GKE give 15 s of it to pods
UNCLAIMED_S = 1800.0  # as for nodes of other clouds: longer than any boot
SHM_SHARE = 0.5  # share of the memory, as on a machine; data loaders need more than the 64 MiB of a container runtime
BOOT = "import base64, sys, zlib; exec(zlib.decompress(base64.b64decode(sys.argv[1])).decode())"
GIB = 1 << 30
SHM = "broker-shm"  # volume at /dev/shm; a task's own volume is often called `shm`, and may be mounted elsewhere
VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


def name_gang(request: NodeRequest) -> str:
    """Return the common part of the names of a gang's pods.

    It is equal for one owner, token and attempt, so that a repeated create collides with the first one.
    """
    digest = hashlib.sha256(f"{request.owner}\0{request.token}".encode()).hexdigest()[:12]
    cluster = re.sub(r"[^a-z0-9]+", "-", request.cluster.lower()).strip("-")[:30].strip("-")
    return f"broker-{cluster or 'c'}-{request.attempt}-{digest}"


def make_pod(
    context: KubernetesContext, pool: Pool, request: NodeRequest, rank: int, *, sources: tuple[str, str], now_s: float
) -> Mapping[str, Any]:
    """Return the pod of one rank. `sources`: of node_program.py and of local_machine.py.

    Neither environment nor secrets of the task are in it: they reach the node through `kubectl exec`.
    """
    gang = name_gang(request)
    name = f"{gang}-{rank}"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": context.namespace,
            "labels": {**make_labels(request), **_label_queue(context, gang, request)},
            "annotations": {
                REQUEST_ANNOTATION: json.dumps(make_record(request, rank, now_s=now_s)),
                **({GROUP_COUNT: str(request.placement.node_count)} if _is_group(context, request) else {}),
            },
            "finalizers": [FINALIZER],
        },
        "spec": _make_spec(context, pool, request, _pack(name, sources)),
    }
    return merge_pod(pod, _read_settings(request.spec.pod_config)) if request.spec.pod_config else pod


def _read_settings(text: str) -> Mapping[str, Any]:
    """Read `pod_config`.

    Raises InvalidRequestError for parts that a file would have been refused for: a task made in Python, or by another
    client of a server, has no notices.
    """
    try:
        settings = json.loads(text)
    except ValueError:
        raise InvalidRequestError("`pod_config` is not JSON") from None
    if unsupported := [*find_unsupported(settings)]:
        raise InvalidRequestError(
            f"`pod_config`: `{unsupported[0]}` is not supported", hints=("remove it (docs/KUBERNETES.md)",)
        )
    return settings if isinstance(settings, dict) else {}


def merge_pod(pod: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge the supported parts of a task's `pod_config` into its pod.

    Mappings gain keys, but keep broker's values; lists gain entries, except a second mount at one path; a name or
    policy replaces that of the context.
    """
    spec, own = settings.get("spec") or {}, dict(pod["spec"])
    (container,) = own["containers"]
    containers = spec.get("containers") or [{}]
    merged = _merge(container, containers[0], CONTAINER_PARTS)
    paths: dict[str, Any] = {}
    for mount in merged["volumeMounts"]:
        paths.setdefault(mount.get("mountPath"), mount)
    volumes: dict[str, Any] = {}
    for volume in (*own["volumes"], *(spec.get("volumes") or ())):
        volumes.setdefault(volume.get("name"), volume)
    parts = {**_merge(own, spec, POD), "containers": [{**merged, "volumeMounts": [*paths.values()]}]}
    metadata = _merge(pod["metadata"], settings.get("metadata") or {}, METADATA)
    return {**pod, "metadata": metadata, "spec": {**parts, "volumes": [*volumes.values()]}}


def _merge(own: Mapping[str, Any], given: Mapping[str, Any], parts: Mapping[str, type]) -> dict[str, Any]:
    merged = dict(own)
    for name, kind in parts.items():
        value = given.get(name)
        if not isinstance(value, kind):
            continue
        if isinstance(value, dict):
            merged[name] = {**value, **own.get(name, {})}
        else:
            merged[name] = [*own.get(name, ()), *value] if isinstance(value, list) else value
    return merged


def make_labels(request: NodeRequest) -> Mapping[str, str]:
    """Return the tags, and the task's labels that Kubernetes accepts as they are."""
    gang = name_gang(request)
    tags = {OWNER_LABEL: request.owner, CLUSTER_LABEL: request.cluster, ATTEMPT_LABEL: str(request.attempt)}
    tags = {key: value if VALUE.fullmatch(value) else gang for key, value in tags.items()}
    own = {key: value for key, value in request.spec.labels.items() if VALUE.fullmatch(value)}
    return {**own, **tags, GANG_LABEL: gang}


def make_record(request: NodeRequest, rank: int, *, now_s: float) -> Mapping[str, object]:
    """Return the annotation from which the node is rebuilt."""
    placement = request.placement
    return {
        "owner": request.owner,
        "cluster": request.cluster,
        "attempt": request.attempt,
        "token": request.token,
        "count": placement.node_count,
        "rank": rank,
        "zone": placement.offer.zone,
        "is_spot": placement.is_spot,
        "usd_hour": round(placement.usd_hour / placement.node_count, 6),
        "created_s": round(now_s, 3),
    }


def read_record(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the record of one of our pods; None for any other pod."""
    try:
        found = json.loads(pod["metadata"]["annotations"][REQUEST_ANNOTATION])
    except (KeyError, TypeError, ValueError):
        return None
    return found if isinstance(found, dict) and set(found) >= KEYS else None


def find_pool(pools: Sequence[Pool], request: NodeRequest) -> Pool:
    """Return the pool of the offer. Raises InvalidRequestError if it is no longer known."""
    offer = request.placement.offer
    fitting = [
        each
        for each in pools
        if each.name == offer.zone
        and each.machine.accelerator == offer.accelerator
        and each.machine.vcpus >= offer.vcpus
        and each.machine.memory_gib >= offer.memory_gib
    ]
    if not fitting:
        raise InvalidRequestError(
            f"context `{offer.region}` has no pool `{offer.zone}` with {offer.instance_type}",
            hints=("run `broker check kubernetes` to read the nodes again",),
        )
    return min(fitting, key=lambda each: (each.machine.accelerator_count, each.machine.vcpus))


def _make_spec(context: KubernetesContext, pool: Pool, request: NodeRequest, program: str) -> Mapping[str, Any]:
    image = request.spec.image_id or context.image
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # broker recovers the job
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": NOTICE_S,
        "nodeSelector": {**pool.selector, **(context.node_selector or {})},
        "tolerations": [dict(each) for each in pool.tolerations],
        "containers": [
            {
                "name": CONTAINER_NAME,
                "image": image.removeprefix(CONTAINER),
                "command": ["python3", "-I", "-S", "-c", BOOT, program],
                "resources": make_resources(pool, request),
                "volumeMounts": [{"name": SHM, "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [{"name": SHM, "emptyDir": {"medium": "Memory", "sizeLimit": _size_shm(request)}}],
    }
    if context.service_account:
        spec["serviceAccountName"] = context.service_account
    if context.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in context.image_pull_secrets]
    if context.priority_class:
        spec["priorityClassName"] = context.priority_class
    if context.hours_max:
        spec["activeDeadlineSeconds"] = max(1, int(context.hours_max * 3600))
    return spec


def make_resources(pool: Pool, request: NodeRequest) -> Mapping[str, Mapping[str, str]]:
    """Return requests and limits. They are equal, so that the kubelet evicts these pods last (QoS Guaranteed)."""
    offer = request.placement.offer
    both = {"cpu": f"{int(offer.vcpus * 1000)}m", "memory": f"{int(offer.memory_gib * GIB)}"}
    if offer.accelerator:
        both[pool.resource] = str(int(offer.accelerator_count))
    disk_gib = int(min(request.spec.disk_size_gib, pool.disk_gib * min(1.0, offer.vcpus / pool.machine.vcpus)))
    disk = {"ephemeral-storage": f"{disk_gib}Gi"} if disk_gib else {}  # its node's disk is all there is
    return {"requests": {**both, **disk}, "limits": both}


def _size_shm(request: NodeRequest) -> str:
    return f"{int(request.placement.offer.memory_gib * SHM_SHARE * GIB)}"


def _is_group(context: KubernetesContext, request: NodeRequest) -> bool:
    return bool(context.queue) and request.placement.node_count > 1


def _label_queue(context: KubernetesContext, gang: str, request: NodeRequest) -> Mapping[str, str]:
    """Return Kueue's labels: a gang of several pods is admitted as one group."""
    queue = {QUEUE_LABEL: context.queue} if context.queue else {}
    return {**queue, GROUP_LABEL: gang} if _is_group(context, request) else queue


def _pack(name: str, sources: tuple[str, str]) -> str:
    program, machine = sources
    settings = {"name": name, "notice_s": NOTICE_S, "unclaimed_s": UNCLAIMED_S}
    text = (
        f"{program}\nSETTINGS = json.loads({json.dumps(settings)!r})\n"
        f"SETTINGS['root'] = {NODE_ROOT!r}.format(user=os.getuid())\nmain(SETTINGS, {machine!r})\n"
    )
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
