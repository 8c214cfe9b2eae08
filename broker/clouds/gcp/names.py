"""Names and labels of our resources at Google.

They are derived from the request alone, so that a retry finds the resources of the first try.

An instance is named b-OWNER-GANG-RANK. Text that labels cannot hold unchanged is in its description, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from broker.frozen import frozen
from broker.types import NodeRequest

NAMESPACE = uuid.UUID("4f6c3f5e-0c5b-5b7e-9a63-5d1c2d0a7f11")  # generated once, for request ids
LABEL_LENGTH_MAX = 63  # https://cloud.google.com/compute/docs/labeling-resources#requirements
STOP_LABEL = "broker-stopped"  # set before we stop a node: a stopped node without it ended itself


@frozen
class NodeId:
    """The address of one instance. Written as PROJECT/ZONE/NAME, which is a node's id."""

    project: str
    zone: str
    name: str

    def __str__(self) -> str:
        return f"{self.project}/{self.zone}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> NodeId:
        """Parse `PROJECT/ZONE/NAME`. Raises ValueError."""
        project, zone, name = text.rsplit("/", 2)
        return cls(project=project, zone=zone, name=name)

    @classmethod
    def from_link(cls, link: str) -> NodeId | None:
        """Parse `.../projects/P/zones/Z/instances/N`; None for anything else."""
        match = re.search(r"projects/([^/]+)/zones/([^/]+)/instances/([^/]+)$", link)
        return cls(project=match[1], zone=match[2], name=match[3]) if match else None

    @property
    def gang(self) -> str:
        """Name of the gang: the instance's name without its rank."""
        return self.name.rpartition("-")[0]

    @property
    def rank(self) -> int:
        """Rank within the gang, from the instance's name."""
        return int(self.name.rpartition("-")[2])


def owner_prefix(owner: str) -> str:
    """Return the prefix of the names of all resources that belong to `owner`."""
    is_plain = re.fullmatch(r"[a-z0-9]{1,16}", owner)
    return f"b-{owner if is_plain else hashlib.sha256(owner.encode()).hexdigest()[:16]}-"


def gang_name(request: NodeRequest) -> str:
    """Return the common prefix of a gang's instances. It follows from the token, so a repeat finds it."""
    return owner_prefix(request.owner) + hashlib.sha256(request.token.encode()).hexdigest()[:16]


def peers_tag(request: NodeRequest) -> str:
    """Return the tag that all nodes of one attempt share, including later replacements of lost ones."""
    text = f"{request.cluster}\0{request.attempt}"
    return owner_prefix(request.owner) + hashlib.sha256(text.encode()).hexdigest()[:16]


def group_tag(request: NodeRequest) -> str:
    """Return the tag that the nodes of all clusters of a job group share."""
    text = f"group\0{request.spec.group}"
    return owner_prefix(request.owner) + hashlib.sha256(text.encode()).hexdigest()[:16]


def instance_names(request: NodeRequest) -> list[str]:
    """List the names of a gang's instances by rank."""
    return [f"{gang_name(request)}-{rank}" for rank in range(request.placement.node_count)]


def request_id(token: str, purpose: str) -> str:
    """Return a request id: Google ignores a second call with the same id for at least an hour."""
    return str(uuid.uuid5(NAMESPACE, f"{token}\0{purpose}"))


def label_value(text: str) -> str:
    """Make a valid label value: other characters become `-`, and a digest keeps similar texts distinct."""
    plain = re.sub(r"[^a-z0-9_-]", "-", text.lower())
    if plain == text and len(text) <= LABEL_LENGTH_MAX:
        return plain
    return f"{plain[: LABEL_LENGTH_MAX - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def make_plain(text: str, *, is_key: bool) -> str:
    """Convert a user's text to the grammar of labels: `Team` becomes `team`."""
    plain = re.sub(r"[^a-z0-9_-]", "-", text.lower())
    return (f"x{plain}" if is_key and not plain[:1].isalpha() else plain)[:LABEL_LENGTH_MAX]


def make_labels(request: NodeRequest) -> dict[str, str]:
    """Merge labels, the user's first: they cannot override ours."""
    labels = request.spec.labels.items()
    own = {make_plain(key, is_key=True): make_plain(value, is_key=False) for key, value in labels}
    return own | {
        "broker-owner": label_value(request.owner),
        "broker-cluster": label_value(request.cluster),
        "broker-attempt": str(request.attempt),
        "broker-token": label_value(request.token),
    }


def describe(request: NodeRequest) -> str:
    """Make the description with the exact values that labels only approximate, for `read_description`."""
    placement = request.placement
    return json.dumps(
        {
            "broker": 1,
            "owner": request.owner,
            "cluster": request.cluster,
            "attempt": request.attempt,
            "token": request.token,
            "usd_hour": placement.usd_hour / placement.node_count,
        }
    )


def read_description(text: str) -> Mapping[str, Any] | None:
    """Parse a description; None if broker did not write it."""
    try:
        description = json.loads(text)
    except ValueError:
        return None
    return description if isinstance(description, dict) and description.get("broker") == 1 else None
