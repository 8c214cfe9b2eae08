"""The zones of a region that offer a machine type: queried if the price book names only the region."""

from __future__ import annotations

from broker.clouds.gcp.machine import machine_type
from broker.clouds.gcp.sdk import TIMEOUT_S, Clients, read_scopes
from broker.errors import InvalidRequestError, TransientError
from broker.types import Offer


def list_zones(clients: Clients, offer: Offer) -> list[str]:
    """List zones in a fixed order of trial.

    Raises InvalidRequestError if there is none, TransientError if no zone responds.
    """
    if offer.zone:
        return [offer.zone]
    name = machine_type(offer)
    request = clients.types.AggregatedListMachineTypesRequest(
        project=clients.login.project, filter=f"name = {name}", max_results=500
    )
    scopes, unseen = read_scopes(clients.get("MachineTypes").aggregated_list(request=request, timeout=TIMEOUT_S).pages)
    selling = {place.removeprefix("zones/") for place, scoped in scopes if scoped.machine_types}
    zones = {zone for zone in selling if zone.startswith(f"{offer.region}-")}
    if not zones and any(zone.startswith(f"{offer.region}-") for zone in unseen):
        raise TransientError(f"Google cannot list machine types in {offer.region} now")
    if not zones:
        raise InvalidRequestError(f"no zone of {offer.region} has machines of type `{name}`")
    return sorted(zones)
