"""The failover search: request placements in the plan's order until one provides a whole gang.

`candidates.py` defines the order, `launch.py` the states of each launch, `failures.py` the reasons for the final error.

 1. Launches that an earlier process began are resumed, all at once.
 2. The best candidate is requested. It has until its hedge timer (`hedge_timer.py`) expires.
 3. Once every launch in progress is late or its region is suspect, the next candidate is requested too, in another
    zone if possible, up to `hedge` launches at once. An abandoned launch does not count.
 4. A placement that has refused, now or in an earlier search (`refusals.py`), is skipped and kept as a last resort.
 5. A placement in a suspect region, or in a region or cloud that has failed permanently, is not requested. Suspect ones
    are postponed until the launch there has ended.
 6. The first running gang is kept, or the better one if two run at once; the other launches are released in the
    background.
 7. Without a candidate and without a launch in progress, the search fails with the reasons of all placements.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from broker.clock import Clock
from broker.clouds.base import Cloud
from broker.errors import AuthError, CloudError, DeniedError, InvalidRequestError
from broker.frozen import frozen
from broker.provision.candidates import Candidates, find_zone
from broker.provision.failures import SearchFailures
from broker.provision.hedge_timer import Answer, HedgeTimer
from broker.provision.launch import Launch, LaunchSpec, LaunchState
from broker.provision.launcher import Launcher
from broker.provision.listing import Lister
from broker.provision.refusals import UnavailableOffers
from broker.provision.zones import split_zones, unite_zones
from broker.state.store import Store
from broker.types import EventKind, Node, NodeRequest, Placement, make_event
from broker.wording import make_place


@frozen
class FailoverResult:
    """The gang that is kept, and the launches to release once the gang is recorded."""

    placement: Placement
    nodes: Sequence[Node]
    surplus: tuple[Launch, ...]


class Failover:
    """Run failover searches; all searches of a store share refusals, retry budgets and hedge timers."""

    def __init__(
        self,
        clouds: Mapping[str, Cloud],
        store: Store,
        *,
        clock: Clock,
        owner: str,
        lister: Lister,
        write_boot: Callable[[NodeRequest], str],
    ) -> None:
        self._clouds = clouds
        self._clock = clock
        self._offers = UnavailableOffers(store)
        self.hedge_timer = HedgeTimer(store.response_times)
        self.launcher = Launcher(
            clouds,
            store,
            clock=clock,
            owner=owner,
            lister=lister,
            offers=self._offers,
            hedge_timer=self.hedge_timer,
            write_boot=write_boot,
        )

    async def acquire(
        self, spec: LaunchSpec, placements: Iterable[Placement], *, resumed: Sequence[Placement] = ()
    ) -> FailoverResult:
        """Return the first whole gang, best placement first. `resumed`: placements that an earlier process requested.

        Raises CapacityError if all refused temporarily (its cause is the last refusal, or None if no cloud was called),
        the AuthError or InvalidRequestError itself if a later search would not differ, and the errors of
        `spec.check_budget`. After a CloudError, nothing remains; after any other error, launches in progress remain as
        open intents.
        """
        search = _FailoverSearch(
            spec,
            Candidates(placements, resumed),
            clouds=self._clouds,
            launcher=self.launcher,
            offers=self._offers,
            hedge_timer=self.hedge_timer,
            clock=self._clock,
        )
        try:
            return await search.run()
        except BaseException:
            await search.cancel()
            raise


class _FailoverSearch:
    """One search for one gang."""

    def __init__(
        self,
        spec: LaunchSpec,
        candidates: Candidates,
        *,
        clouds: Mapping[str, Cloud],
        launcher: Launcher,
        offers: UnavailableOffers,
        hedge_timer: HedgeTimer,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._clouds = clouds
        self._launcher = launcher
        self._offers = offers
        self._hedge_timer = hedge_timer
        self._clock = clock
        self._candidates = candidates
        self._failures = SearchFailures()
        self._launches: list[Launch] = []  # in progress
        self._doubt = asyncio.Event()  # a region has become suspect, or a launch was abandoned
        self._has_begun = False
        self._is_exhausted = False  # no candidate was available at the last check
        self._has_reported_last = False

    async def run(self) -> FailoverResult:
        while True:
            self._begin_due()
            if not self._launches:
                raise self._failures.explain(self._spec.cluster.name) from self._failures.last_error
            self._report_last()
            await self._wait()
            ended = sorted((launch for launch in self._launches if launch.task.done()), key=lambda launch: launch.rank)
            running = next((launch for launch in ended if launch.task.exception() is None), None)
            if running is not None:
                return self._finish(running)
            for launch in ended:
                self._launches.remove(launch)
                self._note_failure(launch)

    async def cancel(self) -> None:
        """Stop as if the process had ended: the intents remain open."""
        tasks = [task for launch in self._launches for task in launch.cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin_due(self) -> None:
        """Begin all launches that are due; see the module's docstring for the rules."""
        while (placement := self._candidates.take_resumed()) is not None:
            self._begin(len(self._launches), placement)
        while self._has_room() and all(self._measure_left_s(launch) <= 0 for launch in self._launches):
            busy = [zone for launch in self._launches for zone in split_zones(launch.placement)]
            candidate = self._candidates.take_next(frozenset(map(find_zone, busy)), self._is_region_suspect)
            if candidate is not None:
                open_zones = [zone for zone in split_zones(candidate.placement) if zone not in busy]
                if requestable := self._select_requestable(candidate.rank, open_zones):
                    self._begin(candidate.rank, unite_zones(requestable))
                continue
            candidate = self._candidates.take_last_resort(self._is_due)
            if candidate is None:
                self._is_exhausted = True
                return
            self._begin(candidate.rank, candidate.placement)

    def _has_room(self) -> bool:
        under_way = sum(launch.state is not LaunchState.ABANDONED for launch in self._launches)
        return under_way < max(1, self._spec.hedge)

    def _is_due(self, placement: Placement) -> bool:
        return self._offers.measure_reask_s(placement) <= 0 and not self._is_region_suspect(placement)

    def _is_region_suspect(self, placement: Placement) -> bool:
        """Return whether a launch in progress makes its region suspect: a second launch there would not show more."""
        region = placement.offer.cloud, placement.offer.region
        suspect = [launch.placement.offer for launch in self._launches if launch.is_suspect]
        return any((offer.cloud, offer.region) == region for offer in suspect)

    def _begin(self, rank: int, placement: Placement) -> None:
        if not self._is_usable(placement):
            return
        late = tuple(self._launches)
        launch = self._launcher.begin(self._spec, placement, rank=rank, is_first=not self._has_begun)
        self._has_begun = True
        launch.on_doubt = self._doubt.set
        self._candidates.count_request(placement)
        self._launches.append(launch)
        self._report_begin(launch, late)

    def _is_usable(self, placement: Placement) -> bool:
        cloud = placement.offer.cloud
        if cloud not in self._clouds and not self._failures.is_excluded(placement):
            error = AuthError(f"cloud {cloud} is not set up", hints=("run `broker check`",))
            self._failures.exclude_cloud(cloud, error)
        return not self._failures.is_excluded(placement)

    def _select_requestable(self, rank: int, zones: Sequence[Placement]) -> Sequence[Placement]:
        """Return the zones of one placement that may be requested now; record why the others may not."""
        if not zones or not self._is_usable(zones[0]):
            return ()
        if wait_s := self._offers.measure_wait_s(zones[0].offer.cloud):
            for zone in zones:
                self._failures.note_reason(zone, f"too many failed calls; no further call for {wait_s:.0f} s")
            return ()
        if self._is_region_suspect(zones[0]):
            self._candidates.postpone(rank, unite_zones(zones))
            return ()
        active = self._offers.list_active()
        requestable = []
        for zone in zones:
            if covering := self._offers.list_covering(zone, active):
                hints = [hint for refusal in covering for hint in refusal.hints]
                self._failures.note_remembered(zone, covering[0].reason, hints)
                self._candidates.keep_as_last_resort(rank, zone)
            else:
                requestable.append(zone)
        return requestable

    async def _wait(self) -> None:
        """Wait until a launch ends or becomes late or suspect, or a last resort is due while launches are late."""
        left_s = [s for s in map(self._measure_left_s, self._launches) if s > 0]
        if not left_s and self._has_room():
            waiting = [place for place in self._candidates.list_last_resort() if not self._is_region_suspect(place)]
            left_s = [s for place in waiting if 0 < (s := self._offers.measure_reask_s(place)) < math.inf]
        self._doubt.clear()
        alarms: set[asyncio.Future[object]] = {asyncio.ensure_future(self._doubt.wait())}
        if left_s:
            alarms.add(asyncio.ensure_future(self._clock.sleep(min(left_s))))
        watched: set[asyncio.Future[object]] = {launch.task for launch in self._launches}  # type: ignore[misc]
        try:
            await asyncio.wait(watched | alarms, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for alarm in alarms:
                alarm.cancel()

    def _measure_left_s(self, launch: Launch) -> float:
        """Return seconds until this launch is later than usual; 0 or less if it is late, suspect or abandoned."""
        if launch.state is LaunchState.ABANDONED or launch.is_suspect:
            return 0.0
        created_s = launch.created_s
        since_s, answer = (launch.begun_s, Answer.CREATED) if created_s is None else (created_s, Answer.WHOLE)
        return since_s + self._hedge_timer.measure_s(launch.cloud.name, answer) - self._clock.now_s()

    def _finish(self, running: Launch) -> FailoverResult:
        placement = running.actual_placement
        self._offers.clear(placement)
        took_s = self._clock.now_s() - running.begun_s
        self._report(EventKind.PLACE_WHOLE, place=make_place(running.placement), took_s=took_s)
        surplus = tuple(launch for launch in self._launches if launch is not running)
        return FailoverResult(placement=placement, nodes=running.task.result(), surplus=surplus)

    def _note_failure(self, launch: Launch) -> None:
        """Record why a launch failed. Raises errors that are not a cloud's: taken down, over budget, or a bug."""
        error, placement = launch.task.exception(), launch.placement
        if not isinstance(error, CloudError):
            assert error is not None, "only launches that failed come here"
            raise error
        place, took_s = make_place(placement), self._clock.now_s() - launch.begun_s
        cloud, region = launch.cloud.name, placement.offer.region
        if isinstance(error, DeniedError) and error.scope != "cloud":
            self._failures.exclude_region(placement, error)
            self._report(EventKind.REGION_SKIPPED, cloud=cloud, region=region, error=error.message)
        elif isinstance(error, AuthError):
            self._failures.exclude_cloud(cloud, error)
            self._report(EventKind.CLOUD_SKIPPED, cloud=cloud, error=error.message)
        elif isinstance(error, InvalidRequestError):
            self._failures.exclude_placement(placement, error)
            self._report(EventKind.PLACE_SKIPPED, place=place, error=error.message)
        else:
            self._note_refusal(launch, error)
            self._report(EventKind.PLACE_REFUSED, place=place, took_s=took_s, error=error.message)

    def _note_refusal(self, launch: Launch, error: CloudError) -> None:
        actual = launch.actual_placement
        self._failures.note_refusal(actual, error)
        self._offers.refuse(actual, error, is_region_wide=launch.is_region_suspect)
        self._candidates.keep_as_last_resort(launch.rank, actual)
        refused = split_zones(actual)
        if untried := [zone for zone in split_zones(launch.placement) if zone not in refused]:
            self._candidates.put_back(launch.rank, unite_zones(untried))
        self._offers.note_failed_call(launch.cloud.name)

    def _report_last(self) -> None:
        """Report once that the search only waits for suspect regions because no other placement remains."""
        is_last = self._is_exhausted and all(launch.is_suspect for launch in self._launches)
        if is_last and not self._has_reported_last:
            self._has_reported_last = True
            regions = sorted({f"{launch.placement.offer.region} ({launch.cloud.name})" for launch in self._launches})
            self._report(EventKind.LAST_PLACES, regions=regions)

    def _report_begin(self, launch: Launch, late: Sequence[Launch]) -> None:
        place, usd_hour = make_place(launch.placement), launch.placement.usd_hour
        is_resumed = launch.was_unanswered
        if not late or is_resumed:
            self._report(EventKind.PLACE_ASKED, place=place, usd_hour=usd_hour, is_resumed=is_resumed)
            return
        first = min(late, key=lambda launch: launch.rank)
        under_way = [launch for launch in self._launches if launch.state is not LaunchState.ABANDONED]
        self._report(
            EventKind.PLACE_HEDGED,
            place=place,
            usd_hour=usd_hour,
            late=make_place(first.placement),
            late_s=None if first.is_region_suspect else self._clock.now_s() - first.begun_s,
            at_stake_usd_hour=sum(launch.placement.usd_hour for launch in under_way),
        )

    def _report(self, kind: EventKind, **data: object) -> None:
        self._spec.on_event(make_event(kind, **data))
