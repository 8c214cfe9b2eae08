"""What becomes of a request whose replica vanishes, refuses or fails, and whose client leaves or misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from broker.clock import SystemClock
from broker.serve import proxying
from broker.serve.answers import METER
from broker.serve.balancer import Balancer
from broker.serve.bodies import PassedBody
from broker.serve.files import Backend, Routing, ServiceFolder
from broker.serve.losses import ClientGoneError
from broker.serve.metering import ResponseMeter
from broker.serve.probing import probe_request
from broker.serve.routes import BackendRoute, RouteTable
from broker.types import ReadinessProbe
from tests.serve.stand_in import StandIn, expect_text
from tests.serve.test_balancer import PROBE, Bed, play
from tests.serve.test_tcp_path import make_tls, trust

JSON = "application/json"


class FailingStand(StandIn):
    """Answers generations with `status` and `reply`, unless it is 200 and not `is_failing`; counts what it is asked."""

    def __init__(self, status: int = 200, reply: bytes = b'{"error": "busy"}', *, is_failing: bool = False) -> None:
        super().__init__()
        self.status, self.reply, self.is_failing = status, reply, is_failing

    async def _generate(self, request: web.BaseRequest, fields: dict[str, Any]) -> web.StreamResponse:
        if self.status == 200 and not self.is_failing:
            return await super()._generate(request, fields)
        self.asked.append(fields)
        return web.Response(status=self.status, body=self.reply, content_type=JSON, headers={"retry-after": "7"})


class HeldStand(StandIn):
    """Holds back every answer below `/slow` until `gate` is set."""

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if not request.path.startswith("/slow"):
            return await super()._answer(request)
        self.seen.append((request.method, request.path_qs, await request.read()))
        await self.gate.wait()
        return web.Response(body=b"done")


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.005)


async def send_raw(bed: Bed, text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(bed.url.rpartition(":")[2]))
    writer.write(text)
    return reader, writer


async def keep_only(bed: Bed, stand: StandIn) -> None:
    """Adopt a routing file without the other replicas, whose machines vanished: they close no connection."""
    for each in bed.stands:
        if each is not stand:
            await each.vanish()
    routing = bed.balancer._routing
    kept = tuple(each for each in routing.backends if each.port == stand.port)
    bed.balancer.adopt(replace(routing, generation=routing.generation + 1, backends=kept))


def test_stream_on_a_vanished_machine_continues_elsewhere_at_once(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        streaming, _, second = await bed.begin()
        await keep_only(bed, second)
        assert "".join(each["choices"][0]["text"] for each in await streaming) == expect_text("hi", 12)

    load = play(tmp_path, scene, stream_timeout_s=36_000.0)
    assert (load.resumed, load.broken) == (1, 0)


@pytest.mark.parametrize("programs", [("a", "a"), ("a", "b")], ids=["same program", "another program"])
def test_stream_continues_on_another_version_only_if_that_runs_the_same_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: tuple[str, str]
) -> None:
    """Token ids of one model are other words of another one, such as of a canary."""
    monkeypatch.setattr(proxying, "WAIT_S_MAX", 0.1)

    async def scene(bed: Bed) -> None:
        routing = bed.balancer._routing
        pairs = zip(routing.backends, programs, strict=True)
        versions = tuple(replace(each, version=each.number, program=program) for each, program in pairs)
        bed.balancer.adopt(replace(routing, generation=routing.generation + 1, backends=versions))
        streaming, first, second = await bed.begin()
        await first.kill()
        if programs[0] == programs[1]:
            events = await streaming
            assert "".join(each["choices"][0]["text"] for each in events) == expect_text("hi", 12)
        else:
            with pytest.raises(aiohttp.ClientError):
                await streaming
            assert not second.asked

    play(tmp_path, scene)


def test_request_on_a_vanished_machine_is_repeated_if_it_may_be_and_fails_otherwise(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        for each in bed.stands:
            each.gate.clear()
        get = asyncio.ensure_future(bed.client.get(f"{bed.url}/slow"))
        await until(lambda: any(each.seen for each in bed.stands))
        first = next(each for each in bed.stands if each.seen)
        second = next(each for each in bed.stands if each is not first)
        post = [asyncio.ensure_future(bed.client.post(f"{bed.url}/slow", data=b"x")) for _ in range(8)]
        await until(lambda: sum(len(each.seen) for each in bed.stands) == 9)
        on_first = sum(method == "POST" for method, _, _ in first.seen)
        assert on_first > 0
        second.gate.set()
        await keep_only(bed, second)
        assert (await get).status == 200
        statuses = [response.status for response in await asyncio.gather(*post)]
        assert statuses.count(502) == on_first and statuses.count(200) == 8 - on_first

    play(tmp_path, scene, stream_timeout_s=36_000.0)


def test_requests_do_not_wait_for_a_service_that_was_given_up_and_a_late_replica_still_serves(tmp_path: Path) -> None:
    reason = "replica 3 failed: out of memory"

    async def scene(bed: Bed) -> None:
        await bed.stands[0].kill()
        await bed.until_ready(0)
        post = bed.client.post
        stream = {"prompt": "hi", "stream": True, "max_tokens": 2}
        held = [
            asyncio.ensure_future(post(f"{bed.url}/a", data=b"x")),
            asyncio.ensure_future(post(f"{bed.url}/v1/completions", json=stream)),
        ]
        await until(lambda: bed.balancer.path.counts.waiting == 2)
        routing = bed.balancer._routing
        bed.balancer.adopt(replace(routing, generation=routing.generation + 1, failure=reason))
        for response in [*await asyncio.gather(*held), await post(f"{bed.url}/a", data=b"x")]:
            told = (await response.json())["error"]["message"]
            assert (response.status, told) == (503, f"the service was given up: {reason}")
            assert "retry-after" not in response.headers
        await bed.stands[0].start()
        await bed.until_ready(1)
        assert (await post(f"{bed.url}/a", data=b"x")).status == 200

    play(tmp_path, scene, count=1)


def test_websocket_on_a_vanished_machine_is_closed_with_a_code_that_clients_accept(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        async with bed.client.ws_connect(f"{bed.url}/socket") as socket:
            await socket.send_str("a")
            assert await socket.receive_str() == "echo a"
            first = next(each for each in bed.stands if each.headers)
            await keep_only(bed, next(each for each in bed.stands if each is not first))
            message = await socket.receive()
            assert (message.type, socket.close_code) == (aiohttp.WSMsgType.CLOSE, 1001)

    play(tmp_path, scene)


def test_client_that_leaves_frees_the_replica(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        for each in bed.stands:
            each.gate.clear()
        _, writer = await send_raw(bed, b"POST /slow HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\nx")
        await until(lambda: any(each.seen for each in bed.stands))
        writer.transport.abort()
        await until(lambda: not bed.balancer.path.counts.in_flight)
        assert not any(route.in_flight or route.breaks for route in bed.balancer.table.routes.values())

    play(tmp_path, scene)


def test_prompt_of_a_client_that_leaves_while_no_replica_is_ready_costs_nothing(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        bed.stands[0].is_healthy = False
        await bed.until_ready(0)
        body = b'{"prompt": "hello", "max_tokens": 4}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
        _, writer = await send_raw(bed, head + body)
        await until(lambda: bed.balancer.path.counts.waiting == 1)
        writer.transport.abort()
        await until(lambda: not bed.balancer.path.counts.in_flight)

    window = play(tmp_path, scene, count=1).window
    assert (window.requests, window.prompt_tokens_s) == (1, 0.0)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_request_outlives_the_loss_of_nearly_all_replicas(tmp_path: Path, method: str) -> None:
    """None of the lost ones has got it: the number of replicas that refuse a connection is no reason to fail."""

    async def scene(bed: Bed) -> None:
        for each in bed.stands[1:]:
            await each.kill()
        route = bed.balancer.table.routes[1]
        with contextlib.ExitStack() as stack:
            for _ in range(9):  # so that all others are asked first
                stack.enter_context(route.use())
            async with bed.client.request(method, f"{bed.url}/a", data=b"x") as response:
                assert response.status == 200

    play(tmp_path, scene, count=8, probe=replace(PROBE, interval_s=600))


def test_request_and_websocket_wait_if_the_only_replica_refuses_their_connection(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        (stand,) = bed.stands
        await stand.kill()
        sending = asyncio.ensure_future(bed.client.get(f"{bed.url}/a"))
        opening = asyncio.ensure_future(bed.client.ws_connect(f"{bed.url}/socket"))
        await until(lambda: bed.balancer.path.counts.waiting == 2)
        await replace_replica(bed)
        assert (await sending).status == 200
        await (await opening).close()

    play(tmp_path, scene, count=1, probe=replace(PROBE, interval_s=600))


async def replace_replica(bed: Bed) -> None:
    """Start the program of the only replica again, at the same address; it is probed at once."""
    await bed.stands[0].start()
    routing = bed.balancer._routing
    bed.balancer.adopt(replace(routing, backends=()))
    bed.balancer.adopt(routing)


@pytest.mark.parametrize(("method", "path"), [("GET", "/slow"), ("POST", "/slow/v1/embeddings")])
def test_request_in_flight_waits_for_the_replacement_of_the_only_replica(
    tmp_path: Path, method: str, path: str
) -> None:
    async def scene(bed: Bed) -> None:
        (stand,) = bed.stands
        stand.gate.clear()
        sending = asyncio.ensure_future(bed.client.request(method, f"{bed.url}{path}", data=b"x"))
        await until(lambda: bool(stand.seen))
        await stand.kill()
        await until(lambda: bed.balancer.path.counts.waiting == 1 or sending.done())
        stand.gate.set()
        await replace_replica(bed)
        assert (await sending).status == 200
        assert len(stand.seen) == 2

    load = play(tmp_path, scene, count=1, make_stands=lambda count: [HeldStand()], probe=replace(PROBE, interval_s=600))
    assert load.window.errors == 0


def test_request_in_flight_whose_replica_is_not_replaced_is_refused_with_the_time_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.serve.proxying.WAIT_S_MAX", 0.01)

    async def scene(bed: Bed) -> None:
        (stand,) = bed.stands
        stand.gate.clear()
        sending = asyncio.ensure_future(bed.client.post(f"{bed.url}/slow/v1/embeddings", data=b"x"))
        await until(lambda: bool(stand.seen))
        await stand.kill()
        response = await sending
        assert (response.status, response.headers.get("retry-after")) == (503, "10")

    play(tmp_path, scene, count=1, make_stands=lambda count: [HeldStand()], probe=replace(PROBE, interval_s=600))


def test_request_that_waits_is_sent_when_a_probe_succeeds_that_began_before_its_replica_was_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(bed: Bed) -> None:
        has_begun, may_end = asyncio.Event(), asyncio.Event()

        async def probe(route: BackendRoute) -> str:
            has_begun.set()
            await may_end.wait()
            return ""

        monkeypatch.setattr(bed.balancer.path, "probe", probe)
        await has_begun.wait()
        (route,) = bed.balancer.table.routes.values()
        bed.balancer.table.exclude(route, "a response broke off")
        sending = asyncio.ensure_future(bed.client.put(f"{bed.url}/file", data=b"x"))
        await until(lambda: bed.balancer.path.counts.waiting == 1)
        may_end.set()
        assert (await sending).status == 200

    play(tmp_path, scene, count=1)


def test_request_that_ends_every_connection_is_sent_a_few_times_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.serve.proxying.PAUSE_S", 0.0)

    async def scene(bed: Bed) -> None:
        bed.stands[0].is_torn = True
        async with bed.client.put(f"{bed.url}/file", data=b"x" * 100) as response:
            assert response.status == 502
        assert len(bed.stands[0].seen) == 4

    play(tmp_path, scene, count=1)


def test_request_that_the_only_replica_answers_too_late_is_not_sent_to_it_again(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        bed.stands[0].gate.clear()
        async with bed.client.get(f"{bed.url}/slow") as response:
            assert response.status == 502
        assert len(bed.stands[0].seen) == 1

    play(tmp_path, scene, count=1, stream_timeout_s=0.1, probe=replace(PROBE, interval_s=600))


def test_request_that_no_replica_answers_is_an_error_in_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.serve.proxying.WAIT_S_MAX", 0.01)

    async def scene(bed: Bed) -> None:
        await bed.stands[0].kill()
        async with bed.client.get(f"{bed.url}/a") as response:
            assert response.status in (502, 503)

    load = play(tmp_path, scene, count=1)
    assert (load.window.requests, load.window.errors) == (1, 1)


def test_websocket_whose_client_breaks_off_was_opened_and_has_no_duration(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        head = b"GET /socket HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        key = b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        reader, writer = await send_raw(bed, head + key)
        assert (await reader.readline()).split()[1] == b"101"
        await until(lambda: bool(bed.stands[0].headers))
        writer.transport.abort()
        await until(lambda: not bed.balancer.path.counts.in_flight)

    totals = play(tmp_path, scene, count=1).totals
    assert dict(totals.responses) == {"101": 1} and not sum(totals.request.counts)


def test_error_of_the_balancer_itself_counts_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(bed: Bed) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("broker.serve.proxying.is_websocket", lambda request: 1 / 0)
            async with bed.client.get(f"{bed.url}/a") as response:
                assert response.status == 500

    load = play(tmp_path, scene, count=1)
    assert (dict(load.totals.responses), load.window.errors) == ({"500": 1}, 1)


def test_uploads_that_clients_cut_off_are_not_the_fault_of_the_replica(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        route = bed.balancer.table.routes[1]
        for turn in range(1, 5):
            _, writer = await send_raw(bed, b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 9000000\r\n\r\nx")
            await until(lambda turn=turn: bed.balancer.path.counts.arrivals == turn)  # type: ignore[misc]
            writer.transport.abort()
            await until(lambda: not bed.balancer.path.counts.in_flight)
            assert route.breaks == 0 and route.is_ready
        assert bed.balancer.path.describe()[0].prompt_tokens_s == 0, "an upload is not a prompt"

    play(tmp_path, scene, count=1, probe=replace(PROBE, interval_s=3600.0))


class DamagedContent:
    """A body that cannot be read."""

    def exception(self) -> Exception:
        return web.RequestPayloadError("not a chunk")

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield b"x"
        raise self.exception()


def test_upload_that_cannot_be_read_is_not_the_fault_of_the_replica(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        proxy, route = bed.balancer.path._proxy, bed.balancer.table.routes[1]  # type: ignore[attr-defined]
        request = make_mocked_request("POST", "/a", headers={"host": "a"})
        request[METER] = ResponseMeter(clock=SystemClock())
        with pytest.raises(ClientGoneError):
            await proxy.send(route, request, "/a", PassedBody(DamagedContent()))  # type: ignore[arg-type]
        assert route.breaks == 0

    play(tmp_path, scene, count=1, probe=replace(PROBE, interval_s=3600.0))


def test_stream_that_a_busy_replica_refuses_goes_to_another_one(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        busy = bed.stands[0]
        while not busy.asked:
            events = await bed.stream(prompt="hi")
            assert "".join(each["choices"][0]["text"] for each in events) == expect_text("hi", 12)

    load = play(tmp_path, scene, make_stands=lambda count: [FailingStand(429), StandIn()])
    assert load.window.errors == 0


@pytest.mark.parametrize("stand", [(500, b"{}"), (200, b'{"choices": [{"text": "h", "finish_reason": "abort"}]}')])
def test_generation_that_a_terminated_engine_fails_or_cuts_short_is_answered_by_another(
    tmp_path: Path, stand: tuple[int, bytes]
) -> None:
    """vLLM answers the requests that it aborts on SIGTERM with what it has, and status 200."""

    async def scene(bed: Bed) -> None:
        while not bed.stands[0].asked:
            async with bed.client.post(f"{bed.url}/v1/completions", json={"prompt": "hi"}) as response:
                assert response.status == 200 and b"abort" not in await response.read()

    load = play(tmp_path, scene, make_stands=lambda count: [FailingStand(*stand, is_failing=True), StandIn()])
    assert load.window.errors == 0


def test_generation_that_every_engine_cuts_short_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.serve.proxying.PAUSE_S", 0.0)

    async def scene(bed: Bed) -> None:
        async with bed.client.post(f"{bed.url}/v1/completions", json={"prompt": "hi"}) as response:
            assert response.status == 502
        assert sum(len(each.asked) for each in bed.stands) == 4

    cut = b'{"choices": [{"text": "h", "finish_reason": "abort"}]}'
    play(tmp_path, scene, make_stands=lambda count: [FailingStand(200, cut, is_failing=True) for _ in range(count)])


@pytest.mark.parametrize("status", [429, 500])
def test_stream_that_every_replica_refuses_fails_with_their_answer_after_a_few_tries(
    tmp_path: Path, status: int
) -> None:
    async def scene(bed: Bed) -> None:
        body = {"prompt": "poison", "stream": True, "max_tokens": 0}  # which is not a stream without its end only
        async with bed.client.post(f"{bed.url}/v1/completions", json=body) as response:
            assert (response.status, await response.json()) == (status, {"error": "busy"})
            assert response.headers["retry-after"] == "7"
        assert 1 <= sum(len(each.asked) for each in bed.stands) <= 4

    play(tmp_path, scene, make_stands=lambda count: [FailingStand(status), FailingStand(status)])


class CompressingStand(StandIn):
    """Compresses generations for clients that accept it, or always."""

    def __init__(self, *, is_stubborn: bool = False) -> None:
        super().__init__()
        self.is_stubborn = is_stubborn

    async def _generate(self, request: web.BaseRequest, fields: dict[str, Any]) -> web.StreamResponse:
        if not self.is_stubborn and "gzip" not in request.headers.get("accept-encoding", ""):
            return await super()._generate(request, fields)
        kind = "text/event-stream" if fields.get("stream") else JSON
        body = gzip.compress(b"data: [DONE]\n\n" if fields.get("stream") else b"{}")
        return web.Response(body=body, content_type=kind, headers={"content-encoding": "gzip"})


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_stream_is_not_compressed_or_passes_as_it_is(tmp_path: Path, *, is_stubborn: bool) -> None:
    """The clients of OpenAI's library accept gzip, and the balancer could not read the events."""

    async def scene(bed: Bed) -> None:
        bed.client.headers["accept-encoding"] = "gzip, deflate"
        events = await bed.stream(prompt="hi")
        text = "".join(each["choices"][0]["text"] for each in events)
        assert text == ("" if is_stubborn else expect_text("hi", 12))

    stands = [CompressingStand(is_stubborn=is_stubborn)]
    assert play(tmp_path, scene, count=1, make_stands=lambda count: stands).broken == 0


def test_long_refusal_is_not_read_to_its_end(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        async with bed.client.post(f"{bed.url}/v1/completions", json={"prompt": "a"}) as response:
            assert response.status == 503
        async with bed.client.post(f"{bed.url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
            assert response.status == 503 and len(await response.read()) < 1_000

    play(tmp_path, scene, make_stands=lambda count: [FailingStand(503, b"x" * (1 << 20)) for _ in range(count)])


def test_connection_that_is_never_answered_counts_as_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = aiohttp.TCPConnector._create_connection

    async def scene(bed: Bed) -> None:
        silent = bed.stands[0].port

        async def refuse(self: Any, req: Any, traces: Any, timeout: Any) -> Any:
            if req.url.port == silent and req.method == "POST":  # not the probe
                raise TimeoutError
            return await connect(self, req, traces, timeout)

        monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", refuse)
        while bed.balancer.table.routes[1].is_ready:  # several at once: an idle connection of a probe takes only one
            for response in await asyncio.gather(*(bed.client.post(f"{bed.url}/order", data=b"x") for _ in range(8))):
                assert response.status == 200

    play(tmp_path, scene, probe=replace(PROBE, interval_s=3600.0))


@pytest.mark.parametrize("line", [b"OPTIONS * HTTP/1.1", b"CONNECT 127.0.0.1:1 HTTP/1.1", b"GET x:@evil HTTP/1.1"])
def test_target_that_is_no_path_reaches_no_replica(tmp_path: Path, line: bytes) -> None:
    async def scene(bed: Bed) -> None:
        reader, writer = await send_raw(bed, line + b"\r\nhost: a\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        assert not bed.stands[0].seen

    play(tmp_path, scene, count=1)


def test_headers_of_the_connection_stay_on_it_and_addresses_are_kept(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        head = b"GET /a HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nhttp2-settings: AA\r\nproxy-connection: x\r\n"
        more = b"connection: x-own\r\nx-own: 1\r\nx-forwarded-for: 1.1.1.1\r\nx-forwarded-for: 2.2.2.2\r\n\r\n"
        reader, writer = await send_raw(bed, head + more)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        seen = {name.lower(): value for name, value in bed.stands[0].headers[0].items()}
        assert not {"upgrade", "http2-settings", "proxy-connection", "x-own"} & seen.keys()
        assert seen["x-forwarded-for"] == "1.1.1.1, 2.2.2.2, 127.0.0.1"
        assert seen["x-forwarded-proto"] == "http"

    play(tmp_path, scene, count=1)


def test_replica_learns_that_its_client_uses_tls(tmp_path: Path) -> None:
    """Otherwise its redirects lead to `http://`, which the port does not speak."""
    tls = make_tls(tmp_path)

    async def scene(bed: Bed) -> None:
        for more in ({}, {"x-forwarded-proto": "wss"}):
            async with bed.client.get(bed.url.replace("http:", "https:"), headers=more, ssl=trust(tls)) as response:
                assert response.status == 200
        seen = [{name.lower(): value for name, value in each.items()} for each in bed.stands[0].headers]
        assert [each["x-forwarded-proto"] for each in seen] == ["https", "wss"]

    play(tmp_path, scene, count=1, tls=tls)


def test_client_without_chunks_learns_where_a_stream_ends(tmp_path: Path) -> None:
    """One of HTTP/1.0 that keeps its connection, such as ab, waited for the end until the connection was idle."""
    body = json.dumps({"prompt": "hi", "max_tokens": 3, "stream": True})
    head = f"POST /v1/completions HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: {len(body)}\r\n\r\n{body}"

    async def scene(bed: Bed) -> None:
        reader, writer = await send_raw(bed, head.encode())
        async with asyncio.timeout(60):  # a connection is idle after 75 s
            assert (await reader.read()).endswith(b"data: [DONE]\n\n")
        writer.close()

    play(tmp_path, scene, count=1)


def test_request_that_cannot_be_read_leaves_no_traceback_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone who can connect could fill the disk with them."""

    async def scene(bed: Bed) -> None:
        for head in (b"GET /a HTTP/1.1\r\n\r\n", b"GET /a HTTP/1.1\r\nhost: a\r\ncontent-length: +2\r\n\r\n"):
            reader, writer = await send_raw(bed, head)
            assert (await reader.readline()).split()[1] == b"400"
            writer.close()

    play(tmp_path, scene, count=1)
    assert "Traceback" not in caplog.text


def run_balancer_alone(
    folder: Path, scene: Callable[[Balancer], Awaitable[None]], backends: tuple[Backend, ...]
) -> None:
    probe = ReadinessProbe(path="/health", interval_s=3600.0)
    routing = Routing(generation=1, host="127.0.0.1", port=0, probe=probe, backends=backends)
    balancer = Balancer(ServiceFolder(path=folder), routing, clock=SystemClock())
    asyncio.run(scene(balancer))  # type: ignore[arg-type]


def test_replica_with_another_address_is_probed_at_once(tmp_path: Path) -> None:
    async def scene(balancer: Balancer) -> None:
        stands = [StandIn(), StandIn()]
        for each in stands:
            await each.start()
        async with balancer.listen():
            for stand in stands:  # the second one is the same replica after its recovery
                moved = (Backend(number=1, version=1, host="127.0.0.1", port=stand.port),)
                balancer.adopt(replace(balancer._routing, generation=stand.port, backends=moved))
                await until(lambda: balancer.table.routes[1].is_ready)
        for each in stands:
            await each.kill()

    run_balancer_alone(tmp_path, scene, ())


def test_balancer_ends_when_one_of_its_tasks_fails(tmp_path: Path) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def scene(balancer: Balancer) -> None:
        balancer.path.refresh = fail  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            await balancer.run()

    run_balancer_alone(tmp_path, scene, ())


def test_probe_with_an_invalid_header_is_an_error_of_the_replica() -> None:
    async def run() -> str:
        route = BackendRoute(Backend(number=1, version=1, host="127.0.0.1", port=1), now_s=time.time())
        async with aiohttp.ClientSession() as session:
            return await probe_request(session, route, ReadinessProbe(path="/", headers={"x-a": "b\nc"}))

    assert "failed" in asyncio.run(run())


def test_replica_is_probed_as_its_version_says(tmp_path: Path) -> None:
    def make_stands(count: int) -> list[StandIn]:
        stands = [StandIn() for _ in range(count)]
        for each in stands:
            each.is_healthy = False  # at the path of the service's version
        return stands

    async def scene(bed: Bed) -> None:
        assert bed.stands[0].seen[0][:2] == ("GET", "/v1/models")

    play(tmp_path, scene, make_stands=make_stands, probes={1: replace(PROBE, path="/v1/models")})


def test_replica_that_will_be_preempted_is_chosen_only_if_all_others_will_be(tmp_path: Path) -> None:
    def make(number: int, *, is_leaving: bool) -> Backend:
        return Backend(number=number, version=1, host="h", port=number, is_leaving=is_leaving)

    table = RouteTable(clock=SystemClock())
    table.update([make(1, is_leaving=True), make(2, is_leaving=False)])
    for route in table.routes.values():
        table.admit(route)
    assert {table.choose().backend.number for _ in range(50)} == {2}  # type: ignore[union-attr]
    table.update([make(1, is_leaving=True), make(2, is_leaving=True)])
    assert {table.choose().backend.number for _ in range(50)} == {1, 2}  # type: ignore[union-attr]


def test_client_that_does_not_send_the_headers_of_a_request_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key, it could hold descriptors for an hour."""
    monkeypatch.setattr("broker.serve.http_path.IDLE_S_MAX", 0.05)

    async def scene(bed: Bed) -> None:
        reader, writer = await send_raw(bed, b"GET /a HTTP/1.1\r\nHost: x\r\nSlow: ")
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()

    play(tmp_path, scene, count=1)
