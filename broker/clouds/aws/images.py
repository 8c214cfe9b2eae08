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
NEURON_FAMILIES = ("trn", "inf")
# Machines whose GPU the open NVIDIA driver does not serve (Kepler to Volta need the closed one; AMD's needs another).
PLAIN_FAMILIES = ("p2.", "p3.", "p3dn.", "g3.", "g3s.", "g4ad.", "dl1.", "dl2q.", "vt1.", "f1.", "f2.")
PARAMETER = "ssm:"


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
        wanted = spec.image_id or self._settings.images.get(offer.region) or PARAMETER + choose_parameter(offer)
        key = (offer.region, wanted)
        if key not in self._found:
            self._found[key] = await self._look_up(offer.region, wanted)
        return self._found[key]

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
    """The public parameter of the image that suits a machine."""
    arch = guess_architecture("aws", offer.instance_type)
    if offer.instance_type.startswith(NEURON_FAMILIES):
        return NEURON_IMAGE
    if offer.accelerator and not offer.instance_type.startswith(PLAIN_FAMILIES):
        return GPU_IMAGE.format(arch=arch)
    return PLAIN_IMAGE.format(arch=CANONICAL_NAMES[arch])
