"""Forward requests, streamed in both directions; retry elsewhere only before the client has received a byte.

A request that was sent and not answered is repeated if its method is idempotent, or if it asks for a generation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection

import aiohttp
from aiohttp import web
from yarl import URL

from broker.clock import Clock
from broker.frozen import frozen
from broker.serve.admission import Gate, KeyRefusal, find_key
from broker.serve.answers import (
    EVENT_STREAM,
    METER,
    asks_for_origins,
    begin_stream,
    find_target,
    is_forwardable,
    make_headers,
    make_request_headers,
    refuse,
    refuse_key,
)
from broker.serve.bodies import BodyReader, PassedBody
from broker.serve.data_path import WAIT_S_MAX, Counts, ReplicaQueue
from broker.serve.engines import EngineFacts
from broker.serve.files import Backend, Routing
from broker.serve.journal import CHAT, COMPLETIONS, StreamJournal, is_aborted, read_prompt
from broker.serve.losses import ClientGoneError, ReplicaLostError
from broker.serve.metering import CLIENT_GONE, LoadMeter, ResponseMeter
from broker.serve.routes import BackendRoute, RouteTable
from broker.serve.streams import PAUSE_S, TokenStream
from broker.serve.tries import Tries
from broker.serve.websockets import connect_websocket, is_websocket, join_websockets

IN_FLIGHT_MAX = 20_000
# Of connections: a zone may take most of many replicas with it, and each that refuses is out of rotation at once.
CONNECTIONS_MAX = 20
# A shorter response is read whole: its headers and body leave in one packet, and it can be retried until then.
WHOLE_BODY_BYTES_MAX = 64 << 10
FAILURE_MAX = 300  # characters of the reason that clients are told
PREFLIGHTS_MAX = 100  # at the same time: anyone can send them
IDEMPOTENT = frozenset(("GET", "HEAD", "OPTIONS", "PUT", "DELETE"))
BUSY = frozenset((429, 503))  # the replica did not take the request
GENERATION_PATHS = (
    *(COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/v1/embeddings", "/generate", "/generate_stream"),
)


@frozen
class PassLimits:
    """Restrictions of a proxy in front of a router or behind one.

    `paths`: the only ones that are passed on; None: all. `continues`: whether a stream may continue on another replica.
    `waits`: whether a request waits for a replica; otherwise its sender chose it, and chooses another if it is lost.
    """

    paths: Collection[str] | None = None
    continues: bool = True
    waits: bool = True


NO_LIMITS = PassLimits()


class Proxy:
    """Handle the requests of all clients; `wake` is called when a replica becomes ready."""

    session: aiohttp.ClientSession  # set before the first request

    def __init__(
        self,
        table: RouteTable,
        routing: Routing,
        gate: Gate,
        *,
        clock: Clock,
        draw: random.Random,
        limits: PassLimits = NO_LIMITS,
    ) -> None:
        self._limits = limits
        self.counts = Counts()
        self._preflights = 0
        self._queue = ReplicaQueue(self.counts, clock=clock)
        self.adopt(routing)
        self.gate = gate
        self.engines = EngineFacts()
        self.meter = LoadMeter(clock=clock)
        self.table = table
        self.bodies = BodyReader()
        self._clock = clock
        self._draw = draw

    def adopt(self, routing: Routing) -> None:
        """Act on another routing file."""
        self.routing = routing
        self._queue.adopt(routing)
        self._timeout = aiohttp.ClientTimeout(total=None, sock_read=routing.stream_timeout_s)

    def wake(self) -> None:
        """Make waiting requests look for a replica again."""
        self._queue.wake()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. It is cancelled when its client leaves, and so is the request to the replica."""
        counts = self.counts
        key = self.gate.admit(find_key(request.headers))
        if isinstance(key, KeyRefusal):
            if self.gate.passes_preflights and asks_for_origins(request):
                return await self._forward_preflight(request)
            return refuse_key(key)
        counts.arrivals += 1  # refused ones are no load: they must not add replicas
        if refusal := self._check(request):
            return refusal
        request[METER] = meter = ResponseMeter(clock=self._clock)
        counts.in_flight += 1
        status: int | None = None
        try:
            answer = await self._route(request)
            status = answer.status
            return answer
        except ClientGoneError:
            return web.Response(status=CLIENT_GONE)
        except Exception:
            status = 500  # aiohttp's response to an error that is not handled
            raise
        finally:
            counts.in_flight -= 1
            sample = meter.end(status=status, prompt_bytes=request.content_length or 0)
            self.meter.add(sample)
            if key is not None:
                self.gate.charge(key, sample.prompt_tokens, sample.completion_tokens)

    def _check(self, request: web.BaseRequest) -> web.Response | None:
        """Return the response to a request that is not passed on."""
        if self.counts.in_flight >= IN_FLIGHT_MAX:
            return refuse(429, "too many requests", retry_s=1)
        if not is_forwardable(request):
            return refuse(400, "the target of the request must be a path")
        if self._limits.paths is not None and request.path not in self._limits.paths:
            return refuse(404, f"`balancer: {{type: {self.routing.balancer}}}` does not pass on {request.path[:100]}")
        return None

    async def _forward_preflight(self, request: web.BaseRequest) -> web.StreamResponse:
        """Forward a browser's CORS preflight to a ready replica; do not start one for it."""
        if self._preflights >= PREFLIGHTS_MAX:
            return refuse(429, "too many requests", retry_s=1)
        if refusal := self._check(request):
            return refusal
        self._preflights += 1
        request[METER] = ResponseMeter(clock=self._clock)
        try:
            return await self._forward(request, b"", b"", waits=False)
        except ClientGoneError:
            return web.Response(status=CLIENT_GONE)
        finally:
            self._preflights -= 1

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        if is_websocket(request):
            return await self._forward_websocket(request)
        is_generation = request.method == "POST" and request.path.endswith(GENERATION_PATHS)
        body = await self.bodies.read(request, is_generation=is_generation)
        try:
            return await self._forward_body(request, body)
        except (ClientGoneError, asyncio.CancelledError):
            if is_generation:  # a replica may have computed its prompt; the bytes of other requests are no tokens
                request[METER].leave()
            raise
        finally:
            self.bodies.release(body)

    async def _forward_body(self, request: web.BaseRequest, body: bytes | PassedBody) -> web.StreamResponse:
        prompt = read_prompt(body) if self.routing.balancing == "prefix_affinity" and isinstance(body, bytes) else b""
        seed, has_keys = self._draw.getrandbits(31), self.gate.has_keys
        journal = (
            StreamJournal.open(request.method, request.path, body, seed=seed, is_metered=has_keys)
            if isinstance(body, bytes) and self._limits.waits
            else None
        )
        if journal is None:
            return await self._forward(request, body, prompt)
        if not self._limits.continues:
            journal.stop_requesting_ids()
        if has_keys:
            journal.request_usage()
        return await TokenStream(self, request, journal, prompt).run()

    async def _forward(
        self, request: web.BaseRequest, body: bytes | PassedBody, prompt: bytes, *, waits: bool = True
    ) -> web.StreamResponse:
        tries = self._begin_tries()
        for _ in range(CONNECTIONS_MAX):
            is_waiting = waits and tries.refusal is None
            route = await self.find(tries.tried, prompt, waits=is_waiting, deadline_s=tries.deadline_s)
            if route is None:
                break
            tries.tried.add(route.backend.number)
            try:
                with route.use():
                    response = await self.send(route, request, find_target(request), body)
                    async with response:
                        if not self._is_refused(request, body, response.status) or not self._has_other(tries.tried):
                            return await self.copy(request, route, response)
                        tries.add_refusal(await self.keep_refusal(request, route, response))
            except ReplicaLostError as error:
                if not self._may_repeat(request, body, was_sent=error.was_sent):
                    return refuse(502, str(error))
                if failure := await self._outlive(tries, error):
                    return failure
            if tries.are_used_up:
                break
        return tries.refusal or self.refuse_unready()

    def _begin_tries(self) -> Tries:
        return Tries(self._clock, wait_s_max=WAIT_S_MAX if self._limits.waits else 0.0)

    async def _forward_websocket(self, request: web.BaseRequest) -> web.StreamResponse:
        tries = self._begin_tries()
        for _ in range(CONNECTIONS_MAX):
            route = await self.find(tries.tried, waits=tries.refusal is None, deadline_s=tries.deadline_s)
            if route is None:
                break
            tries.tried.add(route.backend.number)
            try:
                with route.use():
                    found = await connect_websocket(
                        request, self.table, route, self.session, has_keys=self.gate.has_keys
                    )
                    if isinstance(found, aiohttp.ClientWebSocketResponse):
                        return await join_websockets(request, found)
                tries.add_refusal(found)
                if found.status not in BUSY or tries.are_used_up:
                    break
            except ReplicaLostError as error:
                if failure := await self._outlive(tries, error):
                    return failure
        return tries.refusal or self.refuse_unready()

    async def _outlive(self, tries: Tries, error: ReplicaLostError) -> web.Response | None:
        """Return the response to a request whose replica is lost, or None if it is sent again, perhaps after a pause.

        The request then waits for a replica, because it is safe to repeat: a zone may take all of them at once.
        """
        if not error.was_sent:
            return None
        tries.add_loss()
        if tries.are_used_up:
            return tries.refusal or refuse(502, str(error))
        if self._has_other(tries.tried):
            return None
        if error.is_alive:
            return tries.refusal or refuse(502, str(error))
        await self._clock.sleep(PAUSE_S * 2 ** (tries.sent - 1))
        return None

    async def send(
        self, route: BackendRoute, request: web.BaseRequest, path: str, body: bytes | PassedBody
    ) -> aiohttp.ClientResponse:
        """Send a request. Raises ReplicaLostError, and ClientGoneError if its body ends early."""
        headers = make_request_headers(request, has_keys=self.gate.has_keys)
        if isinstance(body, PassedBody) and request.content_length is not None:
            headers["content-length"] = str(request.content_length)
        if request.path.endswith(GENERATION_PATHS):  # events and `usage` are read on the way
            headers["accept-encoding"] = "identity"
        data = (body or None) if isinstance(body, bytes) else body.read()
        url = URL(route.base_url + path, encoded=True)  # as the client wrote it
        meter = request[METER]
        was_sent, meter.is_sent = meter.is_sent, True
        try:
            return await self.session.request(
                request.method, url, headers=headers, data=data, timeout=self._timeout, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            meter.is_sent = was_sent
            self.table.exclude(route, f"the connection failed: {error}")
            raise ReplicaLostError("the replica refused the connection", was_sent=False) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(body, PassedBody) and body.is_broken:  # not the replica's fault
                raise ClientGoneError from error
            self.table.record_break(route, "no response", error)
            is_alive = isinstance(error, aiohttp.ServerTimeoutError)
            raise ReplicaLostError("the replica did not respond", is_alive=is_alive) from None

    async def copy(
        self, request: web.BaseRequest, route: BackendRoute, response: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Pass a response on. Raises ReplicaLostError as long as nothing was, and ClientGoneError."""
        return await self._copy_whole(request, route, response) or await self._copy(request, route, response)

    async def keep_refusal(
        self, request: web.BaseRequest, route: BackendRoute, response: aiohttp.ClientResponse
    ) -> web.Response:
        """Return the response of a busy or failed replica, to be forwarded if no other replica succeeds.

        A long one is replaced by a short one with the same status. Raises ReplicaLostError.
        """
        whole = await self._copy_whole(request, route, response)
        return whole or refuse(response.status, f"the replica answered with {response.status}", retry_s=1)

    async def _copy_whole(
        self, request: web.BaseRequest, route: BackendRoute, response: aiohttp.ClientResponse
    ) -> web.Response | None:
        """Return a short response, read to its end; None for another one. Raises ReplicaLostError if it breaks off."""
        length = response.content_length
        if length is None or length > WHOLE_BODY_BYTES_MAX or response.content_type == EVENT_STREAM:
            return None
        try:
            body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.table.record_break(route, "a response broke off", error)
            is_alive = isinstance(error, aiohttp.ServerTimeoutError)
            raise ReplicaLostError("the replica broke its response off", is_alive=is_alive) from None
        self.table.record_whole(route)
        if response.status == 200 and request.path.endswith((COMPLETIONS, CHAT)) and is_aborted(body):
            raise ReplicaLostError("the engine ended the request")
        meter = request[METER]
        meter.begin(route.backend.number, response.content_type)
        meter.feed(body)
        return web.Response(
            status=response.status, reason=response.reason, headers=make_headers(route, response), body=body
        )

    async def _copy(
        self, request: web.BaseRequest, route: BackendRoute, response: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Copy a response as it arrives; if the replica breaks off, the client's connection is closed as well."""
        answer = await begin_stream(request, response, make_headers(route, response))
        meter = request[METER]
        meter.begin(route.backend.number, response.content_type)
        content = response.content.iter_any()
        while True:
            try:
                data = await anext(content, None)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._break_off(request, route, error)
                return answer
            try:
                if data is None:
                    self.table.record_whole(route)
                    await answer.write_eof()
                    return answer
                meter.feed(data)
                await answer.write(data)
            except (OSError, aiohttp.ClientError) as error:
                raise ClientGoneError from error

    def _break_off(self, request: web.BaseRequest, route: BackendRoute, error: BaseException) -> None:
        self.counts.broken += 1
        self.table.record_break(route, "a response broke off", error)
        if request.transport is not None:
            request.transport.abort()  # so that the client does not take a partial response for a complete one

    async def find(
        self,
        tried: set[int],
        prompt: bytes = b"",
        *,
        waits: bool = True,
        like: Backend | None = None,
        deadline_s: float | None = None,
    ) -> BackendRoute | None:
        """Return a ready replica that was not tried, waiting for one if none is ready; None after a minute."""
        deadline_s = self._clock.now_s() + WAIT_S_MAX if deadline_s is None else deadline_s
        while True:
            route = self.table.choose(but=tried, balancing=self.routing.balancing, prefix=prompt, like=like)
            if route is None and tried:
                route = self.table.choose(balancing=self.routing.balancing, prefix=prompt, like=like) if waits else None
            if route is not None or not waits or not await self._queue.wait(deadline_s):
                return route

    def _has_other(self, tried: set[int]) -> bool:
        return self.table.choose(but=tried) is not None

    def _is_refused(self, request: web.BaseRequest, body: object, status: int) -> bool:
        """Return whether another replica may succeed: the engine of this one is busy, failed or being terminated."""
        is_failed = status >= 500 and request.method == "POST" and request.path.endswith(GENERATION_PATHS)
        return isinstance(body, bytes) and (status in BUSY or is_failed)

    def _may_repeat(self, request: web.BaseRequest, body: object, *, was_sent: bool) -> bool:
        if not was_sent:
            return True
        return isinstance(body, bytes) and (request.method in IDEMPOTENT or request.path.endswith(GENERATION_PATHS))

    def refuse_unready(self) -> web.Response:
        """Make the response to a request for which no replica is ready."""
        if self._queue.failure:
            return refuse(503, f"the service was given up: {self._queue.failure[:FAILURE_MAX]}")
        return (
            refuse(429, "too many requests wait for a replica", retry_s=5)
            if self._queue.is_full
            else refuse(503, "no replica is ready", retry_s=10)
        )
