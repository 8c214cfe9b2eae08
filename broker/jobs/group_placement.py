"""Choose where the tasks of a job group run: in one region, near tasks that already have machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from broker.clock import Clock
from broker.errors import NoOfferError
from broker.jobs.groups import find_generation, find_live, get_role, may_start
from broker.jobs.replanning import cut_to_rest, drop_limits
from broker.pipelines.groups import GroupPlace, Refused, can_start, keep_near, locate, make_no_region_error, plan_group
from broker.state.store import Store
from broker.types import Attempt, EventKind, Job, Placement, Plan, Task, make_event

Planner = Callable[[Task, Callable[[Placement], bool] | None], Plan]
BLOCKED_S = 120.0  # after this time, a group that has not started leaves a region without capacity for one of its tasks
BLOCKED_RUNNING_S = 900.0  # after this time, a running group does too: all its tasks restart elsewhere


class GroupPlacement:
    """Place one job of a group. Its memory is lost with the controller, which only delays a move."""

    def __init__(self, store: Store, planner: Planner, clock: Clock) -> None:
        self._store = store
        self._planner = planner
        self._clock = clock
        self._blocked_since_s: float | None = None
        self._recorded = ""

    def place(self, job: Job, members: Sequence[Job], plan: Plan) -> Plan:
        """Return the plan's placements in one region: where other tasks have machines, else the best one for all tasks.

        The plan is unchanged if the tasks do not need a common region. Raises NoOfferError if no region fits all.
        """
        if not get_role(job).is_connected:
            return plan
        others = [each for each in members if each.id != job.id and not each.status.is_terminal]
        anchor = find_anchor(others)
        if anchor is not None and (near := keep_near(plan, anchor)).estimates:
            is_open = may_start(members, find_generation(members))
            if is_open or self._is_possible(anchor, plan, [each for each in others if find_live(each) is None]):
                self._record_choice(job, anchor, near=next(each.name for each in others if _is_at(each, anchor)))
                return near
        plans = [plan, *(found for each in others if (found := self._plan(each)) is not None)]
        whole = plan_group(plans, is_refused=self._find_refused()) or plan_group(plans)
        if whole is None:
            raise make_no_region_error(get_role(job).name)
        self._record_choice(job, whole.place, usd=whole.usd, apart_usd=whole.apart_usd)
        return keep_near(plan, whole.place)

    def find_move(self, job: Job, members: Sequence[Job], attempt: Attempt) -> str:
        """Return the reason to release the nodes of this attempt; empty to keep them."""
        here = locate(attempt.placement)
        alive = [each for each in members if not each.status.is_terminal]
        lacking = [each for each in alive if find_live(each) is None]
        blocked = [each for each in lacking if not self._has_capacity(each, here)]
        if not get_role(job).is_connected or not blocked:
            self._blocked_since_s = None
        if not get_role(job).is_connected:
            return ""
        anchor = find_anchor(alive)
        is_apart = anchor is not None and (anchor.cloud, anchor.region) != (here.cloud, here.region)
        if is_apart and attempt.released_s is None and all(self._has_capacity(each, anchor) for each in lacking):
            return f"the other tasks run in {anchor.cloud} {anchor.region}" if anchor else ""
        return self._find_blocked(attempt, here, alive, blocked)

    def _find_blocked(self, attempt: Attempt, here: GroupPlace, alive: Sequence[Job], blocked: Sequence[Job]) -> str:
        """Describe the task that has long found no capacity here, if all tasks could start elsewhere; else ""."""
        if not blocked:
            return ""
        now_s = self._clock.now_s()
        if self._blocked_since_s is None or now_s < self._blocked_since_s:
            self._blocked_since_s = now_s
        limit_s = BLOCKED_S if attempt.released_s is None else BLOCKED_RUNNING_S
        if now_s - self._blocked_since_s < limit_s:
            return ""
        plans = [found for each in alive if (found := self._plan(each)) is not None]
        whole = plan_group(plans, is_refused=self._find_refused()) if plans else None
        if whole is None or (whole.place.cloud, whole.place.region) == (here.cloud, here.region):
            return ""
        return (
            f"task {blocked[0].name} finds no capacity here; all tasks fit in {whole.place.cloud} {whole.place.region}"
        )

    def _is_possible(self, anchor: GroupPlace, plan: Plan, lacking: Sequence[Job]) -> bool:
        refused = self._find_refused()
        return can_start(plan, anchor, refused) and all(self._has_capacity(each, anchor) for each in lacking)

    def _has_capacity(self, job: Job, place: GroupPlace | None) -> bool:
        plan = self._plan(job)
        return plan is None or place is None or can_start(plan, place, self._find_refused())

    def _plan(self, job: Job) -> Plan | None:
        now_s = self._clock.now_s()
        spent_usd = self._store.bills.spend_usd(job_id=job.id, now_s=now_s)
        try:
            return self._planner(drop_limits(cut_to_rest(job, now_s=now_s, spent_usd=spent_usd)), None)
        except NoOfferError:
            return None  # the job itself reports it

    def _find_refused(self) -> Refused:
        found = self._store.refusals.list_active(self._clock.now_s())
        return lambda placement: any(each.covers(placement) for each in found)

    def _record_choice(
        self, job: Job, place: GroupPlace, *, near: str = "", usd: float = 0.0, apart_usd: float = 0.0
    ) -> None:
        """Record a choice once."""
        if (choice := f"{place} {near}") != self._recorded:
            self._recorded = choice
            event = make_event(
                EventKind.GROUP_PLACED,
                group=get_role(job).name, place=str(place), usd=usd, apart_usd=apart_usd, near=near,
            )  # fmt: skip
            self._store.events.add(event, job_id=job.id)


def find_anchor(members: Sequence[Job]) -> GroupPlace | None:
    """Return the location of most tasks with machines, or the newest choice in a tie; None without machines."""
    live = [attempt for each in members if (attempt := find_live(each)) is not None]
    if not live:
        return None
    counts = Counter((each.placement.offer.cloud, each.placement.offer.region) for each in live)
    best = max(live, key=lambda each: (counts[each.placement.offer.cloud, each.placement.offer.region], each.started_s))
    return locate(best.placement)


def _is_at(job: Job, place: GroupPlace) -> bool:
    live = find_live(job)
    return live is not None and locate(live.placement) == place
