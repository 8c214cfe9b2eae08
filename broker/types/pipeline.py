"""Several tasks with data between them, and where all of them would run."""

from __future__ import annotations

from broker.nouns import noun
from broker.types.market import Estimate, Objective


@noun
class Transfer:
    """Data moved from one placement to another. `is_assumed`: no price is known, a conservative one is used."""

    usd: float
    hours: float
    is_assumed: bool = False


@noun
class PipelineStep:
    """One task's choice. `is_assumed`: the task gives no work, and counts as one hour."""

    name: str
    estimate: Estimate
    usd: float
    hours: float
    is_assumed: bool = False


@noun
class PipelineEdge:
    """Data that step `target` needs from step `source`."""

    source: str
    target: str
    gib: float
    transfer: Transfer


@noun
class PipelinePlan:
    """The choice for every task, in an order that can be run.

    `usd` is all steps and transfers; `hours` the longest path through them. `lower_bound` is in the objective's unit
    (USD, or hours for "time"): nothing can be better; with `is_optimal` the plan reaches it. `greedy_*` is what
    choosing for every task alone would come to.
    """

    objective: Objective
    steps: tuple[PipelineStep, ...]
    edges: tuple[PipelineEdge, ...]
    usd: float
    hours: float
    lower_bound: float
    is_optimal: bool
    greedy_usd: float
    greedy_hours: float
    deadline_hours: float | None = None

    @property
    def egress_usd(self) -> float:
        return sum(each.transfer.usd for each in self.edges)
