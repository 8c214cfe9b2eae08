"""Wire a rehearsal: the real planner, provisioner, controller and gang, on simulated clouds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from broker.app.container import Context
from broker.clock import ScaledClock
from broker.rehearsal.cloud import Pace, RehearsedCloud, make_rehearsed_cloud
from broker.rehearsal.gang import BareGang, RehearsedGang
from broker.rehearsal.market import PlaceMarket
from broker.types import Cluster, Estimate, Placement, Plan, Task

if TYPE_CHECKING:
    from broker.jobs.controller import JobController
    from broker.runtime.gang import Gang


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The task and its simulated clouds; `node_count` of the task's nodes run here."""

    task: Task
    node_count: int
    clouds: Collection[str]
    market: PlaceMarket
    has_given_speed: bool

    @property
    def has_work(self) -> bool:
        """Whether the goal names an amount of work, by which steps are scaled."""
        return self.task.goal is not None and self.task.goal.work_hours is not None

    @property
    def played(self) -> Task:
        """The task as the controller runs it."""
        return replace(self.task, num_nodes=self.node_count)


class RehearsalContext(Context):
    """The objects of one rehearsal, in a state folder of its own."""

    clock: ScaledClock

    def __init__(self, home: Path, stage: Stage, *, speed: float, on_event: Callable[[str], None]) -> None:
        super().__init__(home)
        self.clock = ScaledClock()
        self.stage = stage
        self.pace = self._make_pace()
        self.speed = speed
        self.start_s = self.clock.now_s()
        self._on_event = on_event

    def _make_pace(self) -> Pace:
        pace = Pace(self.clock)
        pace.wait()  # until the program starts
        return pace

    @cached_property
    def rehearsed(self) -> Mapping[str, RehearsedCloud]:
        """The simulated clouds by name, over processes of this machine."""
        return {
            name: make_rehearsed_cloud(
                name,
                root=self.config.local_cloud,
                pace=self.pace,
                market=self.stage.market,
                start_s=self.start_s,
                on_event=self._on_event,
            )
            for name in sorted(self.stage.clouds)
        }

    @cached_property
    def clouds(self) -> Mapping[str, RehearsedCloud]:
        """The simulated clouds, in place of the real ones."""
        return self.rehearsed

    @cached_property
    def real_gang(self) -> Gang:
        """The gang of local nodes."""
        from broker.runtime.gang import Gang
        from broker.runtime.transports.local import LocalTransport

        return Gang(LocalTransport(), clock=self.clock)

    @cached_property
    def program(self) -> RehearsedGang:
        """The gang used by the controller."""
        return RehearsedGang(
            self.real_gang,
            self.pace,
            folder=self.config.home / "progress",
            speed=self.speed,
            work_s_of=self.find_work_s,
        )

    @property
    def controlled_gang(self) -> BareGang:
        """The gang of every controller."""
        return self.program

    def make_controller(self, job_id: int) -> JobController:
        """Return the real controller, with the simulated clouds and clock."""
        from broker.jobs.controller import JobController

        return JobController(
            job_id,
            store=self.store,
            provisioner=self.provisioner,
            gang=self.controlled_gang,
            planner=self.plan_played,
            clock=self.clock,
            config=self.config,
        )

    def plan_real(self, task: Task, avoid: Callable[[Placement], bool] | None = None) -> Plan:
        """Plan all nodes at real prices."""
        full = replace(task, num_nodes=self.stage.task.num_nodes)
        return self.market.rank(full, usable_clouds=frozenset(self.stage.clouds), avoid=avoid)

    def plan_played(self, task: Task, avoid: Callable[[Placement], bool] | None) -> Plan:
        """Plan as for the real task, with the price of all nodes spread over those that run here."""
        plan = self.plan_real(task, avoid)
        if self.stage.node_count == self.stage.task.num_nodes:
            return plan
        estimates = tuple(self._shrink(estimate) for estimate in plan.estimates)
        return replace(plan, estimates=estimates)

    def _shrink(self, estimate: Estimate) -> Estimate:
        placement = estimate.placement
        factor = placement.node_count / self.stage.node_count
        spot, ondemand = placement.offer.spot_usd_hour, placement.offer.ondemand_usd_hour
        offer = replace(
            placement.offer,
            spot_usd_hour=None if spot is None else spot * factor,
            ondemand_usd_hour=None if ondemand is None else ondemand * factor,
        )
        return replace(estimate, placement=replace(placement, offer=offer, node_count=self.stage.node_count))

    def find_work_s(self, cluster: Cluster) -> float | None:
        """Return the seconds of work that a run on this cluster represents; None without a goal, or with `--speed`."""
        from broker.optimizer.throughput import scale_work

        task, offer = self.stage.task, cluster.placement.offer
        if self.stage.has_given_speed or task.goal is None or task.goal.work_hours is None:
            return None
        hours = scale_work(
            task.goal, offer, self.market.figures, node_count=task.num_nodes, measured=task.goal.throughput
        )
        return (task.goal.work_hours if hours is None else hours) * 3600
