"""Firewall rules of a gang.

They admit ssh from its creator, all traffic between its nodes and from those of its job group, and public access to the
requested ports.

The rules belong to one gang, are named after it and are deleted with it. One more rule per owner denies all other ssh,
which the default network would allow; it is free of charge and stays.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from broker.clouds.gcp.errors import BusyError, ExistsError, NotFoundError
from broker.clouds.gcp.instances import as_cloud_error
from broker.clouds.gcp.machine import network_path
from broker.clouds.gcp.names import gang_name, group_tag, owner_prefix, peers_tag, read_description
from broker.clouds.gcp.operations import wait_global
from broker.clouds.gcp.sdk import TIMEOUT_S, Clients
from broker.types import NodeRequest

ANYWHERE = "0.0.0.0/0"
ALLOW_PRIORITY, DENY_PRIORITY = 900, 910  # lower numbers win; the default network's rules have 65534
PURPOSES = ("ssh", "nodes", "group", "ports")


def make_rules(request: NodeRequest, callers: Sequence[str], network: str) -> list[dict[str, Any]]:
    """Make the bodies of the rules for one gang. `callers`: address ranges that ssh may come from."""
    gang, owner = gang_name(request), owner_prefix(request.owner)
    shut = {
        "name": f"{owner}shut",
        "priority": DENY_PRIORITY,
        "target_tags": [owner.strip("-")],
        "source_ranges": [ANYWHERE],
        "denied": [{"I_p_protocol": "all"}],
        "description": json.dumps({"broker": 1, "owner": request.owner}),
    }
    rules: dict[str, dict[str, Any]] = {
        "ssh": {"source_ranges": list(callers), "allowed": [{"I_p_protocol": "tcp", "ports": ["22"]}]}
    }
    if request.placement.node_count > 1:
        peers = [peers_tag(request)]
        rules["nodes"] = {"source_tags": peers, "target_tags": peers, "allowed": [{"I_p_protocol": "all"}]}
    if request.spec.group:
        rules["group"] = {"source_tags": [group_tag(request)], "allowed": [{"I_p_protocol": "all"}]}
    if request.spec.ports:
        allowed = [{"I_p_protocol": "tcp", "ports": list(request.spec.ports)}]
        rules["ports"] = {"source_ranges": [ANYWHERE], "allowed": allowed}
    about = json.dumps({"broker": 1, "owner": request.owner, "cluster": request.cluster})
    own = {"priority": ALLOW_PRIORITY, "target_tags": [gang], "description": about}
    bodies = [shut, *(own | rules[purpose] | {"name": f"{gang}-{purpose}"} for purpose in PURPOSES if purpose in rules)]
    return [body | {"network": network, "direction": "INGRESS"} for body in bodies]


def open_rules(clients: Clients, request: NodeRequest, callers: Sequence[str]) -> list[Any]:
    """Request all rules of a gang; existing ones stay.

    Returns the input of `await_rules`, so that the machines can be requested meanwhile. No request ids: Google would
    answer a retry with the first call's failure.
    """
    network = find_network(clients)
    operations = [_insert(clients, rule) for rule in make_rules(request, callers, network)]
    return [operation for operation in operations if operation is not None]


def await_rules(clients: Clients, operations: Sequence[Any]) -> None:
    """Wait for the rules. Raises the CloudError of the first one that failed."""
    for operation in operations:
        try:
            wait_global(clients, find_rules_project(clients), operation)
        except ExistsError:
            pass


def admit(clients: Clients, project: str, owner: str, gang: str, callers: Sequence[str]) -> bool:
    """Add address ranges to the ssh rule of a gang; return whether one was missing."""
    name = f"{gang}-ssh"
    project = find_rules_project(clients, project)
    known = next((rule for rule in list_rules(clients, owner, project=project) if rule.name == name), None)
    if known is None or set(callers) <= set(known.source_ranges):
        return False
    body = clients.types.Firewall({"source_ranges": sorted({*known.source_ranges, *callers})})
    operation = clients.get("Firewalls").patch_unary(
        project=project, firewall=name, firewall_resource=body, timeout=TIMEOUT_S
    )
    wait_global(clients, project, operation)
    return True


def close_gang(clients: Clients, project: str, gang: str) -> None:
    """Delete the rules of a gang whose nodes are gone."""
    for purpose in PURPOSES:
        _delete(clients, find_rules_project(clients, project), f"{gang}-{purpose}")


def sweep_rules(clients: Clients, owner: str, keep: Collection[str], live_gangs: Collection[str]) -> int:
    """Delete the rules of this owner's gangs that have no instance and whose cluster is not in `keep`."""
    count = 0
    for rule in list_rules(clients, owner):
        description = read_description(rule.description) or {}
        is_kept = "cluster" not in description or description["cluster"] in keep or description.get("owner") != owner
        if not is_kept and rule.name.rpartition("-")[0] not in live_gangs:
            _delete(clients, find_rules_project(clients), rule.name)
            count += 1
    return count


def list_rules(clients: Clients, owner: str, *, project: str = "") -> list[Any]:
    """List the firewall rules of this installation, by the prefix of their names. Raises Google's errors."""
    name_filter = f"name eq {owner_prefix(owner)}.*"
    request = clients.types.ListFirewallsRequest(project=find_rules_project(clients, project), filter=name_filter)
    return list(clients.get("Firewalls").list(request=request, timeout=TIMEOUT_S))


def find_rules_project(clients: Clients, project: str = "") -> str:
    """Return the project of the rules: that of the network, which may be shared by another project (Shared VPC).

    If the settings name none, it is `project`, or the login's.
    """
    path = clients.login.settings.network
    named = path.partition("projects/")[2].partition("/")[0]
    return named or project or clients.login.project


def find_network(clients: Clients) -> str:
    """Return the path of the nodes' network; for a subnetwork in the settings, query its network."""
    network = clients.login.settings.network
    if "/subnetworks/" not in network:
        return network_path(network)
    parts = network.split("/")
    project = parts[parts.index("projects") + 1] if "projects" in parts else clients.login.project
    region, name = parts[parts.index("regions") + 1], parts[-1]
    subnetwork = clients.get("Subnetworks").get(project=project, region=region, subnetwork=name, timeout=TIMEOUT_S)
    return str(subnetwork.network)


def _insert(clients: Clients, rule: dict[str, Any]) -> Any:
    body = clients.types.Firewall(rule)
    try:
        return clients.get("Firewalls").insert_unary(
            project=find_rules_project(clients), firewall_resource=body, timeout=TIMEOUT_S
        )
    except Exception as error:
        if isinstance(as_cloud_error(error), ExistsError):
            return None
        raise


def _delete(clients: Clients, project: str, name: str) -> None:
    """Delete a rule; already gone or being deleted is success."""
    try:
        clients.get("Firewalls").delete_unary(project=project, firewall=name, timeout=TIMEOUT_S)
    except Exception as error:
        if not isinstance(as_cloud_error(error), NotFoundError | BusyError):
            raise
