"""The only failover loop: it follows the plan's order, and asks the next place too while those before are late.

The first gang that is whole is kept, the better place where two are at once; all others are given back.
"""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from broker.clock import Clock
from broker.clouds.base import Cloud
from broker.errors import AuthError, BrokerError, CapacityError, CloudError, DeniedError, InvalidRequestError
from broker.nouns import noun
from broker.provision.hedge_timer import Answer, HedgeTimer
from broker.provision.launch import HEDGE, Launch, Launcher, LaunchSpec, describe, make_token
from broker.provision.listing import Lister
from broker.provision.refusals import CAPACITY_REFUSAL_S, UnavailableOffers
from broker.provision.zones import split_zones, unite_zones
from broker.state.store import Store
from broker.types import EventKind, Node, NodeRequest, Placement, make_event
from broker.wording import make_place

__all__ = ["CAPACITY_REFUSAL_S", "HEDGE", "Failover", "FailoverResult", "LaunchSpec", "describe", "make_token"]

ASKED_MAX = 2  # times that one search asks one place
REASONS_MAX, PLACES_MAX, HINTS_MAX = 8, 6, 4  # in an error
LAST_RESORT_MAX = 32  # places that refused lately and are asked after all, where there are no others
OTHER_ZONE_AMONG = 16  # a second place is looked for among so many: a zone that hangs, hangs for all its types


@noun
class FailoverResult:
    """The gang that is kept, and the tries that were still under way: give those back once the gang is recorded."""

    placement: Placement
    nodes: Sequence[Node]
    others: tuple[Launch, ...]


class Failover:
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
        self._memory = UnavailableOffers(store)
        self.hedge_timer = HedgeTimer(store.paces)
        self.launcher = Launcher(
            clouds,
            store,
            clock=clock,
            owner=owner,
            lister=lister,
            memory=self._memory,
            hedge_timer=self.hedge_timer,
            write_boot=write_boot,
        )

    async def acquire(
        self, spec: LaunchSpec, placements: Iterable[Placement], *, begun: Sequence[Placement] = ()
    ) -> FailoverResult:
        """The first whole gang, best place first; places `begun` by an earlier process all go on at once.

        Raises CapacityError when all refused for now (its cause is the last answer, None if nobody was asked), the
        AuthError or InvalidRequestError itself when no place would ever answer otherwise, and what
        `wanted.check_budget` raises. On a CloudError nothing is left; on any other end what was begun stays as open
        intents.
        """
        search = _FailoverSearch(
            spec, placements, begun, self._clouds, self.launcher, self._memory, self.hedge_timer, self._clock
        )
        try:
            return await search.run()
        except BaseException:
            await search.drop()
            raise


class _FailoverSearch:
    """One search for a gang."""

    def __init__(
        self,
        spec: LaunchSpec,
        placements: Iterable[Placement],
        begun: Sequence[Placement],
        clouds: Mapping[str, Cloud],
        launcher: Launcher,
        memory: UnavailableOffers,
        hedge_timer: HedgeTimer,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._clouds = clouds
        self._launcher = launcher
        self._memory = memory
        self._hedge_timer = hedge_timer
        self._clock = clock
        self._candidates = _Candidates(placements)
        self._begun = list(begun)
        self._tries: list[Launch] = []
        self._lasting: dict[str, CloudError] = {}  # what no later try changes, by cloud, region or place
        self._refused: dict[tuple[str, str], list[Placement]] = {}  # cloud and why -> where
        self._remembered: set[tuple[str, str]] = set()  # of those, what nobody was asked for
        self._hints: dict[str, None] = {}
        self._has_temporary = False
        self._last_answer: CloudError | None = None  # to a question that may be answered otherwise later
        self._last_resort: list[tuple[int, Placement]] = []
        self._postponed: list[tuple[int, Placement]] = []
        self._asked = Counter[Placement]()
        self._changed = asyncio.Event()  # a try has become doubtful, or is ending
        self._is_exhausted = self._is_alone_told = False
        self._is_first = True

    async def run(self) -> FailoverResult:
        while True:
            self._begin_due()
            if not self._tries:
                raise self._explain() from self._last_answer
            self._tell_alone()
            await self._wait()
            ended = sorted((one for one in self._tries if one.doing.done()), key=lambda one: one.rank)
            whole = next((one for one in ended if one.doing.exception() is None), None)
            if whole is not None:
                return self._win(whole)
            for one in ended:
                self._tries.remove(one)
                self._note_failure(one)

    async def drop(self) -> None:
        """Stop here, as if the process had ended: intents stay open."""
        tasks = [task for one in self._tries for task in one.cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin_due(self) -> None:
        """What an earlier process began goes on at once; further places only while all before are late or in doubt."""
        while self._begun:
            self._begin(len(self._tries), self._begun.pop(0))
        while self._has_room() and all(self._measure_left_s(one) <= 0 for one in self._tries):
            busy = [each for one in self._tries for each in split_zones(one.placement)]
            found = self._take_postponed() or self._candidates.take(frozenset(_name_zone(each) for each in busy))
            if found is not None:
                rank, placement = found
                free = self._find_free(rank, [each for each in split_zones(placement) if each not in busy])
                if free:
                    self._begin(rank, unite_zones(free))
                continue
            due = next((each for each in self._last_resort if self._is_due(each[1])), None)
            if due is None:
                self._is_exhausted = True
                return
            self._last_resort.remove(due)
            self._begin(*due)  # nowhere else to go, and it may have room again

    def _take_postponed(self) -> tuple[int, Placement] | None:
        """The best place that was passed over for its region's sake, once that is in doubt no more."""
        free = [each for each in self._postponed if not self._is_in_doubt(each[1])]
        best = min(free, key=lambda each: each[0], default=None)
        if best is not None:
            self._postponed.remove(best)
        return best

    def _has_room(self) -> bool:
        """What is only being ended takes nobody's place."""
        return sum(not one.is_ending for one in self._tries) < max(1, self._spec.hedge)

    def _is_due(self, placement: Placement) -> bool:
        return self._memory.measure_reask_s(placement) <= 0 and not self._is_in_doubt(placement)

    def _is_in_doubt(self, placement: Placement) -> bool:
        """Whether its region fails a try that is still under way: another one there would learn no more."""
        place = placement.offer.cloud, placement.offer.region
        doubtful = [one.placement.offer for one in self._tries if one.is_in_doubt]
        return any((offer.cloud, offer.region) == place for offer in doubtful)

    def _begin(self, rank: int, placement: Placement) -> None:
        if not self._has_cloud(placement):
            return
        late = tuple(self._tries)
        one = self._launcher.begin(self._spec, placement, rank=rank, is_first=self._is_first)
        self._is_first = False
        one.on_change = self._changed.set
        self._asked[placement] += 1
        self._tries.append(one)
        self._tell_begin(one, late)

    def _has_cloud(self, placement: Placement) -> bool:
        name = placement.offer.cloud
        if name not in self._clouds and name not in self._lasting:
            self._lasting[name] = AuthError(f"cloud {name} is not set up", hints=("Run `broker check`.",))
        return not any(key in self._lasting for key in (name, _name_region(placement)))

    def _find_free(self, rank: int, placements: Sequence[Placement]) -> Sequence[Placement]:
        """Those zones of one place that may be asked now; why not of the others is noted."""
        if not placements or not self._has_cloud(placements[0]):
            return ()
        name = placements[0].offer.cloud
        if wait_s := self._memory.measure_wait_s(name):
            for each in placements:
                self._note_reason(each, f"it has refused too many calls of late and rests for {wait_s:.0f} s more")
            return ()
        if self._is_in_doubt(placements[0]):
            self._postponed.append((rank, unite_zones(placements)))
            return ()
        active = self._memory.list_active()
        free = []
        for each in placements:
            if covering := self._memory.list_covering(each, active):
                if (name, covering[0].reason) not in self._refused:
                    self._remembered.add((name, covering[0].reason))
                self._hints.update(dict.fromkeys(hint for refusal in covering for hint in refusal.hints))
                self._note_reason(each, covering[0].reason)
                self._keep_in_mind(rank, each)
            else:
                free.append(each)
        return free

    def _keep_in_mind(self, rank: int, placement: Placement) -> None:
        if len(self._last_resort) < LAST_RESORT_MAX and self._asked[placement] < ASKED_MAX:
            insort(self._last_resort, (rank, placement), key=lambda each: each[0])

    async def _wait(self) -> None:
        """Until a try ends or the last of them is late; or a place that refused may be asked again beside late ones."""
        left_s = [s for s in map(self._measure_left_s, self._tries) if s > 0]
        if not left_s and self._has_room():
            waiting = [each for _, each in self._last_resort if not self._is_in_doubt(each)]
            left_s = [s for each in waiting if 0 < (s := self._memory.measure_reask_s(each)) < math.inf]
        self._changed.clear()
        alarms: set[asyncio.Future[object]] = {asyncio.ensure_future(self._changed.wait())}
        if left_s:
            alarms.add(asyncio.ensure_future(self._clock.sleep(min(left_s))))
        watched: set[asyncio.Future[object]] = {one.doing for one in self._tries}  # type: ignore[misc]
        try:
            await asyncio.wait(watched | alarms, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for alarm in alarms:
                alarm.cancel()

    def _measure_left_s(self, one: Launch) -> float:
        """Seconds until this try is later than is usual for its cloud; not above 0: it is late, or in doubt."""
        if one.is_ending or one.is_in_doubt:
            return 0.0
        since_s, answer = (one.begun_s, Answer.CREATED) if one.created_s is None else (one.created_s, Answer.WHOLE)
        return since_s + self._hedge_timer.measure_s(one.cloud.name, answer) - self._clock.now_s()

    def _win(self, whole: Launch) -> FailoverResult:
        self._memory.forgive(whole.landed)
        took_s = self._clock.now_s() - whole.begun_s
        self._tell(EventKind.PLACE_WHOLE, place=make_place(whole.placement), took_s=took_s)
        others = tuple(one for one in self._tries if one is not whole)
        return FailoverResult(placement=whole.landed, nodes=whole.doing.result(), others=others)

    def _note_failure(self, one: Launch) -> None:
        """Raises what is no cloud's answer: a cluster taken down meanwhile, a spent budget, a fault of ours."""
        error = one.doing.exception()
        if not isinstance(error, CloudError):
            assert error is not None, "only tries that failed come here"
            raise error
        place, took_s = make_place(one.placement), self._clock.now_s() - one.begun_s
        cloud, region = one.cloud.name, one.placement.offer.region
        if isinstance(error, DeniedError) and error.scope != "cloud":
            self._lasting[_name_region(one.placement)] = error
            self._tell(EventKind.REGION_SKIPPED, cloud=cloud, region=region, error=error.message)
        elif isinstance(error, AuthError):
            self._lasting[one.cloud.name] = error
            self._tell(EventKind.CLOUD_SKIPPED, cloud=cloud, error=error.message)
        elif isinstance(error, InvalidRequestError):
            self._lasting[describe(one.placement)] = error
            self._refused.setdefault((one.cloud.name, error.message), []).extend(split_zones(one.placement))
            self._tell(EventKind.PLACE_SKIPPED, place=place, error=error.message)
        else:
            landed, asked = one.landed, split_zones(one.placement)
            self._last_answer = error
            self._note_reason(landed, error.message)
            self._remembered.discard((one.cloud.name, error.message))
            self._hints.update(dict.fromkeys(error.hints))
            self._memory.refuse(landed, error, is_region_wide=one.is_doubtful)
            self._keep_in_mind(one.rank, landed)
            if rest := [each for each in asked if each not in split_zones(landed)]:
                self._candidates.put_back(one.rank, unite_zones(rest))  # nothing was found out about these
            self._memory.note_failed_call(one.cloud.name)
            self._tell(EventKind.PLACE_REFUSED, place=place, took_s=took_s, error=error.message)

    def _note_reason(self, placement: Placement, reason: str) -> None:
        self._has_temporary = True
        self._refused.setdefault((placement.offer.cloud, reason), []).extend(split_zones(placement))

    def _tell_alone(self) -> None:
        """Once: while the only place that is left fails, nobody should wonder what is waited for."""
        if self._is_exhausted and not self._is_alone_told and all(one.is_in_doubt for one in self._tries):
            self._is_alone_told = True
            regions = sorted({f"{one.placement.offer.region} ({one.cloud.name})" for one in self._tries})
            self._tell(EventKind.LAST_PLACES, regions=regions)

    def _tell_begin(self, one: Launch, late: Sequence[Launch]) -> None:
        place, usd_hour = make_place(one.placement), one.placement.usd_hour
        if not late or one.is_resumed:
            self._tell(EventKind.PLACE_ASKED, place=place, usd_hour=usd_hour, is_resumed=one.is_resumed)
            return
        first = min(late, key=lambda each: each.rank)
        self._tell(
            EventKind.PLACE_HEDGED,
            place=place,
            usd_hour=usd_hour,
            late=make_place(first.placement),
            late_s=None if first.is_doubtful else self._clock.now_s() - first.begun_s,
            at_stake_usd_hour=sum(each.placement.usd_hour for each in self._tries if not each.is_ending),
        )

    def _tell(self, kind: EventKind, **data: object) -> None:
        self._spec.on_event(make_event(kind, **data))

    def _explain(self) -> BrokerError:
        if self._lasting and not self._has_temporary:
            return next(iter(self._lasting.values()))
        told = {key: " (remembered, not asked again yet)" if key in self._remembered else "" for key in self._refused}
        details = [f"{_join(places)} ({key[0]}): {key[1]}{told[key]}" for key, places in self._refused.items()]
        details += [f"{name}: {error.message}" for name, error in self._lasting.items() if isinstance(error, AuthError)]
        if len(details) > REASONS_MAX:
            details[REASONS_MAX - 1 :] = [f"and {len(details) - REASONS_MAX + 1} more reasons"]
        hints = [*self._hints, *(hint for error in self._lasting.values() for hint in error.hints)]
        return CapacityError(
            f"no place would give {self._spec.cluster.name} its nodes now",
            scope="cloud",
            details=details,
            hints=(
                *list(dict.fromkeys(hints))[:HINTS_MAX],
                "`broker launch -r` asks until a place gives; or allow more regions.",
            ),
        )


class _Candidates:
    """Places in the plan's order, each looked at when its turn comes: a plan may hold thousands."""

    def __init__(self, placements: Iterable[Placement]) -> None:
        self._source: Iterator[tuple[int, Placement]] = enumerate(placements)
        self._ahead: list[tuple[int, Placement]] = []

    def take(self, zones: frozenset[tuple[str, str]]) -> tuple[int, Placement] | None:
        """The best place that is left, in none of `zones` if one of the next few is; None: there is none left."""
        if not zones:
            return self._ahead.pop(0) if self._ahead else next(self._source, None)
        self._ahead += islice(self._source, max(0, OTHER_ZONE_AMONG - len(self._ahead)))
        elsewhere = (i for i, (_, placement) in enumerate(self._ahead) if _name_zone(placement) not in zones)
        return self._ahead.pop(next(elsewhere, 0)) if self._ahead else None

    def put_back(self, rank: int, placement: Placement) -> None:
        self._ahead.insert(0, (rank, placement))


def _join(placements: Sequence[Placement]) -> str:
    """Places that said the same, on one line."""
    kinds: dict[str, dict[str, None]] = {}
    for each in placements:
        kind = f"{each.offer.instance_type} {'spot' if each.is_spot else 'on-demand'}"
        kinds.setdefault(kind, {})[each.offer.zone or each.offer.region] = None
    shown = [f"{kind} in {_shorten(list(zones))}" for kind, zones in kinds.items()]
    return f"{placements[0].node_count} x {_shorten(shown, '; ')}"


def _shorten(words: Sequence[str], separator: str = ", ") -> str:
    rest = len(words) - PLACES_MAX
    return separator.join(words[:PLACES_MAX]) + (f" and {rest} more" if rest > 0 else "")


def _name_region(placement: Placement) -> str:
    return f"{placement.offer.region} ({placement.offer.cloud})"


def _name_zone(placement: Placement) -> tuple[str, str]:
    offer = placement.offer
    return offer.cloud, offer.zone or offer.region
