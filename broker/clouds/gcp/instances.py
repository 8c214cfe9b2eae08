"""Instances at Google: create, list, delete, and read as nodes. Runs in one of the SDK's threads."""

from __future__ import annotations

from typing import Any

from broker.clouds.gcp.errors import BusyError, ExistsError, NotFoundError, translate
from broker.clouds.gcp.machine import make_gang, make_instance
from broker.clouds.gcp.names import (
    STOP_LABEL,
    NodeId,
    label_value,
    read_description,
    request_id,
)
from broker.clouds.gcp.operations import parse_time, wait_zone
from broker.clouds.gcp.sdk import TIMEOUT_S, Clients, read_scopes
from broker.errors import CloudError, DeniedError, InvalidRequestError
from broker.types import Node, NodeRequest, NodeState

# Every state of https://cloud.google.com/compute/docs/instances/instance-lifecycle. A machine that is shutting down is
# still running, and billed, until it is gone.
STATES = {
    "PENDING": NodeState.PENDING,
    "PROVISIONING": NodeState.PENDING,
    "STAGING": NodeState.PENDING,
    "REPAIRING": NodeState.PENDING,
    "RUNNING": NodeState.RUNNING,
    "PENDING_STOP": NodeState.RUNNING,
    "STOPPING": NodeState.RUNNING,
    "SUSPENDING": NodeState.RUNNING,
    "DEPROVISIONING": NodeState.RUNNING,
    "STOPPED": NodeState.STOPPED,
    "SUSPENDED": NodeState.STOPPED,
    "TERMINATED": NodeState.STOPPED,  # Google's word for a stopped machine, whose disk remains
    "UNDEFINED_STATUS": NodeState.PENDING,
}
SSH_USER = "ubuntu"
LOCAL_SSD = "SCRATCH"  # type of disks that are lost with the host
UNASKED = "stopped"  # reason of a node that stopped for an unknown reason


def insert(
    clients: Clients, request: NodeRequest, zone: str, image: str, *, identity: str = "", failed_count: int = 0
) -> None:
    """Create the whole gang and wait for the operation's result. Existing instances stay as they are.

    `identity`: their service account, instead of that of the settings. `failed_count`: earlier calls known to have
    failed, whose request ids Google would answer with the same failure. The names keep the gang unique.
    """
    login = clients.login
    types, client = clients.types, clients.get("Instances")
    purpose = f"insert {zone}" + (f" {failed_count}" if failed_count else "")
    place = {"project": login.project, "zone": zone, "request_id": request_id(request.token, purpose)}
    try:
        if request.placement.node_count == 1:
            body = types.Instance(make_instance(request, zone, image, login.settings, identity=identity))
            message = types.InsertInstanceRequest(instance_resource=body, **place)
            operation = client.insert_unary(request=message, timeout=TIMEOUT_S)
        else:
            gang = types.BulkInsertInstanceResource(make_gang(request, image, login.settings, identity=identity))
            message = types.BulkInsertInstanceRequest(bulk_insert_instance_resource_resource=gang, **place)
            operation = client.bulk_insert_unary(request=message, timeout=TIMEOUT_S)
        wait_zone(clients, login.project, zone, operation)
    except Exception as error:
        if not isinstance(as_cloud_error(error), ExistsError):
            raise


def fetch(clients: Clients, where: NodeId) -> Node | None:
    """Return the instance; None if it does not exist or is not ours."""
    import google.api_core.exceptions as api

    try:
        instance = clients.get("Instances").get(
            project=where.project, zone=where.zone, instance=where.name, timeout=TIMEOUT_S
        )
    except api.NotFound:
        return None
    return read_node(instance)


def list_all(clients: Clients, owner: str) -> tuple[list[Node], frozenset[str]]:
    """List all zones, one call per page; also return the zones that Google could not query."""
    label_filter = f"labels.broker-owner = {label_value(owner)}"
    request = clients.types.AggregatedListInstancesRequest(
        project=clients.login.project, filter=label_filter, max_results=500
    )
    scopes, unseen = read_scopes(clients.get("Instances").aggregated_list(request=request, timeout=TIMEOUT_S).pages)
    nodes = (read_node(instance) for _, scoped in scopes for instance in scoped.instances)
    return [node for node in nodes if node is not None and node.owner == owner], unseen


def read_node(instance: Any) -> Node | None:
    """Read an instance as a node; None if broker did not create it.

    A node that stopped without our request has a preliminary `reason`; its operations hold the true one.
    """
    description = read_description(instance.description)
    where = NodeId.from_link(instance.self_link)
    if description is None or where is None:
        return None
    state = STATES.get(instance.status, NodeState.PENDING)
    nic = instance.network_interfaces[0] if instance.network_interfaces else None
    address = nic.network_i_p if nic else ""
    reached_at = nic.access_configs[0].nat_i_p if nic and nic.access_configs else address
    stands_still_unasked = state is NodeState.STOPPED and STOP_LABEL not in instance.labels
    stopped_s = parse_time(instance.last_stop_timestamp) or None
    return Node(
        id=str(where),
        cloud="gcp",
        owner=description["owner"],
        cluster=description["cluster"],
        attempt=description["attempt"],
        rank=where.rank,
        state=state,
        address=address,
        region=where.zone.rpartition("-")[0],
        zone=where.zone,
        token=description["token"],
        is_spot=instance.scheduling.provisioning_model == "SPOT",
        usd_hour=description["usd_hour"],
        created_s=parse_time(instance.last_start_timestamp if stopped_s else instance.creation_timestamp),
        ended_s=stopped_s if state is NodeState.STOPPED else None,
        reason=UNASKED if stands_still_unasked else "",
        handle=f"ssh://{SSH_USER}@{reached_at}:22" if reached_at else "",
        account=where.project,
    )


def delete(clients: Clients, where: NodeId) -> None:
    """Start deleting; already gone or being deleted is success.

    No request id: Google would answer a retry with the first call's failure.
    """
    try:
        clients.get("Instances").delete_unary(
            project=where.project, zone=where.zone, instance=where.name, timeout=TIMEOUT_S
        )
    except Exception as error:
        if not isinstance(as_cloud_error(error), NotFoundError):
            raise


def stop(clients: Clients, where: NodeId) -> None:
    """Label, then stop: a stopped node without the label counts as one that ended itself.

    A refusal removes the label: a running node with it would keep its disk when it ends itself.
    """
    instance = relabel(clients, where, is_stopped=True)
    request = clients.types.StopInstanceRequest(project=where.project, zone=where.zone, instance=where.name)
    if any(disk.type_ == LOCAL_SSD for disk in instance.disks):
        request.discard_local_ssd = True  # "required if the instance has any": a3, a4 and a2-ultragpu come with them
    try:
        operation = clients.get("Instances").stop_unary(request=request, timeout=TIMEOUT_S)
        wait_zone(clients, where.project, where.zone, operation)
    except Exception as error:
        if isinstance(as_cloud_error(error), InvalidRequestError):
            relabel(clients, where, is_stopped=False)
        raise


def start(clients: Clients, where: NodeId) -> None:
    """Start, then remove the label: in the other order, a crash in between would cost the node its disk."""
    operation = clients.get("Instances").start_unary(
        project=where.project, zone=where.zone, instance=where.name, timeout=TIMEOUT_S
    )
    wait_zone(clients, where.project, where.zone, operation)
    relabel(clients, where, is_stopped=False)


def relabel(clients: Clients, where: NodeId, *, is_stopped: bool) -> Any:
    """Replace the labels; return the instance before that.

    Raises BusyError if another writer changed them meanwhile.
    """
    client = clients.get("Instances")
    instance = client.get(project=where.project, zone=where.zone, instance=where.name, timeout=TIMEOUT_S)
    labels = {key: value for key, value in instance.labels.items() if key != STOP_LABEL}
    new_labels = labels | ({STOP_LABEL: "yes"} if is_stopped else {})
    if new_labels == dict(instance.labels):
        return instance
    body = clients.types.InstancesSetLabelsRequest(labels=new_labels, label_fingerprint=instance.label_fingerprint)
    try:
        operation = client.set_labels_unary(
            project=where.project,
            zone=where.zone,
            instance=where.name,
            instances_set_labels_request_resource=body,
            timeout=TIMEOUT_S,
        )
        wait_zone(clients, where.project, where.zone, operation)
    except Exception as error:
        if isinstance(refusal := as_cloud_error(error), DeniedError):  # the labels' fingerprint is outdated
            raise BusyError(refusal.message) from error
        raise
    return instance


def as_cloud_error(error: Exception) -> CloudError | None:
    """Return the error as our class; None if it is not an error of the cloud."""
    return error if isinstance(error, CloudError) else translate(error, does_change=True)
