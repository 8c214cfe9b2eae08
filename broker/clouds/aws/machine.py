"""Parameters of a node for RunInstances and launch templates: a pure function of the request and its surroundings.

The result is identical for every call with one token: EC2 refuses a token that returns with other parameters.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import Any

from broker.clouds.aws import tags
from broker.clouds.aws.images import Image
from broker.errors import InvalidRequestError
from broker.frozen import frozen
from broker.types import NodeRequest

USER_DATA_BYTES_MAX = 16384  # EC2 user guide, before base64
IOPS_PER_GIB_MAX = 500  # EBS user guide, gp3 and io2
DISKS: Mapping[str, Mapping[str, Any]] = {  # EBS user guide: gp3 gets 3000 IOPS and 125 MB/s, io2 none
    "none": {"VolumeType": "gp3"},  # SkyPilot's name for the cloud's default
    "low": {"VolumeType": "gp3"},
    "medium": {"VolumeType": "gp3", "Iops": 3500, "Throughput": 250},
    "high": {"VolumeType": "gp3", "Iops": 7000, "Throughput": 500},
    "best": {"VolumeType": "gp3", "Iops": 16000, "Throughput": 1000},
    "ultra": {"VolumeType": "io2", "Iops": 20000},
}


@frozen
class GangResources:
    """Resources found or created for a gang before its launch."""

    image: Image
    group_ids: tuple[str, ...]
    placement_group: str | None = None
    efa_count: int = 0  # Elastic Fabric Adapters; 0: one ordinary card
    instance_profile: str | None = None
    has_public_address: bool = True


def describe_machine(request: NodeRequest, resources: GangResources, *, subnet: str | None) -> dict[str, Any]:
    """Make the parameters that RunInstances and launch templates share. `subnet` None: a fleet chooses."""
    machine: dict[str, Any] = {
        "ImageId": resources.image.id,
        "InstanceType": request.placement.offer.instance_type,
        "NetworkInterfaces": describe_cards(resources, subnet=subnet),
        "BlockDeviceMappings": [
            {"DeviceName": resources.image.root_device, "Ebs": describe_disk(request, resources.image)}
        ],
        # One more hop would let containers of other users request the machine's identity.
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 1},
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": tags.specify_tags(tags.make_tags(request), *tags.TAGGED_AT_LAUNCH),
    }
    if resources.placement_group:
        machine["Placement"] = {"GroupName": resources.placement_group}
    if resources.instance_profile:
        machine["IamInstanceProfile"] = {"Name": resources.instance_profile}
    return machine


def describe_cards(resources: GangResources, *, subnet: str | None) -> list[dict[str, Any]]:
    """Describe the network cards. The first has addresses, the others only carry EFA's own traffic.

    EC2 user guide, "Maximize network bandwidth on instances with multiple network cards"; a machine with several cards
    gets no public address.
    """
    common = {"Groups": list(resources.group_ids), "DeleteOnTermination": True} | (
        {"SubnetId": subnet} if subnet else {}
    )
    first: dict[str, Any] = {"DeviceIndex": 0, **common}
    if resources.efa_count > 1:
        assert not resources.has_public_address, "a machine with a public address has only one card"
        others = range(1, resources.efa_count)
        return [
            first | {"NetworkCardIndex": 0, "InterfaceType": "efa"},
            *({"NetworkCardIndex": n, "DeviceIndex": 1, "InterfaceType": "efa-only", **common} for n in others),
        ]
    first["AssociatePublicIpAddress"] = resources.has_public_address
    return [first | ({"InterfaceType": "efa"} if resources.efa_count else {})]


def describe_disk(request: NodeRequest, image: Image) -> dict[str, Any]:
    """Return EC2's parameters of the root disk, at least as large as the image. Raises InvalidRequestError."""
    tier = request.spec.disk_tier or "medium"
    if tier not in DISKS:
        raise InvalidRequestError(
            f"unknown disk tier `{tier}` on AWS", hints=(f"known tiers: {', '.join(f'`{each}`' for each in DISKS)}",)
        )
    size_gib = max(request.spec.disk_size_gib, image.size_gib)
    disk = {"VolumeSize": size_gib, "Encrypted": True, "DeleteOnTermination": True, **DISKS[tier]}
    if "Iops" in disk:
        disk["Iops"] = min(disk["Iops"], IOPS_PER_GIB_MAX * size_gib)
    return disk


def pack_boot(request: NodeRequest) -> bytes:
    """Encode the first-boot script as user data, compressed if it is long; cloud-init decompresses it.

    Raises InvalidRequestError if it is still too long.
    """
    data = request.boot.encode()
    if len(data) > USER_DATA_BYTES_MAX:
        data = gzip.compress(data, mtime=0)  # no time in it: the same script gives the same bytes
    if len(data) > USER_DATA_BYTES_MAX:
        raise InvalidRequestError(
            f"the first-boot script has {len(data)} bytes compressed; EC2 allows {USER_DATA_BYTES_MAX}"
        )
    return data
