"""The machine image to boot, and the name of its root disk."""

from __future__ import annotations

from broker.clock import Clock
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.image_rules import choose_parameter
from broker.clouds.aws.settings import Settings
from broker.errors import InvalidRequestError
from broker.frozen import frozen
from broker.types import MachineSpec, Offer

PARAMETER = "ssm:"
KNOWN_S = 600.0  # a parameter names a newer image from time to time, and the older one may be deleted then


@frozen
class Image:
    """A machine image of one region."""

    id: str
    root_device: str
    size_gib: int  # minimum size of its root disk


class Images:
    """Choose the image of a machine, and look it up in its region."""

    def __init__(self, clients: Clients, settings: Settings, *, clock: Clock) -> None:
        self._clients = clients
        self._settings = settings
        self._clock = clock
        self._found: dict[tuple[str, str], tuple[float, Image]] = {}  # with the time of the lookup

    async def find(self, offer: Offer, spec: MachineSpec) -> Image:
        """Look the image up. Raises InvalidRequestError if it does not exist."""
        image_id = self.choose(offer, spec)
        key, now_s = (offer.region, image_id), self._clock.now_s()
        if key not in self._found or not 0.0 <= now_s - self._found[key][0] < KNOWN_S:
            self._found[key] = (now_s, await self._look_up(offer.region, image_id))
        return self._found[key][1]

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
            raise InvalidRequestError(
                f"{region} has no image {wanted}",
                hints=("an image exists in one region: name one of this region in `image_id`, or set `region`",),
            )
        image = answer["Images"][0]
        root = image.get("RootDeviceName") or "/dev/sda1"
        disks = {each.get("DeviceName"): each.get("Ebs", {}) for each in image.get("BlockDeviceMappings", ())}
        return Image(id=wanted, root_device=root, size_gib=int(disks.get(root, {}).get("VolumeSize", 1)))
