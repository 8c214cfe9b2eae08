"""Offers of machines, and their ranking for one task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from broker.frozen import frozen
from broker.types.task import Resources, Task

Objective = Literal["cost", "time"]  # what to minimize over all tasks of a pipeline
Strategy = Literal["on-demand", "spot", "spot, then on-demand"]


@frozen
class AcceleratorFigures:
    """The capabilities of one accelerator, from its manufacturer's data sheet; None if not stated there."""

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


@frozen
class EgressPrice:
    """The price in USD per GB sent from `from_region` of `cloud` ("*": any region) to `target`.

    `target` is "internet", "same_cloud_other_region" or "same_region".
    """

    cloud: str
    from_region: str
    target: str
    usd_per_gb: float


@frozen
class Offer:
    """An instance type for sale in one place, with prices in USD per instance-hour.

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
    interruption_band: float | None = None  # upper bound in percent per month; 100 means "over 20"
    is_estimated: bool = False  # the on-demand price is derived, not listed, and shown with `~`
    as_of: str = ""
    spot_as_of: str = ""


@frozen
class Placement:
    """A place for a gang: `node_count` nodes of one offer, spot or on-demand.

    `other_zones` have the same price in the same region; the cloud may choose any one of them for all nodes.
    `alternative` is the index of the task's alternative (`Task.resources`) that the offer fits.
    """

    offer: Offer
    is_spot: bool
    node_count: int
    other_zones: tuple[str, ...] = ()
    alternative: int = 0

    @property
    def usd_hour(self) -> float:
        """The price of the whole gang, in USD per hour."""
        price = self.offer.spot_usd_hour if self.is_spot else self.offer.ondemand_usd_hour
        assert price is not None, "a placement is only made from an offer that has its price"
        return price * self.node_count

    def get_resources(self, task: Task) -> Resources:
        """Return the alternative of `task` that this placement was planned for.

        A launch that is repeated with a shorter list of alternatives may resume a placement of the longer list; in that
        case, the first alternative applies.
        """
        return task.resources[self.alternative if self.alternative < len(task.resources) else 0]

    @property
    def as_of(self) -> str:
        """The ISO date of the applicable price; empty if unknown."""
        return (self.offer.spot_as_of if self.is_spot else "") or self.offer.as_of


@frozen
class Breakdown:
    """The terms of an estimate: its expected hours, the billed hours, and all other costs.

    `work_hours` + `stall_hours` + `lost_hours` + `recovery_hours` + `waiting_hours` are the expected hours. A
    checkpoint is written every `Estimate.checkpoint_every_s` of work. A start takes `recovery_s`, of which
    `recovery_billed_s` are paid for. `*_usd_hour` are for the whole gang: on spot, the mean of the candidate places;
    on-demand, the cheapest place.
    """

    work_hours: float
    stall_hours: float = 0.0  # writing checkpoints
    lost_hours: float = 0.0  # work since the last checkpoint, which is repeated
    recovery_hours: float = 0.0  # of all starts, including the first
    waiting_hours: float = 0.0  # for spot capacity
    recovery_s: float = 0.0
    recovery_billed_s: float = 0.0
    spot_hours: float = 0.0  # billed at the spot price
    ondemand_hours: float = 0.0  # billed at the on-demand price
    spot_usd_hour: float = 0.0
    ondemand_usd_hour: float = 0.0
    compute_usd: float = 0.0
    egress_usd: float = 0.0
    storage_usd: float = 0.0


@frozen
class Estimate:
    """A placement with the expected cost to finish. Hours and dollars are None if the task specifies no work.

    Time counts from submission, the first start included. `switch_after_hours` is set if the job starts on spot and may
    continue on-demand, once waiting, starts and lost work have used up that many hours of its deadline.
    """

    placement: Placement
    preemptions_per_hour: float = 0.0  # of the whole gang
    checkpoint_every_s: float | None = None
    expected_hours: float | None = None
    expected_preemptions: float | None = None
    expected_usd: float | None = None
    deadline_chance: float | None = None
    budget_chance: float | None = None
    switch_after_hours: float | None = None
    breakdown: Breakdown | None = None

    @property
    def strategy(self) -> Strategy:
        """The pricing of the work as shown in plans: one pricing model, or spot with a later switch."""
        if not self.placement.is_spot:
            return "on-demand"
        return "spot" if self.switch_after_hours is None else "spot, then on-demand"


@frozen
class Rejection:
    """The number of offers that a named filter removed, and a description of the nearest miss."""

    filter: str
    count: int
    nearest: str | None = None


@frozen
class Plan:
    """A ranking of estimates, best first, never empty; `reason` explains the choice, `estimates[0]`, in one sentence.

    The planner's sequence computes each estimate on first access: thousands of offers may fit, but few are read.
    `hour_value_usd` is the value of an hour used to rank placements; None if the task specifies no work.
    `interval_factor` widens the intervals of the forecast if those of earlier jobs were too narrow.
    """

    task: Task
    estimates: Sequence[Estimate]
    rejections: tuple[Rejection, ...]
    prices_as_of: str
    reason: str
    hour_value_usd: float | None = None
    interval_factor: float = 1.0

    @property
    def choice(self) -> Estimate:
        """The placement with the lowest expected cost among those within the limits; a plan has at least one."""
        return self.estimates[0]
