"""The machine image to boot, and the name of its root disk."""

from __future__ import annotations

from broker.catalog.architecture import guess_architecture
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.settings import Settings
from broker.errors import InvalidRequestError
from broker.frozen import frozen
from broker.types import MachineSpec, Offer

# Public parameters that AWS and Canonical maintain: the DLAMI guide, "Find the latest DLAMI id", the Neuron guide,
# "Neuron DLAMI", and Canonical's "Find Ubuntu images on AWS" (names compared with public scripts 2026-11-28). Base
# images have driver, CUDA and EFA, and no frameworks.
GPU_IMAGE = "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
NEURON_IMAGE = "/aws/service/neuron/dlami/multi-framework/ubuntu-22.04/latest/image_id"
PLAIN_IMAGE = "/aws/service/canonical/ubuntu/server/22.04/stable/current/{arch}/hvm/ebs-gp2/ami-id"
CANONICAL_NAMES = {"x86_64": "amd64", "arm64": "arm64"}
PARAMETER = "ssm:"


@frozen
class ImageRule:
    """A rule: machine types that begin with one of `families` boot `parameter`. If AWS publishes no image with a driver
    for their accelerator, `why` gives the reason."""

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


@frozen
class Image:
    """A machine image of one region."""

    id: str
    root_device: str
    size_gib: int  # minimum size of its root disk


class Images:
    """Choose the image of a machine, and look it up in its region."""

    def __init__(self, clients: Clients, settings: Settings) -> None:
        self._clients = clients
        self._settings = settings
        self._found: dict[tuple[str, str], Image] = {}

    async def find(self, offer: Offer, spec: MachineSpec) -> Image:
        """Look the image up. Raises InvalidRequestError if it does not exist."""
        image_id = self.choose(offer, spec)
        key = (offer.region, image_id)
        if key not in self._found:
            self._found[key] = await self._look_up(offer.region, image_id)
        return self._found[key]

    def choose(self, offer: Offer, spec: MachineSpec) -> str:
        """Choose the task's image, else the settings', else AWS's. Raises InvalidRequestError if none has a driver."""
        return spec.image_id or self._settings.images.get(offer.region) or PARAMETER + choose_parameter(offer)

    async def _look_up(self, region: str, wanted: str) -> Image:
        if wanted.startswith(PARAMETER):
            name = wanted.removeprefix(PARAMETER)
            answer = await self._clients.read("ssm", region, "get_parameter", Name=name)
            wanted = str(answer["Parameter"]["Value"])
        if not wanted.startswith("ami-"):
            raise InvalidRequestError(
                f"invalid EC2 image `{wanted}`",
                hints=("write `image_id: ami-...`, or `image_id: ssm:/NAME/OF/A/PARAMETER` that contains one",),
            )
        answer = await self._clients.read("ec2", region, "describe_images", ImageIds=[wanted])
        if not answer.get("Images"):
            raise InvalidRequestError(f"{region} has no image {wanted}")
        image = answer["Images"][0]
        root = image.get("RootDeviceName") or "/dev/sda1"
        disks = {each.get("DeviceName"): each.get("Ebs", {}) for each in image.get("BlockDeviceMappings", ())}
        return Image(id=wanted, root_device=root, size_gib=int(disks.get(root, {}).get("VolumeSize", 1)))


def choose_parameter(offer: Offer) -> str:
    """Choose the public parameter of the image for a machine type.

    Raises InvalidRequestError if no image has a driver for its accelerator: the machine would be billed for a GPU it
    cannot use.
    """
    arch = guess_architecture("aws", offer.instance_type)
    rule = next((rule for rule in IMAGE_RULES if offer.instance_type.startswith(rule.families)), None)
    if rule is not None and rule.why:
        raise InvalidRequestError(
            f"AWS publishes no image with a driver for {offer.instance_type}: {rule.why}", hints=IMAGE_HINTS
        )
    if rule is not None:
        return rule.parameter
    if offer.accelerator:
        return GPU_IMAGE.format(arch=arch)
    return PLAIN_IMAGE.format(arch=CANONICAL_NAMES[arch])
