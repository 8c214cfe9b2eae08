"""The zones of a region that offer a machine type: queried if the price book names only the region."""

from __future__ import annotations

from broker.clouds.gcp.machine import machine_type
from broker.clouds.gcp.sdk import TIMEOUT_S, Clients
from broker.errors import InvalidRequestError
from broker.types import Offer


def list_zones(clients: Clients, offer: Offer) -> list[str]:
    """List zones in a fixed order of trial. Raises InvalidRequestError if there is none."""
    if offer.zone:
        return [offer.zone]
    name = machine_type(offer)
    request = clients.types.AggregatedListMachineTypesRequest(
        project=clients.login.project, filter=f"name = {name}", max_results=500
    )
    found = set()
    for place, scoped in clients.get("MachineTypes").aggregated_list(request=request, timeout=TIMEOUT_S):
        zone = place.removeprefix("zones/")
        if scoped.machine_types and zone.startswith(f"{offer.region}-"):
            found.add(zone)
    if not found:
        raise InvalidRequestError(f"no zone of {offer.region} has machines of type `{name}`")
    return sorted(found)
