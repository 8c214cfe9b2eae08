"""What is for sale, and a ranking of it for one task."""

from __future__ import annotations

from dataclasses import dataclass

from broker.types.task import Task


@dataclass(frozen=True, kw_only=True)
class AcceleratorFigures:
    """What one accelerator can do, from its maker's data sheet; None where the sheet is silent."""

    name: str
    memory_gib: float
    bf16_dense_tflops: float | None = None
    fp32_tflops: float | None = None
    memory_bandwidth_gbs: float | None = None
    nvlink_gbs: float | None = None

    @property
    def training_tflops(self) -> float | None:
        """The peak that mixed-precision training can reach."""
        return self.bf16_dense_tflops or self.fp32_tflops


@dataclass(frozen=True, kw_only=True)
class EgressPrice:
    """USD per GB that leaves `from_region` of `cloud` ("*": any) for `target`: "internet",
    "same_cloud_other_region" or "same_region"."""

    cloud: str
    from_region: str
    target: str
    usd_per_gb: float


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One instance type for sale at one place, prices in USD per instance-hour. `as_of` is an ISO date."""

    cloud: str
    region: str
    zone: str | None
    instance_type: str
    vcpus: float
    memory_gib: float
    accelerator: str | None = None
    accelerator_count: float = 0
    accelerator_memory_gib: float = 0
    ondemand_usd_hour: float | None = None
    spot_usd_hour: float | None = None
    interruption_band: float | None = None  # upper bound in percent a month; 100 stands for "over 20"
    is_estimated: bool = False  # the on-demand price is worked out, not listed: shown with `~`
    as_of: str = ""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a gang would run: so many nodes of one offer, spot or on-demand."""

    offer: Offer
    is_spot: bool
    node_count: int

    @property
    def usd_hour(self) -> float:
        """Price of the whole gang, USD per hour."""
        price = self.offer.spot_usd_hour if self.is_spot else self.offer.ondemand_usd_hour
        assert price is not None, "a placement is only made from an offer that has its price"
        return price * self.node_count


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A placement with what it is expected to cost to finish. Hours and dollars are None where no work was given."""

    placement: Placement
    preemptions_per_hour: float = 0.0  # of the whole gang
    checkpoint_every_s: float | None = None
    expected_hours: float | None = None
    expected_preemptions: float | None = None
    expected_usd: float | None = None
    deadline_chance: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """How many offers a named filter took out, and the nearest miss in words."""

    filter: str
    count: int
    nearest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Estimates, best first, never empty; `estimates[0]` is the choice and `reason` says why in one sentence."""

    task: Task
    estimates: tuple[Estimate, ...]
    rejections: tuple[Rejection, ...]
    prices_as_of: str
    reason: str

    @property
    def choice(self) -> Estimate:
        return self.estimates[0]
