"""What is for sale, and a ranking of it for one task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from broker.nouns import noun
from broker.types.task import Resources, Task

Objective = Literal["cost", "time"]  # what tasks that pass data on should take least of, together
Strategy = Literal["on-demand", "spot", "spot, then on-demand"]


@noun
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


@noun
class EgressPrice:
    """USD per GB that leaves `from_region` of `cloud` ("*": any) for `target`: "internet",
    "same_cloud_other_region" or "same_region"."""

    cloud: str
    from_region: str
    target: str
    usd_per_gb: float


@noun
class Offer:
    """One instance type for sale at one place, prices in USD per instance-hour.

    `as_of` is the ISO date of the on-demand price, `spot_as_of` that of the spot price.
    """

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
    spot_as_of: str = ""


@noun
class Placement:
    """Where a gang would run: so many nodes of one offer, spot or on-demand.

    `other_zones`, at the same price in the same region, will do as well: the cloud is to choose one for all nodes.
    `alternative` is the index of the task's alternative (`Task.resources`) that the offer fits.
    """

    offer: Offer
    is_spot: bool
    node_count: int
    other_zones: tuple[str, ...] = ()
    alternative: int = 0

    @property
    def usd_hour(self) -> float:
        """Price of the whole gang, USD per hour."""
        price = self.offer.spot_usd_hour if self.is_spot else self.offer.ondemand_usd_hour
        assert price is not None, "a placement is only made from an offer that has its price"
        return price * self.node_count

    def get_resources(self, task: Task) -> Resources:
        """Return the alternative of `task` that this placement was planned for.

        A launch that is repeated with a shorter list of alternatives may take up a placement of the longer one; the
        first alternative holds then.
        """
        return task.resources[self.alternative if self.alternative < len(task.resources) else 0]

    @property
    def as_of(self) -> str:
        """ISO date of the price that is paid; empty where it is not known."""
        return (self.offer.spot_as_of if self.is_spot else "") or self.offer.as_of


@noun
class Breakdown:
    """Every term of an estimate: where its expected hours go, which of them are billed, and what else costs money.

    `work_hours` + `stall_hours` + `lost_hours` + `recovery_hours` are the expected hours. A checkpoint is written every
    `every_s` of work; `recovery_s` is one recovery, of which `recovery_billed_s` are paid for.
    """

    work_hours: float
    stall_hours: float = 0.0  # writing checkpoints
    lost_hours: float = 0.0  # done since a checkpoint, and done again
    recovery_hours: float = 0.0
    recovery_s: float = 0.0
    recovery_billed_s: float = 0.0
    spot_hours: float = 0.0  # billed at the spot price
    ondemand_hours: float = 0.0  # billed at the on-demand price
    compute_usd: float = 0.0
    egress_usd: float = 0.0
    storage_usd: float = 0.0
    switch_chance: float | None = None  # that the job ends up on on-demand, where it may switch


@noun
class Estimate:
    """A placement with what it is expected to cost to finish. Hours and dollars are None where no work was given.

    `switch_after_hours` is given where the job starts on spot and goes on with on-demand at the first preemption that
    brings its lost time over so many hours.
    """

    placement: Placement
    preemptions_per_hour: float = 0.0  # of the whole gang
    checkpoint_every_s: float | None = None
    expected_hours: float | None = None
    expected_preemptions: float | None = None
    expected_usd: float | None = None
    deadline_chance: float | None = None
    budget_chance: float | None = None  # at least this, where the job may switch
    switch_after_hours: float | None = None
    breakdown: Breakdown | None = None

    @property
    def strategy(self) -> Strategy:
        if not self.placement.is_spot:
            return "on-demand"
        return "spot" if self.switch_after_hours is None else "spot, then on-demand"


@noun
class Rejection:
    """How many offers a named filter took out, and the nearest miss in words."""

    filter: str
    count: int
    nearest: str | None = None


@noun
class Plan:
    """Estimates, best first, never empty; `estimates[0]` is the choice and `reason` says why in one sentence.

    The planner's own sequence makes each estimate when it is first asked for: thousands fit, and few are looked at.
    """

    task: Task
    estimates: Sequence[Estimate]
    rejections: tuple[Rejection, ...]
    prices_as_of: str
    reason: str

    @property
    def choice(self) -> Estimate:
        return self.estimates[0]
