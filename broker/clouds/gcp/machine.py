"""Bodies of Google's insert calls for a request. Pure: dictionaries with the fields of `Instance`."""

from __future__ import annotations

from typing import Any

from broker.clouds.gcp.names import (
    describe,
    gang_name,
    group_tag,
    instance_names,
    make_labels,
    owner_prefix,
    peers_tag,
)
from broker.clouds.gcp.settings import Settings
from broker.errors import InvalidRequestError
from broker.types import NodeRequest, Offer

# Google deletes a node of a managed job after this time, even if broker is gone: the last of the dead man's switches.
# GPU machines limited to 7 days may also draw on the preemptible quota, which is often the larger one:
# https://cloud.google.com/compute/docs/instances/limit-vm-runtime
# Nodes that broker does not replace have no limit: Google would delete a user's cluster, or a server, with its disk.
MAX_RUN_S, MAX_RUN_CPU_S = 7 * 86400, 30 * 86400
# Accelerators that are attached to a machine of the n1 family; in all other families they are built in.
# https://cloud.google.com/compute/docs/gpus
ATTACHED = {"T4": "nvidia-tesla-t4", "V100": "nvidia-tesla-v100", "P100": "nvidia-tesla-p100", "P4": "nvidia-tesla-p4"}
TPU_MACHINES = ("tpu-", "ct")  # such as ct5lp-hightpu-8t
# SkyPilot's names for `disk_tier`, `sky/clouds/gcp.py`.
DISK_TYPES: dict[str | None, str] = {
    None: "pd-balanced",
    "none": "pd-balanced",
    "low": "pd-standard",
    "medium": "pd-balanced",
    "high": "pd-ssd",
    "best": "pd-ssd",
    "ultra": "pd-extreme",
}
# Families without Persistent Disk: https://cloud.google.com/compute/docs/disks/hyperdisks (read 2026-11-22)
HYPERDISK_MACHINES = ("c4-", "c4a-", "c4d-", "n4-", "n4a-", "n4d-", "a3-ultragpu-", "a4-", "a4x-", "g4-")
# On these, a tier is IOPS and MiB/s of the one kind of disk; on others, Google's own figures, which grow with the size.
# 3000 and 140 are free of charge; limits: https://cloud.google.com/compute/docs/disks/hd-types/hyperdisk-balanced
HYPERDISK_FIGURES = {"low": (3000, 140), "high": (7000, 500), "best": (16000, 1000), "ultra": (32000, 2000)}
HYPERDISK_IOPS_PER_GIB, HYPERDISK_IOPS_PER_MIB = 500, 4
# Machines whose other network cards carry RDMA, each in its own network. They start with the host's card alone, which
# must be gVNIC (https://github.com/dstackai/dstack/pull/3100, which starts A4 so; read 2026-11-22).
RDMA_MACHINES = ("a3-ultragpu-", "a4-", "a4x-")
# https://cloud.google.com/compute/docs/networking/configure-vm-with-high-bandwidth-configuration
TIER_1_MACHINES, TIER_1_VCPUS_MIN = ("n2-", "n2d-", "c2-", "c2d-", "c3-", "c3d-"), 30
STARTED = "/var/lib/broker-started"
ALL_SCOPES = "https://www.googleapis.com/auth/cloud-platform"  # limited by the account's roles only
STORAGE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"  # buckets, and nothing else in the account


def check_request(request: NodeRequest) -> None:
    """Raise InvalidRequestError for requests that this adapter does not support."""
    offer = request.placement.offer
    if offer.instance_type.startswith(TPU_MACHINES):
        raise InvalidRequestError(
            f"`{offer.instance_type}` is a TPU machine, which this adapter does not support",
            hints=(
                "SkyPilot creates TPUs: `pip install 'intercloud-broker[sky]'`, `sky check gcp`, then `broker check`",
                "or choose a GPU with `--gpus`",
            ),
        )
    attached = read_attached(offer.instance_type)
    if attached is not None and attached[0] not in ATTACHED:
        raise InvalidRequestError(f"Google cannot attach accelerator `{attached[0]}` to a machine")
    if request.spec.disk_tier not in DISK_TYPES:
        raise InvalidRequestError(f"unknown disk tier `{request.spec.disk_tier}` at Google")


def machine_type(offer: Offer) -> str:
    """Return Google's machine type of an offer, without the accelerators after `+`."""
    return offer.instance_type.partition("+")[0]


def read_attached(instance_type: str) -> tuple[str, int] | None:
    """Read attached accelerators from the price book's spelling: "n1-highmem-4+1xT4" has one T4."""
    _, _, extra = instance_type.partition("+")
    count, _, name = extra.partition("x")
    return (name, int(count)) if count.isdigit() else None


def make_instance(
    request: NodeRequest, zone: str, image: str, settings: Settings, *, identity: str = ""
) -> dict[str, Any]:
    """Make the body of `insert`: a single node. Types are named with their zone."""
    body = _make_properties(request, image, settings, identity)
    body["name"] = instance_names(request)[0]
    body["machine_type"] = f"zones/{zone}/machineTypes/{body['machine_type']}"
    for accelerator in body.get("guest_accelerators", ()):
        accelerator["accelerator_type"] = f"zones/{zone}/acceleratorTypes/{accelerator['accelerator_type']}"
    disk = body["disks"][0]["initialize_params"]
    disk["disk_type"] = f"zones/{zone}/diskTypes/{disk['disk_type']}"
    return body


def make_gang(request: NodeRequest, image: str, settings: Settings, *, identity: str = "") -> dict[str, Any]:
    """Make the body of `bulkInsert`: the whole gang or nothing. Types are named without a zone."""
    count = request.placement.node_count
    return {
        "count": count,
        "min_count": count,
        "per_instance_properties": {name: {} for name in instance_names(request)},
        "instance_properties": _make_properties(request, image, settings, identity),
    }


def _list_tags(request: NodeRequest) -> list[str]:
    """List the network tags that the rules of `firewall.py` name."""
    tags = [owner_prefix(request.owner).strip("-"), gang_name(request), peers_tag(request)]
    return [*tags, group_tag(request)] if request.spec.group else tags


def _make_properties(request: NodeRequest, image: str, settings: Settings, identity: str) -> dict[str, Any]:
    offer, spec = request.placement.offer, request.spec
    attached = read_attached(offer.instance_type)
    labels = make_labels(request)
    disk = {
        "source_image": image,
        **_describe_disk(request),
        "labels": labels,
    }
    body: dict[str, Any] = {
        "description": describe(request),
        "machine_type": machine_type(offer),
        "labels": labels,
        "tags": {"items": _list_tags(request)},
        "disks": [{"boot": True, "auto_delete": True, "initialize_params": disk}],
        "network_interfaces": [_make_interface(settings)],
        "scheduling": make_scheduling(request),
        "metadata": {"items": [{"key": key, "value": value} for key, value in _make_metadata(request).items()]},
    }
    if identity:
        body["service_accounts"] = [{"email": identity, "scopes": [ALL_SCOPES]}]
    elif settings.service_account:
        body["service_accounts"] = [{"email": settings.service_account, "scopes": [STORAGE_SCOPE]}]
    if attached:
        name, count = attached
        body["guest_accelerators"] = [{"accelerator_type": ATTACHED[name], "accelerator_count": count}]
    if offer.instance_type.startswith(RDMA_MACHINES):
        body["network_interfaces"][0]["nic_type"] = "GVNIC"
    has_tier_1 = offer.instance_type.startswith(TIER_1_MACHINES) and offer.vcpus >= TIER_1_VCPUS_MIN
    if spec.network_tier == "best" and has_tier_1:
        body["network_interfaces"][0]["nic_type"] = "GVNIC"
        body["network_performance_config"] = {"total_egress_bandwidth_tier": "TIER_1"}
    return body


def make_scheduling(request: NodeRequest) -> dict[str, Any]:
    """Make the scheduling options.

    A job's node does not restart automatically: the job recovers elsewhere. The machine of a cluster or of a broker
    server does, after a failure of its host, because only its user would start it again.
    """
    is_spot, has_gpu = request.placement.is_spot, bool(request.placement.offer.accelerator)
    scheduling: dict[str, Any] = {
        "provisioning_model": "SPOT" if is_spot else "STANDARD",
        "automatic_restart": not is_spot and not request.spec.is_replaceable,
        # A machine with GPUs cannot migrate while it runs, and a spot machine may not.
        "on_host_maintenance": "TERMINATE" if is_spot or has_gpu else "MIGRATE",
    }
    if request.spec.is_replaceable:
        scheduling["max_run_duration"] = {"seconds": MAX_RUN_S if is_spot or has_gpu else MAX_RUN_CPU_S}
    if is_spot or request.spec.is_replaceable:
        scheduling["instance_termination_action"] = "DELETE"
    return scheduling


def _describe_disk(request: NodeRequest) -> dict[str, Any]:
    tier, size_gib = request.spec.disk_tier, request.spec.disk_size_gib
    if not request.placement.offer.instance_type.startswith(HYPERDISK_MACHINES):
        return {"disk_type": DISK_TYPES[tier], "disk_size_gb": size_gib}
    disk: dict[str, Any] = {"disk_type": "hyperdisk-balanced", "disk_size_gb": size_gib}
    if tier in HYPERDISK_FIGURES:
        iops = min(HYPERDISK_FIGURES[tier][0], HYPERDISK_IOPS_PER_GIB * size_gib)
        disk["provisioned_iops"] = iops
        disk["provisioned_throughput"] = min(HYPERDISK_FIGURES[tier][1], iops // HYPERDISK_IOPS_PER_MIB)
    return disk


def network_path(network: str) -> str:
    """Return the path of a network, which settings may name in short."""
    return network if "/" in network else f"global/networks/{network}"


def _make_interface(settings: Settings) -> dict[str, Any]:
    key = "subnetwork" if "/subnetworks/" in settings.network else "network"
    interface: dict[str, Any] = {key: network_path(settings.network)}
    if not settings.uses_private_addresses:
        interface["access_configs"] = [{"name": "External NAT", "type_": "ONE_TO_ONE_NAT"}]
    return interface


def _make_metadata(request: NodeRequest) -> dict[str, str]:
    """Make the metadata. Only the boot script's key can log in."""
    settings = {"enable-oslogin": "FALSE", "block-project-ssh-keys": "TRUE", "serial-port-enable": "FALSE"}
    if request.placement.offer.accelerator:
        settings["install-nvidia-driver"] = "True"  # for Google's GPU images that do not include it
    return settings | ({"startup-script": run_once(request.boot)} if request.boot else {})


def run_once(script: str) -> str:
    """Limit the boot script to the first start: Google runs a startup script at every start."""
    first, _, rest = script.partition("\n")
    guard = f"[ -e {STARTED} ] && exit 0\ntrap 'touch {STARTED}' EXIT\n"
    return f"{first}\n{guard}{rest}" if first.startswith("#!") else f"#!/bin/sh\n{guard}{script}"
