"""What clouds behind SkyPilot cannot do: SkyPilot refuses a task that requires it, so it is not placed there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from broker.frozen import frozen
from broker.types import Offer, Rejection, Resources, Task


@frozen
class Lack:
    """A requirement and the clouds that cannot fulfil it. `feature` is SkyPilot's name for it."""

    name: str
    feature: str
    clouds: frozenset[str]
    is_required: Callable[[Task, Resources], bool]  # by the task in this alternative


def _name(words: str) -> frozenset[str]:
    return frozenset(words.split())


# From SkyPilot 0.14, `_CLOUD_UNSUPPORTED_FEATURES` of each cloud; tests/sky compares them. Own machines are missing,
# because broker's adapters differ from SkyPilot's. So are Nebius in the row of networks, where it depends on the GPU,
# and virtual machines in that of mounts, which broker makes itself: the others are containers without FUSE.
LACKS = (
    Lack(
        name="several nodes",
        feature="MULTI_NODE",
        clouds=_name("hyperbolic primeintellect runpod seeweb shadeform vast verda vsphere yotta"),
        is_required=lambda task, resources: task.num_nodes > 1,
    ),
    Lack(
        name="container image",
        feature="DOCKER_IMAGE",
        clouds=_name("cudo hyperbolic ibm oci primeintellect scp shadeform verda vsphere"),
        is_required=lambda task, resources: resources.container is not None,
    ),
    Lack(
        name="machine image",
        feature="IMAGE_ID",
        clouds=_name(
            "cudo fluidstack hyperbolic lambda mithril paperspace primeintellect scp seeweb shadeform vsphere"
        ),
        is_required=lambda task, resources: bool(resources.image_id) and resources.container is None,
    ),
    Lack(
        name="open ports",
        feature="OPEN_PORTS",
        clouds=_name("hyperbolic ibm mithril verda vsphere"),
        is_required=lambda task, resources: bool(resources.ports),
    ),
    Lack(
        name="disk tier",
        feature="CUSTOM_DISK_TIER",
        clouds=_name(
            "cudo do fluidstack hyperbolic ibm lambda mithril paperspace primeintellect "
            "runpod scp seeweb shadeform vast verda vsphere yotta"
        ),
        is_required=lambda task, resources: resources.disk_tier not in (None, "best"),
    ),
    Lack(
        name="ultra disk tier",
        feature="ULTRA_DISK_TIER",  # no feature of SkyPilot: the answer of each cloud's `check_disk_tier`
        clouds=_name("azure nebius oci"),
        is_required=lambda task, resources: resources.disk_tier == "ultra",
    ),
    Lack(
        name="network tier",
        feature="CUSTOM_NETWORK_TIER",
        clouds=_name(
            "azure cudo do fluidstack hyperbolic lambda mithril paperspace primeintellect "
            "runpod scp seeweb shadeform vast verda vsphere yotta"
        ),
        is_required=lambda task, resources: resources.network_tier == "best",
    ),
    Lack(
        name="bucket mounts",
        feature="STORAGE_MOUNTING",
        clouds=_name("runpod vast yotta"),
        is_required=lambda task, resources: any(each.mode != "COPY" for each in task.storage_mounts),
    ),
)


def find_able_clouds(task: Task, resources: Resources, clouds: Iterable[str]) -> frozenset[str]:
    """Return those of the clouds that can do what the request requires."""
    return frozenset(clouds).difference(*(each.clouds for each in LACKS if each.is_required(task, resources)))


def leave_unable_clouds(
    task: Task, resources: Resources, offers: Sequence[Offer]
) -> tuple[Sequence[Offer], list[Rejection]]:
    """Return the offers of clouds that can do what the request requires, and what was rejected."""
    rejections = list[Rejection]()
    for each in LACKS:
        if not each.is_required(task, resources):
            continue
        able = [offer for offer in offers if offer.cloud not in each.clouds]
        if len(able) < len(offers):
            lost = next(offer for offer in offers if offer.cloud in each.clouds)
            rejections.append(Rejection(filter=each.name, count=len(offers) - len(able), nearest=lost.cloud))
        offers = able
    return offers, rejections
