"""Pipelines: tasks that pass data to each other, and the placements of all of them."""

from __future__ import annotations

from broker.frozen import frozen
from broker.types.market import Estimate, Objective


@frozen
class Transfer:
    """Data moved from one placement to another. `is_assumed`: the price is unknown, and a conservative one is used."""

    usd: float
    hours: float
    is_assumed: bool = False


@frozen
class PipelineStep:
    """The choice for one task. `is_assumed`: the task specifies no work and counts as one hour."""

    name: str
    estimate: Estimate
    usd: float
    hours: float
    is_assumed: bool = False


@frozen
class PipelineEdge:
    """Data that step `target` needs from step `source`."""

    source: str
    target: str
    gib: float
    transfer: Transfer


@frozen
class PipelinePlan:
    """The choice for every task, in an order that can be run.

    `usd` is the cost of all steps and transfers; `hours` is the longest path through them. `time_usd` is the value of
    the hours of all steps. `lower_bound` bounds what the objective minimizes (`usd` + `time_usd`, or hours for "time"):
    no plan can be better, and with `is_optimal`, this plan attains it. `greedy_*` is the result of choosing for each
    task separately.
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
    time_usd: float = 0.0  # 0 for "time", which does not weigh money against time

    @property
    def egress_usd(self) -> float:
        """USD for all transfers between the tasks."""
        return sum(each.transfer.usd for each in self.edges)
