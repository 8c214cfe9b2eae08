"""Fixed rules of the fake Compute Engine: machines, quotas, permissions, and the required form of requests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_KEY, LABEL_VALUE = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")
METADATA_BYTES_MAX = 256 * 1024
HYPERDISK_ONLY = ("c4-", "n4-", "a4-", "a3-ultragpu-")

REGIONS = ("us-central1", "us-east4", "europe-west4")
ZONES = tuple(f"{region}-{letter}" for region in REGIONS for letter in "abc")
IMAGE_FAMILIES = {
    ("ubuntu-os-cloud", "ubuntu-2204-lts"),
    ("ubuntu-os-cloud", "ubuntu-2404-lts-amd64"),
    ("ubuntu-os-cloud", "ubuntu-2204-lts-arm64"),
    ("deeplearning-platform-release", "common-cu124-ubuntu-2204-nvidia-550"),
    ("deeplearning-platform-release", "common-cu128-ubuntu-2204-nvidia-570"),
    ("deeplearning-platform-release", "common-cu129-ubuntu-2204-nvidia-580"),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine type. `metric`: the quota its accelerators count against; those of n1 are attached one by one."""

    vcpus: int
    cpu_metric: str = "CPUS"
    gpu_metric: str = ""
    gpu_count: int = 0


MACHINES = {
    "e2-micro": Machine(vcpus=2),
    "e2-standard-4": Machine(vcpus=4),
    "n2-standard-32": Machine(vcpus=32, cpu_metric="N2_CPUS"),
    "c4-standard-4": Machine(vcpus=4),
    "t2a-standard-4": Machine(vcpus=4, cpu_metric="T2A_CPUS"),
    "n1-standard-4": Machine(vcpus=4),
    "n1-highmem-4": Machine(vcpus=4),
    "g2-standard-4": Machine(vcpus=4, cpu_metric="", gpu_metric="NVIDIA_L4_GPUS", gpu_count=1),
    "a2-highgpu-1g": Machine(vcpus=12, cpu_metric="", gpu_metric="NVIDIA_A100_GPUS", gpu_count=1),
    "a2-highgpu-8g": Machine(vcpus=96, cpu_metric="", gpu_metric="NVIDIA_A100_GPUS", gpu_count=8),
    "a3-highgpu-8g": Machine(vcpus=208, cpu_metric=""),
}
# Disks that Google adds to a machine without being asked.
LOCAL_SSDS: dict[str, list[Json]] = {"a3-highgpu-8g": [{"type": "SCRATCH", "interface": "NVME"}] * 16}
ACCELERATORS = {"nvidia-tesla-t4": "NVIDIA_T4_GPUS", "nvidia-tesla-v100": "NVIDIA_V100_GPUS"}
METRICS = (
    *("CPUS", "N2_CPUS", "T2A_CPUS", "PREEMPTIBLE_CPUS"),
    *(f"{kind}{name}" for kind in ("", "PREEMPTIBLE_") for name in (*ACCELERATORS.values(), "NVIDIA_L4_GPUS")),
    *("NVIDIA_A100_GPUS", "PREEMPTIBLE_NVIDIA_A100_GPUS"),
)

INSERT_PERMISSIONS = (
    *("compute.instances.create", "compute.instances.setLabels", "compute.instances.setMetadata"),
    *("compute.instances.setTags", "compute.disks.create", "compute.disks.setLabels"),
    *("compute.subnetworks.use", "compute.subnetworks.useExternalIp"),
)
# Method and path below projects/P -> permissions the caller needs, as the API's reference lists them.
PERMISSIONS: list[tuple[str, str, tuple[str, ...]]] = [
    ("POST", r"zones/[^/]+/instances", INSERT_PERMISSIONS),
    ("POST", r"zones/[^/]+/instances/bulkInsert", INSERT_PERMISSIONS),
    ("GET", r"zones/[^/]+/instances/[^/]+", ("compute.instances.get",)),
    ("DELETE", r"zones/[^/]+/instances/[^/]+", ("compute.instances.delete",)),
    ("POST", r"zones/[^/]+/instances/[^/]+/stop", ("compute.instances.stop",)),
    ("POST", r"zones/[^/]+/instances/[^/]+/start", ("compute.instances.start",)),
    ("POST", r"zones/[^/]+/instances/[^/]+/setLabels", ("compute.instances.setLabels",)),
    ("GET", r"aggregated/instances", ("compute.instances.list",)),
    ("GET", r"aggregated/machineTypes", ("compute.machineTypes.list",)),
    ("GET", r"aggregated/operations", ("compute.globalOperations.list",)),
    ("POST", r"zones/[^/]+/operations/[^/]+/wait", ("compute.zoneOperations.get",)),
    ("POST", r"global/operations/[^/]+/wait", ("compute.globalOperations.get",)),
    ("GET", r"", ("compute.projects.get",)),
    ("GET", r"regions", ("compute.regions.list",)),
    ("GET", r"regions/[^/]+", ("compute.regions.get",)),
    ("GET", r"regions/[^/]+/subnetworks/[^/]+", ("compute.subnetworks.get",)),
    ("GET", r"global/images/family/[^/]+", ("compute.images.getFromFamily",)),
    ("GET", r"global/networks/[^/]+", ("compute.networks.get",)),
    ("GET", r"global/firewalls", ("compute.firewalls.list",)),
    ("POST", r"global/firewalls", ("compute.firewalls.create", "compute.networks.updatePolicy")),
    ("PATCH", r"global/firewalls/[^/]+", ("compute.firewalls.update", "compute.networks.updatePolicy")),
    ("DELETE", r"global/firewalls/[^/]+", ("compute.firewalls.delete", "compute.networks.updatePolicy")),
]

# Words of a path that name its kind; the rest are names.
KINDS = {
    *("instances", "bulkInsert", "stop", "start", "setLabels", "aggregated", "machineTypes", "operations", "wait"),
    *("regions", "global", "firewalls", "images", "family", "zones", "subnetworks"),
}


class GceError(Exception):
    """An answer other than 200. `reason` as in `error.errors[].reason`."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message

    def body(self) -> Json:
        each = {"message": self.message, "domain": "global", "reason": self.reason}
        return {"error": {"code": self.status, "message": self.message, "errors": [each]}}


def invalid(field: str, value: object) -> GceError:
    return GceError(400, "invalid", f"Invalid value for field '{field}': '{value}'.")


def missing(path: str) -> GceError:
    return GceError(404, "notFound", f"The resource '{path}' was not found")


def find_permissions(method: str, path: str) -> tuple[str, ...]:
    """Find the permissions for a call. Raise GceError 404 for a path that this fake does not serve."""
    for known, pattern, permissions in PERMISSIONS:
        if known == method and re.fullmatch(pattern, path):
            return permissions
    raise missing(f"{method} {path}")


def check_instance(body: Json, *, zone: str, is_bulk: bool) -> None:
    """Raise GceError for an instance that Google would reject."""
    machine = _last(body.get("machineType", ""), f"zones/{zone}/machineTypes/", is_bulk, "machineType")
    if machine not in MACHINES:
        raise invalid("resource.machineType", machine)
    for key, value in body.get("labels", {}).items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            raise invalid("resource.labels", f"{key}={value}")
    for tag in body.get("tags", {}).get("items", []):
        if not NAME.fullmatch(tag):
            raise invalid("resource.tags.items", tag)
    if sum(len(item["key"]) + len(item["value"]) for item in body["metadata"]["items"]) > METADATA_BYTES_MAX:
        raise invalid("resource.metadata", "too large")
    _check_disk(body, machine, zone, is_bulk)
    _check_network(body)
    accelerators = body.get("guestAccelerators", [])
    for accelerator in accelerators:
        kind = _last(accelerator["acceleratorType"], f"zones/{zone}/acceleratorTypes/", is_bulk, "acceleratorType")
        if kind not in ACCELERATORS or not machine.startswith("n1-"):
            raise invalid("resource.guestAccelerators", kind)
    _check_scheduling(body.get("scheduling", {}), has_gpu=bool(accelerators or machine.startswith(("a2", "a3", "g2"))))


def _last(path: str, prefix: str, is_bulk: bool, field: str) -> str:
    """Return the last part: instances name their types by place, bulk requests by name alone."""
    if is_bulk == ("/" in path) or (not is_bulk and not path.endswith(prefix + path.rpartition("/")[2])):
        raise invalid(f"resource.{field}", path)
    return path.rpartition("/")[2]


def _check_disk(body: Json, machine: str, zone: str, is_bulk: bool) -> None:
    (disk,) = body["disks"]
    parameters = disk["initializeParams"]
    kind = _last(parameters["diskType"], f"zones/{zone}/diskTypes/", is_bulk, "diskType")
    if machine.startswith(HYPERDISK_ONLY) != kind.startswith("hyperdisk-"):
        raise invalid("resource.disks.initializeParams.diskType", kind)
    iops, throughput = int(parameters.get("provisionedIops", 0)), int(parameters.get("provisionedThroughput", 0))
    if (iops or throughput) and not kind.startswith("hyperdisk-"):
        raise invalid("resource.disks.initializeParams.provisionedIops", iops)
    if iops > 500 * int(parameters["diskSizeGb"]) or throughput > iops // 4:
        raise invalid("resource.disks.initializeParams.provisionedThroughput", throughput)
    if not disk.get("boot") or not disk.get("autoDelete") or int(parameters["diskSizeGb"]) < 10:
        raise invalid("resource.disks", disk)
    if not re.fullmatch(r"projects/[^/]+/global/images/(family/)?[^/]+", parameters["sourceImage"]):
        raise invalid("resource.disks.initializeParams.sourceImage", parameters["sourceImage"])


def _check_network(body: Json) -> None:
    (interface,) = body["networkInterfaces"]
    if "subnetwork" not in interface and interface.get("network") != "global/networks/default":
        raise invalid("resource.networkInterfaces.network", interface.get("network"))


def _check_scheduling(scheduling: Json, *, has_gpu: bool) -> None:
    is_spot = scheduling.get("provisioningModel") == "SPOT"
    if is_spot and scheduling.get("automaticRestart", True):
        raise invalid("scheduling.automaticRestart", "a spot machine does not restart")
    if (is_spot or has_gpu) and scheduling.get("onHostMaintenance", "MIGRATE") != "TERMINATE":
        raise invalid("scheduling.onHostMaintenance", scheduling.get("onHostMaintenance"))
    if "instanceTerminationAction" in scheduling and not (is_spot or "maxRunDuration" in scheduling):
        raise invalid("scheduling.instanceTerminationAction", "the machine is neither spot nor limited")
    if "maxRunDuration" in scheduling:
        seconds = int(scheduling["maxRunDuration"]["seconds"])
        if not 30 <= seconds <= 120 * 86400 or "instanceTerminationAction" not in scheduling:
            raise invalid("scheduling.maxRunDuration", seconds)


def matches(item: Json, wanted: str | None) -> bool:
    """Apply Google's filters, as far as they are used here; any other is refused, not ignored."""
    if not wanted:
        return True
    if found := re.fullmatch(r"labels\.([\w-]+) = ([\w-]+)", wanted):
        return bool(item.get("labels", {}).get(found[1]) == found[2])
    if found := re.fullmatch(r"(\w+) = ([\w-]+)", wanted):
        return bool(item.get(found[1]) == found[2])
    if found := re.fullmatch(r"(\w+) eq (\S+)", wanted):
        return re.fullmatch(found[2], str(item.get(found[1], ""))) is not None
    if found := re.fullmatch(r'(\w+) : "([^"]+)"', wanted):
        return found[2] in str(item.get(found[1], ""))
    raise GceError(400, "invalid", f"Invalid value for field 'filter': '{wanted}'. Invalid list filter expression.")


def count_use(instance: Json) -> dict[str, float]:
    """Count a machine's use of its region's quotas."""
    machine = MACHINES[instance["machineType"].rpartition("/")[2]]
    kind = "PREEMPTIBLE_" if instance.get("scheduling", {}).get("provisioningModel") == "SPOT" else ""
    use: dict[str, float] = {}
    if machine.cpu_metric:
        use["PREEMPTIBLE_CPUS" if kind else machine.cpu_metric] = machine.vcpus
    if machine.gpu_metric:
        use[kind + machine.gpu_metric] = machine.gpu_count
    for accelerator in instance.get("guestAccelerators", []):
        metric = ACCELERATORS[accelerator["acceleratorType"].rpartition("/")[2]]
        use[kind + metric] = use.get(kind + metric, 0) + accelerator["acceleratorCount"]
    if not kind and (gpus := sum(amount for metric, amount in use.items() if metric.startswith("NVIDIA"))):
        use["GPUS_ALL_REGIONS"] = gpus
    return use
