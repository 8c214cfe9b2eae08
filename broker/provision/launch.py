"""One place asked for one gang: intent, create, whole gang or nothing. A try can be given back at any moment.

An intent is committed before each create call; its token makes a repeat harmless; an unknown outcome is looked up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from broker.clock import Clock
from broker.clouds.base import Cloud, HasAccounts
from broker.errors import (
    AccountError,
    AuthError,
    CapacityError,
    CloudError,
    InvalidRequestError,
    QuotaError,
    ThrottledError,
    TransientError,
    UnknownOutcomeError,
    UsageError,
)
from broker.nouns import noun
from broker.provision.backoff import draw_backoff_s
from broker.provision.hedge_timer import Answer, HedgeTimer
from broker.provision.listing import Lister
from broker.provision.naming import describe, make_token
from broker.provision.nodes import confirm_gone, measure_left_s, wait_running
from broker.provision.refusals import UnavailableOffers, find_intent_end
from broker.provision.zones import find_landed
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, MachineSpec, Node, NodeEnd, NodeRequest, Placement
from broker.types.outcomes import Event, EventKind, IntentEnd, make_event
from broker.wording import make_place

__all__ = ["Launch", "LaunchSpec", "Launcher", "describe", "make_token"]

CREATE_TRIES_MAX = 6
UNCLEAR_MIN = 2  # failed calls without a reason that put the region in doubt
UNCLEAR_S_MAX = 60.0  # a place whose answers stay unclear for so long is given up
ANSWER_S_MAX = 300.0  # longer than any SDK waits by itself: after that a call is believed to get no answer
ANSWER_GRACE_S = 60.0  # a place given back while its call is under way: so long for the answer that names its nodes
HEDGE = 2
REFUSED = (CapacityError, QuotaError, AuthError, InvalidRequestError)  # answers that say: nothing was made


@noun
class LaunchSpec:
    """What `up` was asked for, apart from where.

    `hedge`: places that may be asked at once. `check_budget` is called before each call that may cost money, and
    raises what ends the search.
    """

    cluster: Cluster
    make_spec: Callable[[Placement], MachineSpec]
    timeout_s: float
    on_event: Callable[[Event], None]
    hedge: int = HEDGE
    check_budget: Callable[[], None] = lambda: None


@dataclass(kw_only=True, eq=False)
class Launch:
    """What one place was asked, since when, and what it has made so far."""

    cloud: Cloud
    request: NodeRequest
    rank: int  # in the plan's order: 0 is best
    is_resumed: bool
    begun_s: float
    created_s: float | None = None
    unclear_count: int = 0  # calls of it that failed, and nobody knows why
    is_throttled: bool = False  # it was given up for that
    is_ending: bool = False  # nothing more is asked for: what it may have made is looked for and ended
    on_change: Callable[[], None] = lambda: None  # heard when one of these changes
    nodes: tuple[Node, ...] = ()
    call: asyncio.Task[Sequence[Node]] | None = None
    doing: asyncio.Task[Sequence[Node]] = field(init=False)

    @property
    def placement(self) -> Placement:
        return self.request.placement

    @property
    def is_doubtful(self) -> bool:
        """Whether its whole region may be at fault: one failed call may be a blip, or that zone's."""
        return self.unclear_count >= UNCLEAR_MIN or self.is_throttled

    @property
    def is_in_doubt(self) -> bool:
        return self.is_doubtful and self.created_s is None

    def note_unclear(self) -> None:
        self.unclear_count += 1
        self.on_change()

    def note_end(self, error: CloudError) -> None:
        self.is_ending, self.is_throttled = True, isinstance(error, ThrottledError)
        self.on_change()

    @property
    def landed(self) -> Placement:
        """Where its nodes stand, once there are any: in one zone of those that were asked."""
        return find_landed(self.placement, self.nodes)

    def cancel(self) -> Sequence[asyncio.Task[Sequence[Node]]]:
        """As when this process ends: its intent stays open for whoever comes next."""
        tasks = [self.doing] if self.call is None else [self.doing, self.call]
        for task in tasks:
            task.cancel()
        return tasks


class Launcher:
    """Begins tries, sees them to their end, and ends what they made."""

    def __init__(
        self,
        clouds: Mapping[str, Cloud],
        store: Store,
        *,
        clock: Clock,
        owner: str,
        lister: Lister,
        memory: UnavailableOffers,
        hedge_timer: HedgeTimer,
        write_boot: Callable[[NodeRequest], str],
    ) -> None:
        self._clouds = clouds
        self._store = store
        self._clock = clock
        self._owner = owner
        self._lister = lister
        self._memory = memory
        self._hedge_timer = hedge_timer
        self._write_boot = write_boot

    def begin(
        self, spec: LaunchSpec, placement: Placement, *, rank: int, is_first: bool = False, is_addition: bool = False
    ) -> Launch:
        """Commit what is about to be made, then ask. An intent left open by a crash is taken up, token and all.

        `is_addition`: to a cluster that is up, whose record stays as it is.

        Raises what `wanted.check_budget` raises, and UsageError when the cluster was taken down since the first try.
        """
        known = self.find_intent(spec.cluster, placement)
        if known is None:
            spec.check_budget()
        one = Launch(
            cloud=self._clouds[placement.offer.cloud],
            request=known or self._open_intent(spec, placement, is_first=is_first, is_addition=is_addition),
            rank=rank,
            is_resumed=known is not None,
            begun_s=self._clock.now_s(),
        )
        one.doing = asyncio.ensure_future(self._see_through(one, spec))
        one.doing.add_done_callback(_forget_failure)
        return one

    def find_intent(self, cluster: Cluster, placement: Placement) -> NodeRequest | None:
        requests = [intent.request for intent in self._store.intents.list_open(cluster.name)]
        same = (each for each in requests if each.placement == placement and each.attempt == cluster.attempt)
        return next(same, None)

    async def give_back(self, one: Launch) -> Sequence[Node]:
        """End what this try made, confirm it, and return it. A call under way is heard out: its nodes must be known.

        Raises TransientError where the cloud does not confirm; the intent stays open for the collector.
        """
        one.doing.cancel()
        await asyncio.wait([one.doing])
        refusal = await self._hear_out(one, one.call) if one.call is not None else None
        is_asked = one.call is not None or one.is_resumed
        if one.is_resumed or one.nodes or (is_asked and refusal is None):
            is_left = one.nodes or self._store.intents.is_open(one.request.token)
            return await self.terminate(one.cloud, one.request, known=one.nodes) if is_left else ()
        if refusal is None:
            self._store.intents.close(one.request.token, IntentEnd.NEVER_ASKED)
        else:
            self._store.intents.close(one.request.token, find_intent_end(refusal), refusal.message)
        return ()

    async def _hear_out(self, one: Launch, call: asyncio.Task[Sequence[Node]]) -> CloudError | None:
        """The refusal, if that was the answer; the nodes of another one are noted. Silence proves nothing."""
        if not await self._is_done_within(call, ANSWER_GRACE_S):
            call.cancel()
            await asyncio.wait([call])
        if call.cancelled():
            return None
        error = call.exception()
        if error is None:
            one.nodes = one.nodes or tuple(call.result())
        return error if isinstance(error, REFUSED) else None

    async def terminate(self, cloud: Cloud, request: NodeRequest, *, known: Sequence[Node] = ()) -> Sequence[Node]:
        """End whatever this intent made, confirm it, and only then close the intent; returns what was made."""
        request = self._store.intents.get_request(request.token) or request  # its account may be known since
        known = known or self._store.intents.list_nodes(request.token)
        gone = await confirm_gone(
            cloud,
            self._lister,
            known=known,
            is_ours=lambda node: node.token == request.token,
            expected_count=request.placement.node_count,
            places={(request.account, request.placement.offer.region)},
            clock=self._clock,
        )
        with self._store.transaction():
            self.record(gone)
            self._store.intents.close(request.token, IntentEnd.TERMINATED)
        return gone

    def record(self, nodes: Sequence[Node]) -> None:
        with self._store.transaction():
            for node in nodes:
                self._store.bills.record(node)

    def _open_intent(self, spec: LaunchSpec, placement: Placement, *, is_first: bool, is_addition: bool) -> NodeRequest:
        cluster = spec.cluster
        serial = self._store.intents.count_closed(cluster.name)
        request = NodeRequest(
            owner=self._owner,
            cluster=cluster.name,
            attempt=cluster.attempt,
            token=make_token(f"{self._owner}{self._store.meta.salt}", cluster.name, cluster.attempt, placement, serial),
            placement=placement,
            spec=spec.make_spec(placement),
            # A gang is of one account: a login for another one cannot see, and not end, what is there already.
            account=next((node.account for node in cluster.nodes if node.account), "") if is_addition else "",
        )
        with self._store.transaction():
            current = self._store.clusters.get(cluster.name)
            is_ours = is_first if current is None else current.created_s == cluster.created_s
            if not is_ours or (current and current.status is ClusterStatus.TERMINATING):
                raise _make_down_error(cluster.name)
            self._memory.begin(placement)
            if not is_addition:
                self._store.clusters.put(replace(cluster, status=ClusterStatus.INIT, placement=placement, nodes=()))
            self._store.intents.put(request)
        return request

    async def _see_through(self, one: Launch, spec: LaunchSpec) -> Sequence[Node]:
        """The whole gang, running; else nothing is left of it and a CloudError says why."""
        one.nodes = tuple(await self._create(one, spec))
        one.created_s = self._clock.now_s()
        with self._store.transaction():
            self.record(one.nodes)
            self._store.intents.note_nodes(one.request.token, one.nodes)
        await self._end_unless_open(one)
        if len(one.nodes) < one.placement.node_count:  # the rest will not come; what came costs money
            await self.terminate(one.cloud, one.request, known=one.nodes)
            raise CapacityError(f"only {len(one.nodes)} of {one.placement.node_count} nodes were given", scope="zone")
        if not one.is_resumed:
            self._hedge_timer.note(one.cloud.name, Answer.CREATED, one.created_s - one.begun_s)
        nodes = await wait_running(
            one.cloud,
            self._lister,
            token=one.request.token,
            created=one.nodes,
            node_count=one.placement.node_count,
            timeout_s=measure_left_s(one.nodes, spec.timeout_s, self._clock) if one.is_resumed else spec.timeout_s,
            clock=self._clock,
            on_look=self.record,
        )
        if nodes is None:
            gone = await self.terminate(one.cloud, one.request, known=one.nodes)
            raise CapacityError(f"the gang did not come up whole: {_find_cause(gone, spec.timeout_s)}", scope="zone")
        await self._end_unless_open(one)
        if not one.is_resumed:
            self._hedge_timer.note(one.cloud.name, Answer.WHOLE, self._clock.now_s() - one.created_s)
        return nodes

    async def _end_unless_open(self, one: Launch) -> None:
        """Whoever took the cluster down, and closed this intent, may not have seen what was on its way."""
        if not self._store.intents.is_open(one.request.token):
            await self.terminate(one.cloud, one.request, known=one.nodes)
            raise _make_down_error(one.request.cluster)

    async def _create(self, one: Launch, spec: LaunchSpec) -> Sequence[Node]:
        """Ask until answered, always with the same token; what may have been made is ended before a refusal is told.

        Uncertain is a resumed try, whose earlier call may have worked, and one whose answer was lost.
        """
        request = one.request
        bootable = replace(request, boot=self._write_boot(request))
        is_uncertain, place = one.is_resumed, make_place(request.placement)
        last: CloudError
        try:
            for tries in range(CREATE_TRIES_MAX):
                try:
                    await self._note_account(one)
                    if not self._store.intents.is_open(request.token):
                        raise _make_down_error(request.cluster)
                    if tries:
                        spec.check_budget()
                    return await self._call(one, bootable)
                except (ThrottledError, TransientError) as error:
                    last = error
                    self._memory.note_failed_call(one.cloud.name)
                    if self._memory.measure_wait_s(one.cloud.name):
                        break  # all jobs together have asked too often
                    wait_s = draw_backoff_s(tries)
                    next_s = wait_s if tries + 1 < CREATE_TRIES_MAX else None
                    spec.on_event(make_event(EventKind.CALL_FAILED, place=place, error=error.message, wait_s=next_s))
                    if isinstance(error, TransientError):
                        one.note_unclear()
                    await self._clock.sleep(wait_s)
                except UnknownOutcomeError as error:
                    last = error
                    one.is_resumed = is_uncertain = True
                    self._memory.note_failed_call(one.cloud.name)
                    spec.on_event(make_event(EventKind.CALL_UNCLEAR, place=place, error=error.message))
                    one.note_unclear()
                    adopted = await self._look_for(one.cloud, request)
                    if len(adopted) == request.placement.node_count:
                        return adopted
                    if self._clock.now_s() - one.begun_s >= UNCLEAR_S_MAX:
                        break  # or it hangs
            kind = ThrottledError if isinstance(last, ThrottledError) else TransientError
            raise kind(
                f"{one.cloud.name} gave no clear answer in {tries + 1} tries, at last: {last.message}", hints=last.hints
            )
        except CloudError as error:
            if is_uncertain or not isinstance(error, REFUSED):
                spec.on_event(make_event(EventKind.PLACE_GIVEN_UP, place=place))
                one.note_end(error)
                await self.terminate(one.cloud, request)
            self._store.intents.close(request.token, find_intent_end(error), error.message)
            raise

    async def _call(self, one: Launch, request: NodeRequest) -> Sequence[Node]:
        """In a task of its own: a try that is given back stops waiting, while its answer is still on its way.

        Raises UnknownOutcomeError when there is none for too long.
        """
        call = one.call = asyncio.ensure_future(one.cloud.create_nodes(replace(request, account=one.request.account)))
        call.add_done_callback(_forget_failure)
        if not await self._is_done_within(call, ANSWER_S_MAX):
            call.cancel()
            raise UnknownOutcomeError(f"{one.cloud.name} has not answered for {ANSWER_S_MAX:g} s")
        return call.result()

    async def _note_account(self, one: Launch) -> None:
        """The intent names the account before anything can be made there: later lists of another prove nothing.

        Raises AccountError where an earlier process asked another account with this token.
        """
        if not isinstance(one.cloud, HasAccounts):
            return
        account, known = await one.cloud.find_account(), one.request.account
        if known and known != account:
            raise AccountError(
                f"{one.request.cluster} was begun in {one.cloud.name} account {known}, and this login is for {account}",
                hints=(f"Log in to {known} (`broker check {one.cloud.name}` shows the login in use) and try again.",),
            )
        if not known:
            one.request = replace(one.request, account=account)
            self._store.intents.note_account(one.request.token, account)

    async def _is_done_within(self, call: asyncio.Task[Sequence[Node]], limit_s: float) -> bool:
        """Whether it has ended by then; it goes on either way."""
        timer = asyncio.ensure_future(self._clock.sleep(limit_s))
        try:
            await asyncio.wait({call, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        return call.done()

    async def _look_for(self, cloud: Cloud, request: NodeRequest) -> Sequence[Node]:
        """Nodes carrying this token, waited for until the list has settled; a part or nothing: ask again."""
        start_s = self._clock.now_s()
        while True:
            found = (await self._lister.list(cloud)).by_token.get(request.token, [])
            is_whole = len(found) == request.placement.node_count
            if is_whole or self._clock.now_s() - start_s >= cloud.settle_s:
                return found
            await self._clock.sleep(min(1.0, cloud.settle_s))


def _find_cause(gone: Sequence[Node], timeout_s: float) -> str:
    """What the cloud says of nodes that ended before we ended them, or that the time was up."""
    causes = sorted({node.reason for node in gone} - {"", NodeEnd.TERMINATED, NodeEnd.MISSING})
    return f"a node ended by itself ({', '.join(causes)})" if causes else f"not all ran within {timeout_s:.0f} s"


def _make_down_error(name: str) -> UsageError:
    return UsageError(f"{name} was taken down while it came up")


def _forget_failure(done: asyncio.Task[Sequence[Node]]) -> None:
    """A failure that nobody waits for any more is nobody's."""
    if not done.cancelled():
        done.exception()
