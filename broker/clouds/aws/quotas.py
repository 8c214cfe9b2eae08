"""The account's vCPU quotas, by family of machines."""

from __future__ import annotations

import re

from broker.clock import Clock
from broker.clouds.aws.clients import Clients
from broker.clouds.aws.errors import ApiError, find_kind
from broker.errors import QuotaError
from broker.frozen import frozen
from broker.types import Placement

KNOWN_S = 600.0  # quotas are changed by hand: reread after a while
# Service Quotas, service `ec2`, counted in vCPUs: family -> (on-demand, spot). Codes and names: EC2 instance types
# guide, "Amazon EC2 instance type quotas" (read 2026-11-28).
QUOTAS = {
    "standard": ("L-1216C47A", "L-34B43A08"),  # A, C, D, H, I, M, R, T, Z
    "g": ("L-DB2E81BA", "L-3819A6DF"),  # G and VT
    "p": ("L-417A185B", "L-7212CCBC"),  # spot: P4, P3 and P2
    "p5": ("L-417A185B", "L-C4BD4855"),
    "trn": ("L-2C3B7624", "L-6B0D517C"),
    "inf": ("L-1945791B", "L-B5D1601B"),
    "x": ("L-7295265B", "L-E3A00192"),
    "f": ("L-74FC7D96", "L-88CF9481"),
    "dl": ("L-6E869C2A", "L-85EED4F7"),
}
FAMILY = re.compile(r"(trn|inf|dl|vt|hpc|mac|[a-z])")
ALIASES = {**dict.fromkeys("acdhimrtz", "standard"), "vt": "g"}


@frozen
class Quota:
    """`vcpus` is the limit for machines running at the same time in the region."""

    code: str
    region: str
    vcpus: float

    @property
    def command(self) -> str:
        """Return the command that requests an increase; the reader replaces VCPUS."""
        return (
            f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {self.code} "
            f"--region {self.region} --desired-value VCPUS"
        )


class Quotas:
    """Read vCPU quotas from Service Quotas, and keep them for a while."""

    def __init__(self, clients: Clients, *, clock: Clock) -> None:
        self._clients = clients
        self._clock = clock
        self._quotas: dict[tuple[str, str], tuple[float, Quota | None]] = {}

    async def find(self, region: str, instance_type: str, *, is_spot: bool) -> Quota | None:
        """Return the quota; None if the machine counts under no known quota, or the login may not read quotas."""
        code = find_code(instance_type, is_spot=is_spot)
        return await self.read(region, code) if code else None

    async def read(self, region: str, code: str) -> Quota | None:
        """Return a quota, cached for `KNOWN_S`; None if the login may not read it."""
        now_s = self._clock.now_s()
        known_s, known = self._quotas.get((region, code), (-KNOWN_S, None))
        if now_s - known_s < KNOWN_S:
            return known
        try:
            answer = await self._clients.read_once(
                "service-quotas", region, "get_service_quota", ServiceCode="ec2", QuotaCode=code
            )
            quota = Quota(code=code, region=region, vcpus=float(answer["Quota"]["Value"]))
        except ApiError as refusal:
            if find_kind(refusal.code, refusal.status) == "login":
                raise
            quota = None  # a precheck only: the launch itself fails if it must
        self._quotas[region, code] = (now_s, quota)
        return quota

    async def refuse_hopeless(self, placement: Placement) -> None:
        """Raise QuotaError with the figures if even an idle account could not have this gang."""
        offer = placement.offer
        quota = await self.find(offer.region, offer.instance_type, is_spot=placement.is_spot)
        if quota is not None and quota.vcpus < count_vcpus(placement):
            raise make_refusal(placement, quota)

    async def explain(self, placement: Placement, message: str) -> QuotaError:
        """Explain a refused launch, with the figures if available."""
        offer = placement.offer
        quota = await self.find(offer.region, offer.instance_type, is_spot=placement.is_spot)
        return make_refusal(placement, quota) if quota else QuotaError(message, hints=("run `broker check`",))


def find_code(instance_type: str, *, is_spot: bool) -> str | None:
    """Return the code of the vCPU quota that covers an instance type, None for types without a known one."""
    match = FAMILY.match(instance_type)
    family = ALIASES.get(match[1], match[1]) if match else ""
    if family == "p" and instance_type.startswith("p5"):
        family = "p5"
    elif family == "p" and is_spot and not instance_type.startswith(("p2", "p3", "p4")):
        return None  # later families have spot quotas of their own
    codes = QUOTAS.get(family)
    return codes[1 if is_spot else 0] if codes else None


def count_vcpus(placement: Placement) -> float:
    """Return the vCPUs of all nodes, the unit of EC2's quotas."""
    return placement.offer.vcpus * placement.node_count


def make_refusal(placement: Placement, quota: Quota) -> QuotaError:
    """Make the error for a placement beyond the quota, with the command that requests enough for it."""
    offer = placement.offer
    vcpus = count_vcpus(placement)
    kind = "spot" if placement.is_spot else "on-demand"
    is_too_small = quota.vcpus < vcpus
    rest = "" if is_too_small else ", and other machines run already"
    requested = vcpus if is_too_small else quota.vcpus + vcpus
    return QuotaError(
        f"quota of {offer.region}: {placement.node_count} x {offer.instance_type} {kind} requires {vcpus:g} vCPUs, "
        f"the account's limit is {quota.vcpus:g}{rest}",
        hints=(f"request more: `{quota.command.replace('VCPUS', f'{requested:g}')}`",),
    )
