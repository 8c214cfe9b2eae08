"""Which machine image boots, and what its root disk is called."""

from __future__ import annotations

from broker.catalog.architecture import guess_architecture
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.settings import Settings
from broker.errors import InvalidRequestError
from broker.nouns import noun
from broker.types import MachineSpec, Offer

# Public parameters that AWS and Canonical keep up to date: the DLAMI guide, "Find the latest DLAMI id", and
# Canonical's "Find Ubuntu images on AWS". Base images: driver, CUDA and EFA, and no frameworks.
GPU_IMAGE = "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
NEURON_IMAGE = "/aws/service/neuron/dlami/multi-framework/ubuntu-22.04/latest/image_id"
PLAIN_IMAGE = "/aws/service/canonical/ubuntu/server/22.04/stable/current/{arch}/hvm/ebs-gp2/ami-id"
CANONICAL_NAMES = {"x86_64": "amd64", "arm64": "arm64"}
PARAMETER = "ssm:"


@noun
class ImageRule:
    """Machines whose type begins with one of `families` boot `parameter`; where AWS publishes nothing that drives their
    accelerator, `why` says so."""

    families: tuple[str, ...]
    parameter: str = ""
    why: str = ""


# AWS's base GPU image brings NVIDIA's open kernel modules, which serve Turing and newer. Maxwell to Volta need the
# proprietary ones, of which R580 is the last branch, and Kepler R470: NVIDIA's driver installation guide, "Kernel
# Modules" (https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/kernel-modules.html, read 2026-11-22).
PROPRIETARY = "needs NVIDIA's proprietary driver, R580 or older"
IMAGE_RULES: tuple[ImageRule, ...] = (
    ImageRule(families=("trn", "inf"), parameter=NEURON_IMAGE),
    ImageRule(families=("p2.",), why="Kepler needs NVIDIA's driver R470 or older"),
    ImageRule(families=("g3.", "g3s."), why=f"Maxwell {PROPRIETARY}"),
    ImageRule(families=("p3.", "p3dn."), why=f"Volta {PROPRIETARY}"),
    ImageRule(families=("g4ad.",), why="its GPU needs AMD's driver"),
    ImageRule(families=("dl1.",), why="Gaudi needs Habana's driver"),
    ImageRule(families=("dl2q.",), why="it needs Qualcomm's driver"),
    ImageRule(families=("vt1.", "f1.", "f2."), why="it needs AMD's driver"),
)
IMAGE_HINTS = (
    "Name an image of yours that has the driver: `image_id: ami-...` in `resources`, or `[images]` in `aws.toml`.",
    "Or choose another GPU: `broker gpus` lists them.",
)


@noun
class Image:
    id: str
    root_device: str
    size_gib: int  # the least its root disk can have


class Images:
    def __init__(self, clients: Clients, settings: Settings) -> None:
        self._clients = clients
        self._settings = settings
        self._found: dict[tuple[str, str], Image] = {}

    async def find(self, offer: Offer, spec: MachineSpec) -> Image:
        """Raises InvalidRequestError where there is no such image."""
        wanted = self.choose(offer, spec)
        key = (offer.region, wanted)
        if key not in self._found:
            self._found[key] = await self._look_up(offer.region, wanted)
        return self._found[key]

    def choose(self, offer: Offer, spec: MachineSpec) -> str:
        """The task's image, else the settings', else AWS's. Raises InvalidRequestError where none has a driver."""
        return spec.image_id or self._settings.images.get(offer.region) or PARAMETER + choose_parameter(offer)

    async def _look_up(self, region: str, wanted: str) -> Image:
        if wanted.startswith(PARAMETER):
            name = wanted.removeprefix(PARAMETER)
            answer = await self._clients.read("ssm", region, "get_parameter", Name=name)
            wanted = str(answer["Parameter"]["Value"])
        if not wanted.startswith("ami-"):
            raise InvalidRequestError(
                f"`{wanted}` is no image of EC2",
                hints=("Write `image_id: ami-...`, or `image_id: ssm:/NAME/OF/A/PARAMETER` that holds one.",),
            )
        answer = await self._clients.read("ec2", region, "describe_images", ImageIds=[wanted])
        if not answer.get("Images"):
            raise InvalidRequestError(f"{region} has no image {wanted}")
        found = answer["Images"][0]
        root = found.get("RootDeviceName") or "/dev/sda1"
        disks = {each.get("DeviceName"): each.get("Ebs", {}) for each in found.get("BlockDeviceMappings", ())}
        return Image(id=wanted, root_device=root, size_gib=int(disks.get(root, {}).get("VolumeSize", 1)))


def choose_parameter(offer: Offer) -> str:
    """The public parameter of the image that suits a machine. Raises InvalidRequestError where none drives its
    accelerator: without one the machine costs the price of a GPU and has none to use."""
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
