"""The disk image of a node: Google's deep-learning images include NVIDIA's driver; other nodes start from Ubuntu."""

from __future__ import annotations

import re

from broker.clouds.gcp.errors import NotFoundError
from broker.clouds.gcp.sdk import Clients
from broker.errors import InvalidRequestError
from broker.types import NodeRequest

# Newest first: Google retires families as CUDA advances, so the first that still exists is used.
# https://cloud.google.com/deep-learning-vm/docs/images
GPU_FAMILIES = (
    ("deeplearning-platform-release", "common-cu129-ubuntu-2204-nvidia-580"),
    ("deeplearning-platform-release", "common-cu128-ubuntu-2204-nvidia-570"),
)
# https://cloud.google.com/compute/docs/images/os-details#ubuntu_lts
CPU_FAMILIES = (("ubuntu-os-cloud", "ubuntu-2204-lts"), ("ubuntu-os-cloud", "ubuntu-2404-lts-amd64"))
ARM_FAMILIES = (("ubuntu-os-cloud", "ubuntu-2204-lts-arm64"), ("ubuntu-os-cloud", "ubuntu-2404-lts-arm64"))
ARM_MACHINES = ("t2a-", "c4a-", "n4a-", "a4x-")
IMAGE_PATH = re.compile(r"projects/[^/]+/global/images/(family/)?[^/]+")


def list_families(request: NodeRequest) -> tuple[tuple[str, str], ...]:
    """List pairs of project and family, best first."""
    return {"arm": ARM_FAMILIES, "gpu": GPU_FAMILIES, "cpu": CPU_FAMILIES}[image_kind(request)]


def image_kind(request: NodeRequest) -> str:
    """Return the key of `images` in the settings."""
    if request.placement.offer.instance_type.startswith(ARM_MACHINES):
        return "arm"
    return "gpu" if request.placement.offer.accelerator else "cpu"


def find_image(clients: Clients, request: NodeRequest) -> str:
    """Return the path of the image: the task's, else the settings', else the newest of Google's.

    Raises InvalidRequestError if the task names an invalid one.
    """
    asked = request.spec.image_id or clients.login.settings.images.get(image_kind(request))
    if asked:
        found = IMAGE_PATH.search(asked)
        if found is None:
            hint = "Write `image_id: projects/PROJECT/global/images/IMAGE`, or omit it."
            raise InvalidRequestError(f"invalid Google image `{asked}`", hints=(hint,))
        return found[0]
    for project, family in list_families(request):
        path = _find_newest(clients, project, family)
        if path:
            return path
    names = ", ".join(f"`{family}`" for _, family in list_families(request))
    hint = "Name one in the task: `image_id: projects/PROJECT/global/images/IMAGE`."
    raise NotFoundError(f"Google has retired the images that broker starts from: {names}", hints=(hint,))


def _find_newest(clients: Clients, project: str, family: str) -> str:
    import google.api_core.exceptions as api

    try:
        image = clients.get("Images").get_from_family(project=project, family=family, timeout=30.0)
    except api.NotFound:
        return ""
    return f"projects/{project}/global/images/{image.name}"
