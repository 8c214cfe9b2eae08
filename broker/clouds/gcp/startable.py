"""Find the accelerators that would start now in this project, by machine type, image and quotas; create nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from broker.clouds.findings import TypeCheckResult, describe_offer, group_offers
from broker.clouds.gcp.images import find_image, list_families
from broker.clouds.gcp.instances import as_cloud_error
from broker.clouds.gcp.machine import HYPERDISK_MACHINES, RDMA_MACHINES, check_request
from broker.clouds.gcp.quotas import Quota, check_quotas, list_needs, list_project_needs, read_project_quotas
from broker.clouds.gcp.sdk import TIMEOUT_S, Clients, Sdk
from broker.errors import InvalidRequestError, QuotaError
from broker.types import MachineSpec, NodeRequest, Offer, Placement

Quotas = Mapping[str, Quota]
Families = tuple[tuple[str, str], ...]


async def judge_types(sdk: Sdk, offers: Sequence[Offer]) -> Sequence[TypeCheckResult]:
    """Judge each accelerator and count. Raises CloudError if the project cannot be queried."""
    regions = await sdk.call(_read_all_quotas)
    everywhere = await sdk.call(read_project_quotas)
    images: dict[Families, str] = {}
    return await sdk.call(
        lambda clients: [
            max(
                (_judge_in(clients, name, offer, regions, everywhere, images) for offer in found),
                key=lambda each: len(each.ways),
            )
            for name, found in group_offers(offers).items()
        ]
    )


def _read_all_quotas(clients: Clients) -> Mapping[str, Quotas]:
    regions = clients.get("Regions").list(project=clients.login.project, timeout=TIMEOUT_S)
    return {
        region.name: {
            quota.metric: Quota(metric=quota.metric, limit=quota.limit, usage=quota.usage) for quota in region.quotas
        }
        for region in regions
    }


def _judge_in(
    clients: Clients,
    name: str,
    offer: Offer,
    regions: Mapping[str, Quotas],
    everywhere: Quotas,
    images: dict[Families, str],
) -> TypeCheckResult:
    """Judge one region. `images`: results for each list of families, shared between machines."""
    judge = partial(describe_offer, name, offer)

    if offer.region not in regions:
        return judge((), "region: this project has none of its quotas")
    request = _make_request(offer, is_spot=False)
    try:
        check_request(request)
    except InvalidRequestError as error:
        return judge((), f"machine: {error.message}")
    families = list_families(request)
    if families not in images:
        images[families] = _judge_image(clients, request)
    if images[families]:
        return judge((), f"image: {images[families]}")
    ways: list[str] = []
    whys: list[str] = []
    command = ""
    for way, price in (("on-demand", offer.ondemand_usd_hour), ("spot", offer.spot_usd_hour)):
        if price is None:
            continue
        request = _make_request(offer, is_spot=way == "spot")
        try:
            project = clients.login.project
            check_quotas(list_needs(request), regions[offer.region], project=project, region=offer.region)
            check_quotas(list_project_needs(request), everywhere, project=project)
            ways.append(way)
        except QuotaError as error:
            whys.append(f"{way} {error.message}")
            command = command or error.hints[0].partition("`")[2].rstrip("`")
    return judge(tuple(ways), f"quota: {'; '.join(whys)}" if whys else _note(offer), command)


def _judge_image(clients: Clients, request: NodeRequest) -> str:
    """Return the reason why there is no image; empty if there is one."""
    try:
        find_image(clients, request)
    except Exception as error:  # Google's library raises its own, which `Sdk` translates only at the end of a call
        cloud_error = as_cloud_error(error)
        if cloud_error is None:
            raise
        return cloud_error.message
    return ""


def _note(offer: Offer) -> str:
    """Return remarks on a machine that starts."""
    notes = ["network: one card, without RDMA"] if offer.instance_type.startswith(RDMA_MACHINES) else []
    notes += ["disk: Hyperdisk only"] if offer.instance_type.startswith(HYPERDISK_MACHINES) else []
    is_counted = any(need.metrics for need in list_needs(_make_request(offer, is_spot=False)))
    return "; ".join(notes + ([] if is_counted else ["quota: checked by the create call only"]))


def _make_request(offer: Offer, *, is_spot: bool) -> NodeRequest:
    placement = Placement(offer=offer, is_spot=is_spot, node_count=1)
    return NodeRequest(
        owner="check", cluster="check", attempt=1, token="check", placement=placement, spec=MachineSpec()
    )
