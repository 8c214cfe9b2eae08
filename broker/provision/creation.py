"""Call a cloud's `create_nodes` for a launch until it answers, always with the same token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

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
)
from broker.provision.launch import Launch, LaunchSpec, LaunchState, make_down_error, retrieve_failure
from broker.provision.listing import Lister
from broker.provision.refusals import UnavailableOffers, draw_backoff_s
from broker.state.store import Store
from broker.types import Node, NodeRequest
from broker.types.outcomes import EventKind, make_event
from broker.wording import make_place

CREATE_TRIES_MAX = 6
UNCLEAR_S_MAX = 60.0  # a placement whose calls remain unanswered for longer is abandoned
ANSWER_S_MAX = 300.0  # longer than the timeout of any SDK: after that, a call counts as unanswered
ANSWER_GRACE_S = 60.0  # a launch that is released during a call waits this long for the answer
REFUSED = (CapacityError, QuotaError, AuthError, InvalidRequestError)  # answers that mean that nothing was created


class NodeCreator:
    """Make the create calls of launches; scenarios 1 to 5 of `launch.py`."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        lister: Lister,
        offers: UnavailableOffers,
        write_boot: Callable[[NodeRequest], str],
    ) -> None:
        self._store = store
        self._clock = clock
        self._lister = lister
        self._offers = offers
        self._write_boot = write_boot

    async def create(self, launch: Launch, spec: LaunchSpec) -> Sequence[Node]:
        """Call the cloud until it creates the nodes or refuses, always with the same token.

        Raises the refusal; ThrottledError or TransientError at the limits of scenarios 3 and 4.
        """
        cloud, place = launch.cloud, make_place(launch.placement)
        request = replace(launch.request, boot=self._write_boot(launch.request))
        last: CloudError
        for tries in range(CREATE_TRIES_MAX):
            try:
                await self._note_account(launch)
                if not self._store.intents.is_open(request.token):
                    raise make_down_error(request.cluster)
                if tries:
                    spec.check_budget()
                return await self._call(launch, request)
            except (ThrottledError, TransientError) as error:
                last = error
                self._offers.note_failed_call(cloud.name)
                if self._offers.measure_wait_s(cloud.name):
                    break  # the cloud's retry budget, shared by all jobs, is used up
                wait_s = draw_backoff_s(tries)
                next_s = wait_s if tries + 1 < CREATE_TRIES_MAX else None
                spec.on_event(make_event(EventKind.CALL_FAILED, place=place, error=error.message, wait_s=next_s))
                if isinstance(error, TransientError):
                    launch.note_unclear()
                await self._clock.sleep(wait_s)
            except UnknownOutcomeError as error:
                last = error
                launch.enter(LaunchState.UNKNOWN, self._clock.now_s())
                self._offers.note_failed_call(cloud.name)
                spec.on_event(make_event(EventKind.CALL_UNCLEAR, place=place, error=error.message))
                launch.note_unclear()
                adopted = await self._find_created(cloud, launch.request)
                if len(adopted) == launch.placement.node_count:
                    return adopted
                if self._clock.now_s() - launch.begun_s >= UNCLEAR_S_MAX:
                    break
        kind = ThrottledError if isinstance(last, ThrottledError) else TransientError
        calls = f"{tries + 1} call{'s' if tries else ''}"
        raise kind(f"no clear answer from {cloud.name} to {calls}; last error: {last.message}", hints=last.hints)

    async def _call(self, launch: Launch, request: NodeRequest) -> Sequence[Node]:
        """Make the call in a separate task: a released launch stops waiting, but the answer still arrives.

        Raises UnknownOutcomeError after `ANSWER_S_MAX` without an answer.
        """
        create = launch.cloud.create_nodes(replace(request, account=launch.request.account))
        call = launch.call = asyncio.ensure_future(create)
        call.add_done_callback(retrieve_failure)
        if not await self._is_done_within(call, ANSWER_S_MAX):
            call.cancel()
            raise UnknownOutcomeError(f"no answer from {launch.cloud.name} for {ANSWER_S_MAX:g} s")
        return call.result()

    async def _note_account(self, launch: Launch) -> None:
        """Record the account in the intent before a call, because lists of another account are no evidence afterwards.

        Raises AccountError if an earlier process used this token in another account.
        """
        if not isinstance(launch.cloud, HasAccounts):
            return
        account, noted = await launch.cloud.find_account(), launch.request.account
        cloud, cluster = launch.cloud.name, launch.request.cluster
        if noted and noted != account:
            raise AccountError(
                f"the launch of {cluster} began in {cloud} account {noted}, but the current login is for {account}",
                hints=(f"log in to {noted} (`broker check {cloud}` shows the current login) and try again",),
            )
        if not noted:
            launch.request = replace(launch.request, account=account)
            self._store.intents.note_account(launch.request.token, account)

    async def _find_created(self, cloud: Cloud, request: NodeRequest) -> Sequence[Node]:
        """Return the nodes with this token once lists show the whole gang.

        If they do not, return those that are listed after lists have settled.
        """
        start_s = self._clock.now_s()
        while True:
            listed = (await self._lister.list(cloud)).by_token.get(request.token, [])
            is_whole = len(listed) == request.placement.node_count
            if is_whole or self._clock.now_s() - start_s >= cloud.settle_s:
                return listed
            await self._clock.sleep(min(1.0, cloud.settle_s))

    async def await_answer(self, launch: Launch, call: asyncio.Task[Sequence[Node]]) -> CloudError | None:
        """Wait for the answer, record its nodes, and return the error if it is a refusal. Silence proves nothing."""
        if not await self._is_done_within(call, ANSWER_GRACE_S):
            call.cancel()
            await asyncio.wait([call])
        if call.cancelled():
            return None
        error = call.exception()
        if error is None:
            launch.nodes = launch.nodes or tuple(call.result())
        return error if isinstance(error, REFUSED) else None

    async def _is_done_within(self, call: asyncio.Task[Sequence[Node]], limit_s: float) -> bool:
        """Return whether the call has ended within the limit; it is not cancelled."""
        timer = asyncio.ensure_future(self._clock.sleep(limit_s))
        try:
            await asyncio.wait({call, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        return call.done()
