"""Google's operations: wait for their result, and read how a machine ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from broker.clouds.gcp.errors import read_operation_error
from broker.clouds.gcp.names import NodeId, owner_prefix
from broker.clouds.gcp.sdk import TIMEOUT_S, WAIT_TIMEOUT_S, Clients, read_scopes
from broker.errors import UnknownOutcomeError
from broker.frozen import frozen
from broker.types import NodeEnd

OPERATION_S_MAX = 300.0
# operationType -> why the machine is gone or stopped
ENDINGS = {
    "delete": NodeEnd.TERMINATED,
    "compute.instances.preempted": NodeEnd.PREEMPTED,
    "compute.instances.hostError": "crashed",
    "compute.instances.terminateOnHostMaintenance": "maintenance",
    "compute.instances.guestTerminate": NodeEnd.LEASE,  # or DONE: Google does not distinguish them
}


@frozen
class Ending:
    """The reason why an instance ended, as a value of `Node.reason`, and the time."""

    reason: str
    ended_s: float


def wait_zone(clients: Clients, project: str, zone: str, operation: Any) -> None:
    """Wait until the operation is DONE. Raises its CloudError, or UnknownOutcomeError.

    `operation.result()` would call the public host regardless of the endpoint that was set, and sleeps between its
    calls.
    """
    _wait(partial(clients.get("ZoneOperations").wait, project=project, zone=zone), operation.name, where=f" in {zone}")


def wait_global(clients: Clients, project: str, operation: Any) -> None:
    """Like `wait_zone`, for resources without a zone: firewall rules."""
    _wait(partial(clients.get("GlobalOperations").wait, project=project), operation.name)


def _wait(call: Callable[..., Any], name: str, *, where: str = "") -> None:
    """Repeat the call, which returns after two minutes at most, whether or not the operation is DONE."""
    start_s = time.monotonic()
    while True:
        found = call(operation=name, timeout=WAIT_TIMEOUT_S)
        if found.status.name == "DONE":
            break
        if time.monotonic() - start_s > OPERATION_S_MAX:
            raise UnknownOutcomeError(f"operation {name}{where} did not finish within {OPERATION_S_MAX:g} s")
    error = read_operation_error(found)
    if error is not None:
        raise error


def read_endings(clients: Clients, project: str, owner: str) -> tuple[Mapping[NodeId, Ending], frozenset[str]]:
    """Read in one call how instances of `owner` ended, as far back as Google keeps it (14 days).

    Also return the zones that did not respond.

    The newest operation counts, but a preemption is the reason of the deletion that follows it.
    """
    types = clients.types
    target_filter = f'targetLink : "/instances/{owner_prefix(owner)}"'
    request = types.AggregatedListGlobalOperationsRequest(project=project, filter=target_filter, max_results=500)
    endings: dict[NodeId, Ending] = {}
    pages = clients.get("GlobalOperations").aggregated_list(request=request, timeout=TIMEOUT_S).pages
    scopes, unseen = read_scopes(pages)
    for _, scoped in scopes:
        for operation in sorted(scoped.operations, key=lambda each: each.insert_time):
            where = NodeId.from_link(operation.target_link)
            reason = ENDINGS.get(operation.operation_type)
            if where is None or reason is None:
                continue
            ending = endings.get(where)
            endings[where] = Ending(
                reason=ending.reason if ending and reason == "terminated" else reason,
                ended_s=parse_time(operation.end_time or operation.insert_time),
            )
    return endings, unseen


def parse_time(text: str) -> float:
    """Convert Google's RFC 3339 time to Unix seconds."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0
