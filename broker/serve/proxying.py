"""Forward requests, streamed in both directions; retry elsewhere only before the client has received a byte.

A request that was sent and not answered is repeated if its method is idempotent, or if it asks for a generation.
"""

from __future__ import annotations

import json
import random

import aiohttp
from aiohttp import web
from yarl import URL

from broker.clock import Clock
from broker.serve.admission import Gate, KeyRefusal
from broker.serve.answers import make_headers, pass_headers, refuse, refuse_key
from broker.serve.data_path import WAIT_S_MAX, Counts, ReplicaQueue
from broker.serve.engines import REFUSALS, EngineFacts
from broker.serve.files import Routing
from broker.serve.journal import CHAT, COMPLETIONS, EventParser, StreamJournal, read_prompt
from broker.serve.metering import LoadMeter, ResponseMeter
from broker.serve.routes import BackendRoute, RouteTable
from broker.serve.websockets import forward_websocket

CONNECT_S = 5.0
IN_FLIGHT_MAX = 20_000
EVENT_STREAM = "text/event-stream"
TRIES_MAX = 4
RESUMES_MAX = 20  # per stream
KEPT_BODY_BYTES_MAX = 4 << 20  # a longer body is streamed, and its request is not repeated
# A shorter response is read whole: its headers and body leave in one packet, and it can be retried until then.
WHOLE_BODY_BYTES_MAX = 64 << 10
IDEMPOTENT = frozenset(("GET", "HEAD", "OPTIONS", "PUT", "DELETE"))
METER = web.RequestKey("meter", ResponseMeter)
GENERATION_PATHS = (COMPLETIONS, CHAT, "/v1/embeddings", "/generate")


class _LostError(Exception):
    """The replica did not answer, or its response was interrupted."""


class _ClientGoneError(Exception):
    """The client closed the connection."""


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
    ) -> None:
        self.adopt(routing)
        self.counts = Counts()
        self.gate = gate
        self.engines = EngineFacts()
        self.meter = LoadMeter(clock=clock)
        self._table = table
        self._clock = clock
        self._draw = draw
        self._queue = ReplicaQueue(table, self.counts, clock=clock)

    def adopt(self, routing: Routing) -> None:
        """Act on another routing file."""
        self.routing = routing
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=routing.stream_timeout_s)

    def wake(self) -> None:
        """Make waiting requests look for a replica again."""
        self._queue.wake()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        counts = self.counts
        counts.arrivals += 1
        if counts.in_flight >= IN_FLIGHT_MAX:
            return refuse(429, "too many requests", retry_s=1)
        key = self.gate.admit(request.headers.get("authorization", ""))
        if isinstance(key, KeyRefusal):
            return refuse_key(key)
        counts.in_flight += 1
        request[METER] = meter = ResponseMeter(clock=self._clock)
        try:
            return await self._route(request)
        except _ClientGoneError:
            return web.Response(status=499)  # the client has left
        finally:
            counts.in_flight -= 1
            sample = meter.end(prompt_bytes=request.content_length or 0)
            self.meter.add(sample)
            if key is not None:
                self.gate.charge(key, sample.prompt_tokens, sample.completion_tokens)

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("upgrade", "").lower() == "websocket":
            route = await self._find(set())
            if route is None:
                return self._refuse_unready()
            return await forward_websocket(request, route, self.session, has_keys=self.gate.has_keys)
        body: bytes | aiohttp.StreamReader = request.content
        if request.can_read_body and (request.content_length or KEPT_BODY_BYTES_MAX + 1) <= KEPT_BODY_BYTES_MAX:
            try:
                body = await request.read()
            except (OSError, aiohttp.ClientError) as error:
                raise _ClientGoneError from error
        elif not request.can_read_body:
            body = b""
        prompt = read_prompt(body) if self.routing.balancing == "prefix_affinity" and isinstance(body, bytes) else b""
        seed = self._draw.getrandbits(31)
        journal = StreamJournal.open(request.method, request.path, body, seed=seed) if isinstance(body, bytes) else None
        if journal is not None:
            if self.gate.has_keys:
                journal.ask_usage()
            return await _Stream(self, request, journal, prompt).run()
        return await self._forward(request, body, prompt)

    async def _forward(
        self, request: web.BaseRequest, body: bytes | aiohttp.StreamReader, prompt: bytes
    ) -> web.StreamResponse:
        tried: set[int] = set()
        last: web.StreamResponse | None = None
        for _ in range(TRIES_MAX):
            route = await self._find(tried, prompt, waits=last is None)
            if route is None:
                return last or self._refuse_unready()
            tried.add(route.backend.number)
            self._start(route)
            try:
                response = await self._send(route, request, request.path_qs, body)
                async with response:
                    if response.status in (429, 503) and isinstance(body, bytes) and self._has_other(tried):
                        last = web.Response(
                            status=response.status, body=await response.read(), headers=pass_headers(response.headers)
                        )
                        continue
                    return await self._copy_whole(request, route, response) or await self._copy(
                        request, route, response
                    )
            except _LostError as error:
                last = refuse(502, str(error))
                if not self._may_repeat(request, body, was_refused=isinstance(error.__cause__, OSError)):
                    return last
            finally:
                route.in_flight -= 1
        return last or self._refuse_unready()

    async def _send(
        self, route: BackendRoute, request: web.BaseRequest, path: str, body: bytes | aiohttp.StreamReader
    ) -> aiohttp.ClientResponse:
        """Send a request. Raises _LostError, from an OSError if the connection was refused and nothing was sent."""
        headers = pass_headers(request.headers)
        headers.pop("content-length", None)
        if self.gate.has_keys:
            headers.popall("authorization", None)  # replicas do not receive the keys
        if isinstance(body, aiohttp.StreamReader) and request.content_length is not None:
            headers["content-length"] = str(request.content_length)
        remote, earlier = request.remote or "", headers.get("x-forwarded-for")
        headers["x-forwarded-for"] = f"{earlier}, {remote}" if earlier and remote else earlier or remote
        url = URL(route.base_url + path, encoded=True)  # as the client wrote it
        try:
            return await self.session.request(
                request.method, url, headers=headers, data=body or None, timeout=self._timeout, allow_redirects=False
            )
        except aiohttp.ClientConnectorError as error:
            self._table.exclude(route, f"the connection failed: {error}")
            raise _LostError("the replica refused the connection") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._table.record_break(route, f"no response: {str(error) or type(error).__name__}")
            raise _LostError("the replica did not respond") from None

    async def _copy_whole(
        self, request: web.BaseRequest, route: BackendRoute, response: aiohttp.ClientResponse
    ) -> web.Response | None:
        """Return a short response, read to its end; None for another one. Raises _LostError if it breaks off."""
        length = response.content_length
        if length is None or length > WHOLE_BODY_BYTES_MAX or response.content_type == EVENT_STREAM:
            return None
        try:
            body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._table.record_break(route, f"a response broke off: {str(error) or type(error).__name__}")
            raise _LostError("the replica broke its response off") from None
        meter = request[METER]
        meter.begin(route.backend.number, response.status, response.content_type)
        meter.feed(body)
        return web.Response(
            status=response.status, reason=response.reason, headers=make_headers(route, response), body=body
        )

    async def _copy(
        self, request: web.BaseRequest, route: BackendRoute, response: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Copy a response as it arrives; if the replica breaks off, the client's connection is closed as well."""
        answer = self.make_answer(route, response)
        try:
            await answer.prepare(request)
        except (OSError, aiohttp.ClientError) as error:
            raise _ClientGoneError from error
        meter = request[METER]
        meter.begin(route.backend.number, response.status, response.content_type)
        content = response.content.iter_any()
        while True:
            try:
                data = await anext(content, None)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._break_off(request, route, error)
                return answer
            try:
                if data is None:
                    await answer.write_eof()
                    return answer
                meter.feed(data)
                await answer.write(data)
            except (OSError, aiohttp.ClientError) as error:
                raise _ClientGoneError from error

    def make_answer(self, route: BackendRoute, response: aiohttp.ClientResponse) -> web.StreamResponse:
        """Make the response to the client, with the service's version in a header."""
        return web.StreamResponse(status=response.status, reason=response.reason, headers=make_headers(route, response))

    def _break_off(self, request: web.BaseRequest, route: BackendRoute, error: BaseException) -> None:
        self.counts.broken += 1
        self._table.record_break(route, f"a response broke off: {str(error) or type(error).__name__}")
        if request.transport is not None:
            request.transport.abort()  # so that the client does not take a partial response for a complete one

    async def _find(
        self, tried: set[int], prompt: bytes = b"", *, waits: bool = True, version: int | None = None
    ) -> BackendRoute | None:
        """Return a ready replica that was not tried, waiting for one if none is ready; None after a minute."""
        deadline_s = self._clock.now_s() + WAIT_S_MAX
        while True:
            route = self._table.choose(but=tried, balancing=self.routing.balancing, prefix=prompt, version=version)
            if route is None and tried:
                route = self._table.choose(balancing=self.routing.balancing, prefix=prompt) if waits else None
            if route is not None or not waits or not await self._queue.wait(deadline_s):
                return route

    def _has_other(self, tried: set[int]) -> bool:
        return self._table.choose(but=tried) is not None

    def _start(self, route: BackendRoute) -> None:
        route.in_flight += 1

    def _may_repeat(self, request: web.BaseRequest, body: object, *, was_refused: bool) -> bool:
        if not isinstance(body, bytes):
            return False
        return was_refused or request.method in IDEMPOTENT or request.path.endswith(GENERATION_PATHS)

    def _refuse_unready(self) -> web.Response:
        return (
            refuse(429, "too many requests wait for a replica", retry_s=5)
            if self._queue.is_full
            else refuse(503, "no replica is ready", retry_s=10)
        )


class _Stream:
    """One stream of events, over as many replicas as necessary."""

    def __init__(self, proxy: Proxy, request: web.BaseRequest, journal: StreamJournal, prompt: bytes) -> None:
        self._proxy, self._request, self._journal, self._prompt = proxy, request, journal, prompt
        self._answer: web.StreamResponse | None = None

    async def run(self) -> web.StreamResponse:
        """Follow the stream to its end."""
        meter = self._request[METER]
        try:
            return await self._run()
        finally:
            meter.settle(*self._journal.counts)

    async def _run(self) -> web.StreamResponse:
        tried: set[int] = set()
        version: int | None = None  # another one may be another model
        for turn in range(RESUMES_MAX):
            route = await self._proxy._find(tried, self._prompt, version=version)
            if route is None:
                break
            version = route.backend.version if version is None else version
            if turn and self._answer is not None:
                self._proxy.counts.resumed += 1
            tried = {route.backend.number}
            self._proxy._start(route)
            try:
                await self._follow(route)
                return self._must_have()
            except _LostError:
                if not self._journal.is_resumable:
                    break
                if events := self._journal.close():  # all tokens are there; only the end is missing
                    await self._write(events)
                    await self._must_have().write_eof()
                    return self._must_have()
            finally:
                route.in_flight -= 1
        return self._give_up()

    async def _follow(self, route: BackendRoute) -> None:
        """Follow the stream on one replica to its end. Raises _LostError."""
        if self._proxy.engines.refuses_ids(route, self._request.path):
            self._journal.stop_asking_ids()
        response = await self._ask(route)
        if response.status in REFUSALS and self._answer is None and not self._journal.is_plain:
            response = await self._ask_plainly(route, response)
        async with response:
            if response.status != 200 or not response.content_type.startswith(EVENT_STREAM):
                if self._answer is not None or response.status >= 500:
                    raise _LostError(f"the replica answered with {response.status}")
                self._answer = await self._proxy._copy(self._request, route, response)
                return
            if self._answer is None:
                await self._prepare(route, response)
            await self._copy_events(route, response)

    async def _ask(self, route: BackendRoute) -> aiohttp.ClientResponse:
        context_tokens = None
        if self._journal.needs_context:
            context_tokens = await self._proxy.engines.find_context(self._proxy.session, route)
        path, fields = self._journal.make_request(context_tokens)
        body = json.dumps(fields).encode()
        return await self._proxy._send(route, self._request, path or self._request.path_qs, body)

    async def _ask_plainly(self, route: BackendRoute, refusal: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
        """Ask again without the ids that the client did not request, which some engines refuse to return."""
        refusal.close()
        self._journal.stop_asking_ids()
        response = await self._ask(route)
        if response.status == 200:
            self._proxy.engines.note_refusal(route, self._request.path)
        return response

    async def _prepare(self, route: BackendRoute, response: aiohttp.ClientResponse) -> None:
        answer = self._proxy.make_answer(route, response)
        answer.headers.popall("content-length", None)
        try:
            await answer.prepare(self._request)
        except (OSError, aiohttp.ClientError) as error:
            raise _ClientGoneError from error
        self._answer = answer

    async def _copy_events(self, route: BackendRoute, response: aiohttp.ClientResponse) -> None:
        parser = EventParser()
        meter = self._request[METER]
        meter.begin(route.backend.number, response.status, EVENT_STREAM)
        content = response.content.iter_any()
        while not self._journal.is_complete:
            try:
                data = await anext(content, None)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._proxy._table.record_break(route, f"a stream broke off: {str(error) or type(error).__name__}")
                raise _LostError("the stream broke off") from None
            if data is None:
                raise _LostError("the stream ended early")
            await self._write(self._take(parser.feed(data)))
        await self._must_have().write_eof()

    def _take(self, events: list[str]) -> list[str]:
        """Record events of the replica; return those for the client."""
        meter = self._request[METER]
        taken = [self._journal.take(event) for event in events]
        for event, kept in zip(events, taken, strict=True):
            meter.take_event(event if kept is None else kept)
        return [event for event in taken if event is not None]

    async def _write(self, events: list[str]) -> None:
        if not events:
            return
        try:
            await self._must_have().write("".join(f"data: {event}\n\n" for event in events).encode())
        except (OSError, aiohttp.ClientError) as error:
            raise _ClientGoneError from error

    def _must_have(self) -> web.StreamResponse:
        assert self._answer is not None
        return self._answer

    def _give_up(self) -> web.StreamResponse:
        if self._answer is None:
            return self._proxy._refuse_unready()
        self._proxy.counts.broken += 1
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._answer
