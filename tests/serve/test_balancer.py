"""The balancer over stand-in replicas: nothing is sent to a dead one, nothing is lost with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from yarl import URL

from broker.clock import SystemClock
from broker.serve import streams
from broker.serve.balancer import Balancer
from broker.serve.files import Backend, Load, Routing, ServiceFolder, read_file
from broker.serve.journal import read_prompt
from broker.serve.routes import BackendRoute, RouteTable
from broker.types import ReadinessProbe
from tests.serve.stand_in import StandIn, expect_text

PROBE = ReadinessProbe(path="/health", interval_s=0.02)


class Bed:
    """Stand-ins behind a balancer, and a client."""

    def __init__(self, balancer: Balancer, stands: list[StandIn], port: int, client: aiohttp.ClientSession) -> None:
        self.balancer, self.stands, self.client = balancer, stands, client
        self.url = f"http://127.0.0.1:{port}"

    async def until_ready(self, count: int) -> None:
        while sum(route.is_ready for route in self.balancer.table.routes.values()) != count:
            await asyncio.sleep(0.005)

    async def until_asked(self) -> StandIn:
        """Return the stand-in that has a generation."""
        while not (busy := [each for each in self.stands if each.asked]):
            await asyncio.sleep(0.005)
        return busy[0]

    async def begin(self) -> tuple[asyncio.Future[list[Any]], StandIn, StandIn]:
        """Begin a stream that its replica holds; return it with its replica, and another one that holds nothing."""
        for each in self.stands:
            each.gate.clear()
        begun = asyncio.Event()
        streaming = asyncio.ensure_future(self.stream(prompt="hi", begun=begun))
        await begun.wait()
        first = await self.until_asked()
        second = next(each for each in self.stands if each is not first)
        second.gate.set()
        return streaming, first, second

    async def stream(self, path: str = "/v1/completions", **fields: Any) -> list[Any]:
        """Read a stream to its end; `begun` is set when its first event has arrived, or the first ones."""
        begun: asyncio.Event = fields.pop("begun", asyncio.Event())
        count: int = fields.pop("first", 1)
        body = {"stream": True, "max_tokens": 12, **fields}
        async with self.client.post(self.url + path, json=body) as response:
            first = b""
            while first.count(b"\n\n") < count and not response.content.at_eof():
                first += await response.content.readany()
            begun.set()
            text = (first + await response.content.read()).decode()
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        return [json.loads(each) for each in events[:-1]]


def play(folder: Path, scene: Callable[[Bed], Awaitable[None]], *, count: int = 2, **settings: Any) -> Load:
    has_ids = settings.pop("has_ids", True)
    make_stands = settings.pop("make_stands", lambda number: [StandIn(has_ids=has_ids) for _ in range(number)])

    async def run() -> None:
        stands = make_stands(count)
        for each in stands:
            await each.start()
        backends = tuple(
            Backend(number=number, version=1, host="127.0.0.1", port=each.port) for number, each in enumerate(stands, 1)
        )
        routing = Routing(generation=1, host="127.0.0.1", port=0, backends=backends, **{"probe": PROBE, **settings})
        balancer = Balancer(ServiceFolder(path=folder), routing, clock=SystemClock())
        async with balancer.listen() as port, aiohttp.ClientSession() as client:
            bed = Bed(balancer, stands, port, client)
            await bed.until_ready(count)
            await scene(bed)
            balancer.write_load()
        for each in stands:
            await each.kill()

    asyncio.run(run())
    load = read_file(ServiceFolder(path=folder).load, Load)
    assert load is not None
    return load


def test_any_method_body_and_header_passes(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            async with bed.client.request(method, f"{bed.url}/a?b=1", data=b"x", headers={"x-sent": "y"}) as response:
                assert (response.status, await response.read()) == (200, b"x")
                assert response.headers["x-seen"] == "y" and response.headers["x-broker-version"] == "1"
        async with bed.client.head(f"{bed.url}/a") as response:
            assert response.status == 200

    load = play(tmp_path, scene)
    assert load.arrivals == 7 and load.in_flight == 0 and load.broken == 0


def test_refused_connection_takes_a_replica_out_and_the_request_succeeds_elsewhere(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        await bed.stands[0].kill()
        for _ in range(20):
            async with bed.client.post(f"{bed.url}/a", data=b"x") as response:
                assert response.status == 200
        assert not bed.balancer.table.routes[1].is_ready
        await bed.stands[0].start()
        await bed.until_ready(2)

    assert play(tmp_path, scene).broken == 0


def test_post_that_was_sent_is_not_sent_twice(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        for each in bed.stands:
            each.gate.clear()
        asked = asyncio.ensure_future(bed.client.post(f"{bed.url}/slow", data=b"x"))
        while not (busy := [each for each in bed.stands if each.seen]):
            await asyncio.sleep(0.005)
        await busy[0].kill()
        response = await asked
        assert response.status == 502
        assert sum(len(each.seen) for each in bed.stands) == 1

    play(tmp_path, scene)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings", "/generate_stream"])
def test_generation_that_was_sent_to_a_lost_replica_is_sent_to_another(tmp_path: Path, path: str) -> None:
    async def scene(bed: Bed) -> None:
        for each in bed.stands:
            each.gate.clear()
        asked = asyncio.ensure_future(bed.client.post(f"{bed.url}/slow{path}", data=b"x"))
        while not (busy := [each for each in bed.stands if each.seen]):
            await asyncio.sleep(0.005)
        await busy[0].kill()
        for each in bed.stands:
            each.gate.set()
        response = await asked
        assert (response.status, await response.read()) == (200, b"x")

    play(tmp_path, scene)


def test_request_waits_until_a_replica_is_ready(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        bed.stands[0].is_healthy = False
        await bed.until_ready(0)
        asked = asyncio.ensure_future(bed.client.get(f"{bed.url}/a"))
        while not bed.balancer.path.counts.waiting:
            await asyncio.sleep(0.005)
        bed.stands[0].is_healthy = True
        assert (await asked).status == 200

    play(tmp_path, scene, count=1)


def test_draining_replica_gets_no_new_request_and_ends_its_own(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        for each in bed.stands:
            each.gate.clear()
        streaming = asyncio.ensure_future(bed.stream(prompt="hi"))
        busy = await bed.until_asked()
        routing = bed.balancer._routing
        drained = tuple(
            Backend(number=each.number, version=1, host=each.host, port=each.port, is_draining=each.port == busy.port)
            for each in routing.backends
        )

        bed.balancer.adopt(replace(routing, generation=2, backends=drained))
        for _ in range(10):
            async with bed.client.get(f"{bed.url}/a") as response:
                assert response.status == 200
        assert not any(path == "/a" for _, path, _ in busy.seen)
        busy.gate.set()
        assert "".join(each["choices"][0]["text"] for each in await streaming) == expect_text("hi", 12)

    assert play(tmp_path, scene).generation == 2


@pytest.mark.parametrize("is_chat", [False, True])
def test_stream_survives_its_replicas_and_reads_as_one(tmp_path: Path, is_chat: bool) -> None:
    async def scene(bed: Bed) -> None:
        for each in bed.stands:
            each.gate.clear()
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        options = {"include_usage": True}
        begun = asyncio.Event()
        streaming = asyncio.ensure_future(bed.stream(path, stream_options=options, begun=begun, **asked))
        await begun.wait()
        first = await bed.until_asked()
        second = next(each for each in bed.stands if each is not first)
        second.gate.set()
        await first.kill()
        events = await streaming
        parts = [each["choices"][0] for each in events if each["choices"]]
        text = "".join(each["delta"]["content"] if is_chat else each["text"] for each in parts)
        assert text == expect_text("hi", 12)
        assert {each["id"] for each in events} == {f"cmpl-{first.port}"}
        assert events[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}
        assert not any("token_ids" in each for each in parts)
        continued = second.asked[0]
        assert continued["resumed_tokens"] + continued["max_tokens"] == 12
        assert continued["seed"] == first.asked[0]["seed"]

    load = play(tmp_path, scene)
    assert load.resumed == 1 and load.broken == 0


def test_busy_replica_is_asked_for_the_rest_of_a_stream_after_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, sleep = list[float](), asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def scene(bed: Bed) -> None:
        streaming, first, second = await bed.begin()
        second.refusals = 7
        monkeypatch.setattr(streams, "asyncio", SimpleNamespace(sleep=pause))
        await first.kill()
        text = "".join(each["choices"][0]["text"] for each in await streaming if each["choices"])
        assert text == expect_text("hi", 12)

    assert play(tmp_path, scene).broken == 0
    assert pauses[:7] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_stream_without_token_ids_breaks_off_visibly(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        streaming, first, _ = await bed.begin()
        await first.kill()
        with pytest.raises(aiohttp.ClientError):
            await streaming

    assert play(tmp_path, scene, has_ids=False).broken == 1


def test_websocket_passes_through(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        async with bed.client.ws_connect(f"{bed.url}/socket", protocols=["chat"]) as socket:
            assert socket.protocol == "chat"
            await socket.send_str("a")
            assert await socket.receive_str() == "echo a"

    play(tmp_path, scene)


def test_full_queue_is_refused_with_the_time_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.serve.data_path.WAITING_MAX", 0)

    async def scene(bed: Bed) -> None:
        bed.stands[0].is_healthy = False
        await bed.until_ready(0)
        async with bed.client.get(f"{bed.url}/a") as response:
            assert response.status == 429 and response.headers["retry-after"] == "5"

    play(tmp_path, scene, count=1)


def test_twelve_streams_survive_four_kills_identically(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        for each in bed.stands:
            each.gate.clear()
        begun = [asyncio.Event() for _ in range(12)]
        streams = [asyncio.ensure_future(bed.stream(prompt=f"p{n}", max_tokens=40, begun=begun[n])) for n in range(12)]
        for each in begun:
            await each.wait()
        for _ in range(4):
            busiest = max(bed.balancer.table.routes.values(), key=lambda route: route.in_flight)
            victim = bed.stands[busiest.backend.number - 1]
            await victim.kill()
            await bed.until_ready(2)
            await victim.start()
            await bed.until_ready(3)
        for each in bed.stands:
            each.gate.set()
        for n, events in enumerate(await asyncio.gather(*streams)):
            assert "".join(each["choices"][0]["text"] for each in events) == expect_text(f"p{n}", 40)

    load = play(tmp_path, scene, count=3)
    assert load.resumed >= 4 and load.broken == 0


def test_prompts_that_begin_alike_go_to_one_replica_unless_it_is_too_busy() -> None:
    backends = [Backend(number=number, version=1, host="h", port=number) for number in range(1, 5)]
    table = RouteTable(clock=SystemClock())
    table.update(backends)
    for route in table.routes.values():
        table.admit(route)
    system = b"x" * 600

    def choose(prefix: bytes) -> BackendRoute:
        route = table.choose(balancing="prefix_affinity", prefix=prefix)
        assert route is not None
        return route

    first = choose(system + b"a")
    assert choose(system + b"b") is first
    assert len({choose(b"%d" % turn).backend.number for turn in range(50)}) == 4
    for turn in range(40):
        choose(system + b"%d" % turn).in_flight += 1
    loads = [route.in_flight for route in table.routes.values()]
    assert sum(loads) == 40 and max(loads) == first.in_flight <= 13  # 1.25 times the mean


def test_prefix_affinity_sees_prompts_and_messages() -> None:
    assert read_prompt(b'{"prompt": "hi"}') == b"hi"
    assert read_prompt(b'{"prompt": [1, 2]}') == b"[1, 2]"
    assert read_prompt(b'{"messages": [{"role": "user"}]}').startswith(b'[{"role"')
    assert read_prompt(b"[1]") == read_prompt(b"{") == b""


def test_short_response_that_breaks_off_is_repeated_elsewhere_if_it_may_be(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        for number in range(20):
            bed.stands[0].is_torn = True
            async with bed.client.put(f"{bed.url}/file", data=b"x" * 100) as response:
                assert (response.status, await response.read()) == (200, b"x" * 100), number
        async with bed.client.get(f"{bed.url}/file") as response:
            assert response.status == 200
        assert bed.stands[0].seen, "the torn replica must have been asked"

    play(tmp_path, scene)


def test_only_responses_that_break_off_in_a_row_take_a_replica_out(tmp_path: Path) -> None:
    """A busy program that failed three of thousands of requests between two probes was out of rotation."""

    async def scene(bed: Bed) -> None:
        (stand,), (route,) = bed.stands, bed.balancer.table.routes.values()
        for is_torn in (True, True, False, True, True, False, True, True):
            stand.is_torn = is_torn
            async with bed.client.post(f"{bed.url}/order", data=b"x" * 100) as response:
                assert response.status == (502 if is_torn else 200)
            assert route.is_ready
        async with bed.client.post(f"{bed.url}/order", data=b"x" * 100) as response:
            assert response.status == 502
        assert not route.is_ready

    play(tmp_path, scene, count=1, probe=replace(PROBE, interval_s=3600.0))


def test_short_response_that_breaks_off_and_must_not_be_repeated_is_an_error(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        bed.stands[0].is_torn = True
        async with bed.client.post(f"{bed.url}/order", data=b"x" * 100) as response:
            assert response.status == 502
        assert len(bed.stands[0].seen) == 1

    play(tmp_path, scene, count=1)


def test_cookie_for_one_client_is_not_sent_for_another(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        named = Backend(number=1, version=1, host="localhost", port=bed.stands[0].port)  # jars refuse addresses
        routing = Routing(generation=2, host="127.0.0.1", port=0, probe=PROBE, backends=(named,))
        bed.balancer.adopt(routing)
        await bed.until_ready(1)
        for _ in range(2):
            async with aiohttp.ClientSession() as client, client.put(f"{bed.url}/echo", data=b"x") as response:
                assert response.headers["set-cookie"] == "user=ann"
        assert not any("Cookie" in each for each in bed.stands[0].headers)

    play(tmp_path, scene, count=1)


def test_path_reaches_the_replica_as_the_client_wrote_it(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        url = URL(f"{bed.url}/a%2Fb/%7Ec?q=%41+b", encoded=True)
        async with bed.client.get(url) as response:
            assert response.status == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", int(bed.url.rpartition(":")[2]))
        writer.write(b"GET //a/b?c HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.close()
        assert [path for _, path, _ in bed.stands[0].seen] == ["/a%2Fb/%7Ec?q=%41+b", "//a/b?c"]

    play(tmp_path, scene, count=1)


def test_responses_of_the_balancer_itself_count_as_errors(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        bed.balancer.adopt(replace(bed.balancer._routing, generation=2, backends=()))
        refused = await asyncio.gather(*(bed.client.get(f"{bed.url}/a") for _ in range(3)))
        assert [each.status for each in refused] == [503] * 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("broker.serve.proxying.WAIT_S_MAX", 0.0)
        load = play(tmp_path, scene)
    assert (load.window.errors, load.totals.responses) == (3, {"503": 3})
