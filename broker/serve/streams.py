"""Follow one stream of tokens over as many replicas as necessary; the client reads one stream."""

from __future__ import annotations

import asyncio
import json
from typing import Protocol

import aiohttp
from aiohttp import web

from broker.serve.answers import EVENT_STREAM, METER, begin_stream, find_target, make_headers, refuse
from broker.serve.data_path import Counts
from broker.serve.engines import REFUSALS, EngineFacts
from broker.serve.files import Backend
from broker.serve.journal import DONE, EngineFaultError, EventParser, EventTooLongError, StreamJournal, frame_event
from broker.serve.losses import ClientGoneError, ReplicaLostError
from broker.serve.routes import BackendRoute, RouteTable

RESUMES_MAX = 20
# Before the first token, a request may itself be what ends its replicas.
UNANSWERED_MAX = 4
# Before the next replica is asked for the rest of a stream, if the last one sent none of it: doubled each time.
PAUSE_S, PAUSE_S_MAX = 0.1, 2.0


class Replicas(Protocol):
    """The replicas of a service, as a stream uses them."""

    counts: Counts
    engines: EngineFacts
    session: aiohttp.ClientSession
    table: RouteTable

    async def find(
        self, tried: set[int], prompt: bytes = ..., *, waits: bool = ..., like: Backend | None = ...
    ) -> BackendRoute | None:
        """Return a ready replica that was not tried; None if none is ready in time."""
        ...

    async def send(
        self, route: BackendRoute, request: web.BaseRequest, path: str, body: bytes
    ) -> aiohttp.ClientResponse:
        """Send a request. Raises ReplicaLostError."""
        ...

    async def copy(
        self, request: web.BaseRequest, route: BackendRoute, response: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Pass a response on. Raises ReplicaLostError and ClientGoneError."""
        ...

    async def keep_refusal(
        self, request: web.BaseRequest, route: BackendRoute, response: aiohttp.ClientResponse
    ) -> web.Response:
        """Return the response of a busy or failed replica, for a client that gets no better one."""
        ...

    def refuse_unready(self) -> web.Response:
        """Make the response for a request that no replica is ready to take."""
        ...


class TokenStream:
    """One stream. `prompt` is its beginning, for `prefix_affinity`."""

    def __init__(self, replicas: Replicas, request: web.BaseRequest, journal: StreamJournal, prompt: bytes) -> None:
        self._replicas, self._request, self._journal, self._prompt = replicas, request, journal, prompt
        self._answer: web.StreamResponse | None = None
        self._refusal: web.Response | None = None  # of the replica that was asked last
        self._fault: str | None = None  # the event with which its engine ended the stream

    async def run(self) -> web.StreamResponse:
        """Follow the stream to its end. Raises ClientGoneError."""
        meter = self._request[METER]
        try:
            return await self._run()
        finally:
            meter.settle(*self._journal.counts)

    async def _run(self) -> web.StreamResponse:
        tried: set[int] = set()
        unanswered = stalls = 0
        begun: Backend | None = None  # the replica of the first tokens, whose ids mean nothing to another model
        for _ in range(RESUMES_MAX):
            route = await self._replicas.find(tried, self._prompt, waits=self._refusal is None, like=begun)
            if route is None:
                break
            if self._answer is not None:
                self._replicas.counts.resumed += 1
                tried.clear()
            tried.add(route.backend.number)
            before = self._journal.counts
            try:
                with route.use():
                    await self._follow(route)
                    return self._must_have()
            except ReplicaLostError as error:
                begun = begun or (route.backend if self._journal.counts[1] else None)
                unanswered += error.was_sent and self._answer is None
                if unanswered >= UNANSWERED_MAX:
                    self._refusal = self._refusal or refuse(502, str(error))
                    break
                if not self._journal.is_resumable:
                    break
                # All tokens are there, and only the end is missing.
                if self._answer is not None and (events := self._journal.close()):
                    await self._write(events)
                    await self._must_have().write_eof()
                    return self._must_have()
                stalls = stalls + 1 if self._answer is not None and self._journal.counts == before else 0
                if self._fault is not None and stalls >= UNANSWERED_MAX:
                    break
                if stalls:
                    await asyncio.sleep(min(PAUSE_S * 2 ** (stalls - 1), PAUSE_S_MAX))
        return await self._fail()

    async def _follow(self, route: BackendRoute) -> None:
        """Follow the stream on one replica to its end. Raises ReplicaLostError."""
        self._fault = None
        if self._replicas.engines.refuses_ids(route, self._request.path):
            self._journal.stop_requesting_ids()
        response = await self._send(route)
        if response.status in REFUSALS and self._answer is None and not self._journal.is_plain:
            response = await self._send_without_ids(route, response)
        async with response:
            is_readable = response.headers.get("content-encoding", "identity") == "identity"
            if response.status != 200 or not response.content_type.startswith(EVENT_STREAM) or not is_readable:
                await self._take_other(route, response)
                return
            self._refusal = None
            if self._answer is None:
                await self._prepare(route, response)
            await self._copy_events(route, response)

    async def _take_other(self, route: BackendRoute, response: aiohttp.ClientResponse) -> None:
        """Pass on a response that is not a stream, unless another replica may answer better."""
        if self._answer is not None:
            raise ReplicaLostError(f"the replica answered with {response.status}")
        if response.status == 429 or response.status >= 500:
            self._refusal = await self._replicas.keep_refusal(self._request, route, response)
            raise ReplicaLostError(f"the replica answered with {response.status}")
        self._answer = await self._replicas.copy(self._request, route, response)

    async def _send(self, route: BackendRoute) -> aiohttp.ClientResponse:
        context_tokens = None
        if self._journal.needs_context:
            context_tokens = await self._replicas.engines.find_context(self._replicas.session, route)
        path, fields = self._journal.make_request(context_tokens)
        body = json.dumps(fields).encode()
        return await self._replicas.send(route, self._request, path or find_target(self._request), body)

    async def _send_without_ids(self, route: BackendRoute, refusal: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
        """Ask again without the ids that the client did not request, which some engines refuse to return."""
        refusal.close()
        self._journal.stop_requesting_ids()
        response = await self._send(route)
        if response.status == 200:
            self._replicas.engines.note_refusal(route, self._request.path)
        return response

    async def _prepare(self, route: BackendRoute, response: aiohttp.ClientResponse) -> None:
        headers = make_headers(route, response)
        headers.popall("content-length", None)
        self._answer = await begin_stream(self._request, response, headers)

    async def _copy_events(self, route: BackendRoute, response: aiohttp.ClientResponse) -> None:
        parser = EventParser()
        meter = self._request[METER]
        meter.begin(route.backend.number, EVENT_STREAM)
        content = response.content.iter_any()
        while not self._journal.is_complete:
            try:
                data = await anext(content, None)
                events = None if data is None else parser.feed(data)
            except (aiohttp.ClientError, TimeoutError, OSError, EventTooLongError) as error:
                self._replicas.table.record_break(route, "a stream broke off", error)
                raise ReplicaLostError("the stream broke off") from None
            if events is None:
                raise ReplicaLostError("the stream ended early")
            await self._write(self._take(events))
            if self._fault is not None:
                raise ReplicaLostError("the engine ended the stream")
        self._replicas.table.record_whole(route)
        await self._must_have().write_eof()

    def _take(self, events: list[str]) -> list[str]:
        """Record events of the replica up to its fault; return those for the client."""
        meter = self._request[METER]
        taken = []
        for event in events:
            try:
                kept = self._journal.take(event)
            except EngineFaultError as fault:
                self._fault = fault.event
                break
            meter.take_event(event if kept is None else kept)
            if kept is not None:
                taken.append(kept)
        return taken

    async def _write(self, events: list[str]) -> None:
        if not events:
            return
        try:
            await self._must_have().write("".join(map(frame_event, events)).encode())
        except (OSError, aiohttp.ClientError) as error:
            raise ClientGoneError from error

    def _must_have(self) -> web.StreamResponse:
        assert self._answer is not None
        return self._answer

    async def _fail(self) -> web.StreamResponse:
        if self._answer is None:
            return self._refusal or self._replicas.refuse_unready()
        self._replicas.counts.broken += 1
        if self._fault is not None and (event := self._journal.take(self._fault, is_final=True)):
            await self._write([event, DONE])
            await self._answer.write_eof()
        elif self._request.transport is not None:
            self._request.transport.abort()
        return self._answer
