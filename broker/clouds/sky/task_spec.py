"""A node request as a SkyPilot task: pinned to one place, with a keeper that terminates it. Pure."""

from __future__ import annotations

import json
from typing import Any

from broker.clouds import WITHOUT_SELF_TERMINATION
from broker.clouds.sky.gangs import ATTEMPT_LABEL, CLUSTER_LABEL
from broker.errors import InvalidRequestError
from broker.types import NodeRequest, Offer

PODS = ("kubernetes", "slurm", "ssh")  # sell cores and memory, no instance types
KEEPER_POLL_S = 10
UNCLAIMED_MINUTES = 30  # as for nodes of broker's own clouds

# SkyPilot takes a cluster down when no job runs on it. This job runs until the node's agent reports the end of its
# lease or autostop, or until no client has claimed the node in time; the end of any node ends all.
KEEPER = """\
state="$HOME/.broker"; mkdir -p "$state" && chmod 700 "$state" && rm -f "$state/shutdown"
looks=@LOOKS@
while [ ! -e "$state/shutdown" ]; do
  sleep @POLL_S@
  if [ ! -d "$state/runs" ]; then
    looks=$((looks - 1)); [ "$looks" -gt 0 ] || break
  fi
done
echo "broker: the end of this node: $(cat "$state/shutdown" 2>/dev/null || echo unclaimed)"
exit 1
"""


def make_task(request: NodeRequest) -> dict[str, Any]:
    """Make the input of `sky.Task.from_yaml_config`.

    Raises InvalidRequestError for features that no cloud behind SkyPilot has.
    """
    keeper = KEEPER.replace("@LOOKS@", str(UNCLAIMED_MINUTES * 60 // KEEPER_POLL_S))
    return {
        "name": "broker-keeper",
        "num_nodes": request.placement.node_count,
        "resources": make_resources(request),
        "run": keeper.replace("@POLL_S@", str(KEEPER_POLL_S)),
        **make_config(request),
    }


def make_config(request: NodeRequest) -> dict[str, Any]:
    """Return the settings of the task that SkyPilot applies to its pods."""
    if not request.spec.pod_config or request.placement.offer.cloud != "kubernetes":
        return {}
    return {"config": {"kubernetes": {"pod_config": json.loads(request.spec.pod_config)}}}


def make_resources(request: NodeRequest) -> dict[str, Any]:
    """Pin the offer's place and machine, leaving SkyPilot no choice."""
    offer, spec = request.placement.offer, request.spec
    resources: dict[str, Any] = {
        "infra": "/".join(each for each in (offer.cloud, offer.region, offer.zone) if each),
        "use_spot": request.placement.is_spot,
        "disk_size": spec.disk_size_gib,
        "labels": {
            **spec.labels,
            CLUSTER_LABEL: request.cluster,
            ATTEMPT_LABEL: str(request.attempt),
        },
        **make_machine(offer),
    }
    optional = {
        "disk_tier": spec.disk_tier,
        "network_tier": spec.network_tier,
        "image_id": spec.image_id,
        "ports": list(spec.ports),
    }
    resources.update((name, value) for name, value in optional.items() if value)
    if offer.cloud in PODS:
        del resources["disk_size"]
    if offer.cloud not in WITHOUT_SELF_TERMINATION:
        resources["autostop"] = {"idle_minutes": 1, "down": True, "wait_for": "jobs"}
    return resources


def make_machine(offer: Offer) -> dict[str, Any]:
    """Return SkyPilot's resource fields that pin the offer's machine. Raises InvalidRequestError."""
    if is_tpu(offer):
        return {"accelerators": f"{offer.instance_type}:1"}
    if offer.cloud not in PODS:
        if not offer.instance_type:
            raise InvalidRequestError(f"an offer of {offer.cloud} has no instance type")
        return {"instance_type": offer.instance_type}
    machine = {"cpus": f"{_format_number(offer.vcpus)}+", "memory": f"{_format_number(offer.memory_gib)}+"}
    if offer.accelerator:
        machine["accelerators"] = f"{offer.accelerator}:{_format_number(offer.accelerator_count)}"
    return machine


def is_tpu(offer: Offer) -> bool:
    """Return whether the offer is a TPU slice.

    The price book uses SkyPilot's name, such as `tpu-v5litepod-8`, host included.
    """
    return offer.cloud == "gcp" and offer.instance_type.startswith("tpu-")


def _format_number(number: float) -> str:
    return f"{number:g}"
