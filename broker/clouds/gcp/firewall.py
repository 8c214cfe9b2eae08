"""Who may reach a gang: its maker by ssh, its own nodes, and whoever for the ports that were asked for.

Rules belong to one gang and are named after it; they go with it. One more rule for all gangs of an owner shuts out the
rest, which the default network would let in by ssh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from broker.clouds.gcp.faults import BusyError, ExistsError, MissingError
from broker.clouds.gcp.instances import as_cloud_error
from broker.clouds.gcp.names import gang_name, owner_prefix, request_id
from broker.clouds.gcp.operations import parse_time, wait_global
from broker.clouds.gcp.sdk import TIMEOUT_S, Clients
from broker.types import NodeRequest

ANYWHERE = "0.0.0.0/0"
ALLOW_PRIORITY, DENY_PRIORITY = 900, 910  # lower wins; the default network's rules have 65534
LOST_S = 1800.0  # a rule so old, of a gang that has no instance, is nobody's


def make_rules(request: NodeRequest, callers: Sequence[str], network: str) -> list[dict[str, Any]]:
    """Bodies of the rules for one gang. `callers`: address ranges that ssh may come from."""
    gang = gang_name(request)
    path = network if "/" in network else f"global/networks/{network}"
    base = {"network": path, "direction": "INGRESS", "priority": ALLOW_PRIORITY, "target_tags": [gang]}
    shut = base | {
        "name": f"{owner_prefix(request.owner)}shut",
        "priority": DENY_PRIORITY,
        "target_tags": [owner_prefix(request.owner).strip("-")],
        "source_ranges": [ANYWHERE],
        "denied": [{"I_p_protocol": "all"}],
    }
    ssh = base | {
        "name": f"{gang}-ssh",
        "source_ranges": list(callers),
        "allowed": [{"I_p_protocol": "tcp", "ports": ["22"]}],
    }
    rules = [shut, ssh]
    if request.placement.node_count > 1:
        rules.append(base | {"name": f"{gang}-nodes", "source_tags": [gang], "allowed": [{"I_p_protocol": "all"}]})
    if request.spec.ports:
        allowed = [{"I_p_protocol": "tcp", "ports": list(request.spec.ports)}]
        rules.append(base | {"name": f"{gang}-ports", "source_ranges": [ANYWHERE], "allowed": allowed})
    return [rule | {"description": f"broker {request.cluster}"[:2000]} for rule in rules]


def open_rules(clients: Clients, request: NodeRequest, callers: Sequence[str]) -> None:
    """All rules of a gang, side by side; those that are there already stay."""
    operations = []
    for rule in make_rules(request, callers, clients.login.network):
        operations.append(_insert(clients, request, rule))
    for operation in operations:
        if operation is not None:
            _ignore_existing(clients, operation)


def _insert(clients: Clients, request: NodeRequest, rule: dict[str, Any]) -> Any:
    types = clients.types
    message = types.InsertFirewallRequest(
        project=clients.login.project,
        firewall_resource=types.Firewall(rule),
        request_id=request_id(request.token, rule["name"]),
    )
    try:
        return clients.get("Firewalls").insert_unary(request=message, timeout=TIMEOUT_S)
    except Exception as error:
        if isinstance(as_cloud_error(error), ExistsError):
            return None
        raise


def _ignore_existing(clients: Clients, operation: Any) -> None:
    try:
        wait_global(clients, clients.login.project, operation)
    except ExistsError:
        pass


def close_rules(clients: Clients, project: str, owner: str, live_gangs: set[str], *, now_s: float) -> int:
    """Delete the rules of all gangs of `owner` that have no instance left, save those that may be about to get one.
    Returns how many are left."""
    left = 0
    for rule in list_rules(clients, project, owner):
        gang = rule.name.rpartition("-")[0]
        is_shut = rule.name == f"{owner_prefix(owner)}shut"
        is_young = now_s - parse_time(rule.creation_timestamp) < LOST_S
        if gang in live_gangs or is_shut or is_young:
            left += 1
        else:
            _delete(clients, project, rule.name)
    return left


def close_gang(clients: Clients, project: str, gang: str) -> None:
    """Delete the rules of a gang whose nodes are gone."""
    for purpose in ("ssh", "nodes", "ports"):
        _delete(clients, project, f"{gang}-{purpose}")


def list_rules(clients: Clients, project: str, owner: str) -> Iterator[Any]:
    request = clients.types.ListFirewallsRequest(project=project, filter=f"name eq {owner_prefix(owner)}.*")
    yield from clients.get("Firewalls").list(request=request, timeout=TIMEOUT_S)


def _delete(clients: Clients, project: str, name: str) -> None:
    """Gone already, or going, is success."""
    try:
        clients.get("Firewalls").delete_unary(project=project, firewall=name, timeout=TIMEOUT_S)
    except Exception as error:
        if not isinstance(as_cloud_error(error), MissingError | BusyError):
            raise
