"""The disk image of a node: Google's deep-learning images include NVIDIA's driver; other nodes start from Ubuntu."""

from __future__ import annotations

import re

from broker.clouds.gcp.errors import NotFoundError
from broker.clouds.gcp.sdk import Clients
from broker.errors import InvalidRequestError
from broker.types import NodeRequest

# Newest first: Google retires families as CUDA advances, so the first that still exists is used.
# https://cloud.google.com/deep-learning-vm/docs/images (names compared with public scripts 2026-11-28)
GPU_FAMILIES = (
    ("deeplearning-platform-release", "common-cu129-ubuntu-2204-nvidia-580"),
    ("deeplearning-platform-release", "common-cu128-ubuntu-2204-nvidia-570"),
)
# Pascal and Volta require NVIDIA's proprietary kernel modules, while drivers from R560 install the open ones, which
# support Turing and newer (https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/kernel-modules.html, read
# 2026-11-24). These older families have R550, or install it at the first boot on `install-nvidia-driver`.
OLD_GPUS = ("P4", "P100", "V100")
OLD_GPU_FAMILIES = (
    ("deeplearning-platform-release", "common-cu124-ubuntu-2204-nvidia-550"),
    ("deeplearning-platform-release", "common-cu124-ubuntu-2204-py310"),
    ("deeplearning-platform-release", "common-cu124-ubuntu-2204"),
    ("deeplearning-platform-release", "common-cu123-ubuntu-2204-py310"),
    ("deeplearning-platform-release", "common-cu123-ubuntu-2204"),
)
# https://cloud.google.com/compute/docs/images/os-details#ubuntu_lts (written 2026-11-21)
CPU_FAMILIES = (("ubuntu-os-cloud", "ubuntu-2204-lts"), ("ubuntu-os-cloud", "ubuntu-2404-lts-amd64"))
ARM_FAMILIES = (("ubuntu-os-cloud", "ubuntu-2204-lts-arm64"), ("ubuntu-os-cloud", "ubuntu-2404-lts-arm64"))
ARM_MACHINES = ("t2a-", "c4a-", "n4a-", "a4x-")
IMAGE_PATH = re.compile(r"projects/[^/]+/global/images/(family/)?[^/]+")


def list_families(request: NodeRequest) -> tuple[tuple[str, str], ...]:
    """List pairs of project and family, best first."""
    if request.placement.offer.accelerator in OLD_GPUS:
        return OLD_GPU_FAMILIES
    return {"arm": ARM_FAMILIES, "gpu": GPU_FAMILIES, "cpu": CPU_FAMILIES}[image_kind(request)]


def image_kind(request: NodeRequest) -> str:
    """Return the key of `images` in the settings."""
    if request.placement.offer.instance_type.startswith(ARM_MACHINES):
        return "arm"
    return "gpu" if request.placement.offer.accelerator else "cpu"


def find_image(clients: Clients, request: NodeRequest) -> str:
    """Return the path of the image: the task's, else the settings', else the newest of Google's.

    Raises InvalidRequestError if the task names an invalid one, and NotFoundError if Google has none for the machine.
    """
    image = request.spec.image_id or clients.login.settings.images.get(image_kind(request))
    if image:
        match = IMAGE_PATH.search(image)
        if match is None:
            hint = "write `image_id: projects/PROJECT/global/images/IMAGE`, or omit it"
            raise InvalidRequestError(f"invalid Google image `{image}`", hints=(hint,))
        return match[0]
    for project, family in list_families(request):
        path = _find_newest(clients, project, family)
        if path:
            return path
    names = ", ".join(f"`{family}`" for _, family in list_families(request))
    hint = "name one in the task: `image_id: projects/PROJECT/global/images/IMAGE`"
    gpu = request.placement.offer.accelerator
    reason = f"; {gpu} requires NVIDIA's proprietary driver, R580 or older" if gpu in OLD_GPUS else ""
    raise NotFoundError(f"Google has retired the images that broker starts from: {names}{reason}", hints=(hint,))


def _find_newest(clients: Clients, project: str, family: str) -> str:
    import google.api_core.exceptions as api

    try:
        image = clients.get("Images").get_from_family(project=project, family=family, timeout=30.0)
    except api.NotFound:
        return ""
    return f"projects/{project}/global/images/{image.name}"
