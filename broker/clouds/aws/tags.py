"""Tags on all our EC2 resources, written and read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from broker.types import NodeRequest

OWNER = "broker-owner"
CLUSTER = "broker-cluster"
ATTEMPT = "broker-attempt"
TOKEN = "broker-token"
RANK = "broker-rank"
USD_HOUR = "broker-usd-hour"
FLEET = "aws:ec2:fleet-id"  # written by EC2 on instances of a fleet
TAGGED_AT_LAUNCH = ("instance", "volume", "network-interface")


def make_tags(request: NodeRequest) -> dict[str, str]:
    """Make the tags of a gang's instances, disks and network cards; ours override labels of the same name."""
    placement = request.placement
    return {
        "Name": f"{request.cluster}-{request.attempt}",
        **make_cluster_tags(request),
        ATTEMPT: str(request.attempt),
        TOKEN: request.token,
        USD_HOUR: f"{placement.usd_hour / placement.node_count:.6g}",
    }


def make_cluster_tags(request: NodeRequest) -> dict[str, str]:
    """Make the tags of resources that the nodes of a cluster share.

    They include the user's labels, because some accounts require tags.
    """
    return {**request.spec.labels, OWNER: request.owner, CLUSTER: request.cluster}


def write_tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Convert tags to EC2's list of keys and values, sorted so that requests are reproducible."""
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


def specify_tags(tags: Mapping[str, str], *kinds: str) -> list[dict[str, Any]]:
    """Return `TagSpecifications` with the same tags for each kind of resource."""
    return [{"ResourceType": kind, "Tags": write_tags(tags)} for kind in kinds]


def read_tags(resource: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a resource; empty if EC2 returned none."""
    return {tag["Key"]: tag.get("Value", "") for tag in resource.get("Tags", ())}


def match_tags(**tags: str | Iterable[str]) -> list[dict[str, Any]]:
    """Make the filters of a Describe call: `match_tags(owner=..., token=...)`."""
    names = {"owner": OWNER, "cluster": CLUSTER, "token": TOKEN}
    values = {key: [value] if isinstance(value, str) else list(value) for key, value in tags.items()}
    return [{"Name": f"tag:{names[key]}", "Values": value} for key, value in values.items()]
