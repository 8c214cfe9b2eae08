"""The public machine image that a machine type boots, and the types without one. Imports no SDK."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from broker.catalog.architecture import guess_architecture
from broker.errors import InvalidRequestError, UsageError
from broker.frozen import frozen
from broker.types import Offer

# Public parameters that AWS and Canonical maintain: the DLAMI guide, "Find the latest DLAMI id", the Neuron guide,
# "Neuron DLAMI", and Canonical's "Find Ubuntu images on AWS" (names compared with public scripts 2026-11-28). Base
# images have driver, CUDA and EFA, and no frameworks.
GPU_IMAGE = "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
NEURON_IMAGE = "/aws/service/neuron/dlami/multi-framework/ubuntu-22.04/latest/image_id"
PLAIN_IMAGE = "/aws/service/canonical/ubuntu/server/22.04/stable/current/{arch}/hvm/ebs-gp2/ami-id"
CANONICAL_NAMES = {"x86_64": "amd64", "arm64": "arm64"}


@frozen
class ImageRule:
    """A rule: machine types that begin with one of `families` boot `parameter`.

    If AWS publishes no image with a driver for their accelerator, `why` gives the reason.
    """

    families: tuple[str, ...]
    parameter: str = ""
    why: str = ""


# AWS's base GPU image has NVIDIA's open kernel modules, which support Turing and newer. Maxwell to Volta require the
# proprietary ones, of which R580 is the last branch, and Kepler R470: NVIDIA's driver installation guide, "Kernel
# Modules" (https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/kernel-modules.html, read 2026-11-22).
PROPRIETARY = "requires NVIDIA's proprietary driver, R580 or older"
IMAGE_RULES: tuple[ImageRule, ...] = (
    ImageRule(families=("trn", "inf"), parameter=NEURON_IMAGE),
    ImageRule(families=("p2.",), why="Kepler requires NVIDIA's driver R470 or older"),
    ImageRule(families=("g3.", "g3s."), why=f"Maxwell {PROPRIETARY}"),
    ImageRule(families=("p3.", "p3dn."), why=f"Volta {PROPRIETARY}"),
    ImageRule(families=("g4ad.",), why="its GPU requires AMD's driver"),
    ImageRule(families=("dl1.",), why="Gaudi requires Habana's driver"),
    ImageRule(families=("dl2q.",), why="it requires Qualcomm's driver"),
    ImageRule(families=("vt1.", "f1.", "f2."), why="it requires AMD's driver"),
)
IMAGE_HINTS = (
    "name an image that has the driver: `image_id: ami-...` in `resources`, or `[images]` in `aws.toml`",
    "or choose another GPU: `broker gpus` lists them",
)


def explain_missing_image(offer: Offer, home: Path) -> str:
    """Explain why a launch of this machine type requires `image_id`; empty if it does not.

    The settings in the state folder `home` may name an image of the region. Damaged settings name none.
    """
    rule = _find_rule(offer)
    if rule is None or not rule.why:
        return ""
    from broker.clouds.aws.settings import load_settings

    with suppress(UsageError, OSError):
        if load_settings(home).images.get(offer.region):
            return ""
    return f"AWS publishes no image with a driver for {offer.instance_type}: {rule.why}"


def choose_parameter(offer: Offer) -> str:
    """Choose the public parameter of the image for a machine type.

    Raises InvalidRequestError if no image has a driver for its accelerator: the machine would be billed for a GPU it
    cannot use.
    """
    arch = guess_architecture("aws", offer.instance_type)
    rule = _find_rule(offer)
    if rule is not None and rule.why:
        raise InvalidRequestError(
            f"AWS publishes no image with a driver for {offer.instance_type}: {rule.why}", hints=IMAGE_HINTS
        )
    if rule is not None:
        return rule.parameter
    if offer.accelerator:
        return GPU_IMAGE.format(arch=arch)
    return PLAIN_IMAGE.format(arch=CANONICAL_NAMES[arch])


def _find_rule(offer: Offer) -> ImageRule | None:
    return next((rule for rule in IMAGE_RULES if offer.instance_type.startswith(rule.families)), None)
