"""Which zones of a region sell a machine type: asked where the price book names a region only."""

from __future__ import annotations

from broker.clouds.gcp.machine import machine_type
from broker.clouds.gcp.sdk import TIMEOUT_S, Clients
from broker.errors import InvalidRequestError
from broker.types import Offer


def list_zones(clients: Clients, offer: Offer) -> list[str]:
    """In the order in which they are tried, which is the same every time. Raises InvalidRequestError for none."""
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
