"""smg and vllm-router as the balancer: answers as recorded, and the real ones where installed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from broker.clock import SystemClock
from broker.errors import StateError
from broker.serve import router_process
from broker.serve.balancer import Balancer
from broker.serve.files import Backend, Load, Routing, ServiceFolder, read_file
from broker.serve.keys import create_key, read_usage
from broker.serve.replicas import draw_free_port
from broker.serve.router_process import (
    PROGRAMS,
    RouterError,
    RouterProcess,
    RouterWorker,
    make_argv,
    parse_workers,
)
from broker.types import BalancerType, ReadinessProbe
from tests.serve.stand_in import StandIn, expect_text
from tests.serve.stands import with_router

PROBE = ReadinessProbe(path="/health", interval_s=0.05)
COMPLETIONS = "/v1/completions"


class Engine(StandIn):
    """A stand-in that names its model, as engines do, and holds back or answers plain requests for embeddings."""

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "stand-in", "object": "model"}]})
        if request.path == "/v1/embeddings":
            self.seen.append((request.method, request.path_qs, await request.read()))
            self.headers.append(dict(request.headers))
            await self.gate.wait()
            return web.json_response({"object": "list", "data": []})
        if request.method == "GET" or not request.path.endswith("completions"):
            return web.Response(status=404)
        return await super()._answer(request)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":  # of the balancer alone: it is not counted
            return web.Response(status=200 if self.is_healthy else 503)
        return await super()._handle(request)


class RouterBed:
    def __init__(self, balancer: Balancer, engines: list[Engine], client: aiohttp.ClientSession) -> None:
        self.balancer, self.engines, self.client = balancer, engines, client
        self.path: Any = balancer.path
        self.url = f"http://127.0.0.1:{balancer._routing.port}"

    async def until_ready(self, count: int) -> None:
        """Wait until the balancer knows this many ready replicas, and the router has taken that over."""
        while sum(each.is_ready for each in self.balancer.table.routes.values()) != count:
            await asyncio.sleep(0.01)
        await self.until_applied()

    async def until_applied(self) -> None:
        while self.path._changes.is_pending:
            await asyncio.sleep(0.01)

    async def embed(self, text: str = "a", **options: Any) -> int:
        fields = {"model": "stand-in", "input": text}
        async with self.client.post(f"{self.url}/v1/embeddings", json=fields, **options) as response:
            await response.read()
            return response.status

    async def complete(self, prompt: str, tokens: int, has_begun: asyncio.Event | None = None, **headers: str) -> str:
        fields = {"model": "stand-in", "prompt": prompt, "max_tokens": tokens, "stream": True}
        async with self.client.post(self.url + COMPLETIONS, json=fields, headers=headers) as response:
            assert response.status == 200, await response.text()
            lines = list[bytes]()
            async for line in response.content:
                lines.append(line)
                if has_begun:
                    has_begun.set()
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        if faults := [each for each in events if "error" in each]:
            raise ConnectionAbortedError(str(faults))
        assert b"data: [DONE]\n" in lines
        return "".join(each["choices"][0]["text"] for each in events if each["choices"])


def play(
    folder: Path, kind: BalancerType, scene: Callable[[RouterBed], Awaitable[None]], *, count: int = 2, **more: Any
) -> Load:
    async def run() -> None:
        engines = [Engine() for _ in range(count)]
        for each in engines:
            await each.start()
        backends = tuple(Backend(number=n, version=1, host="127.0.0.1", port=e.port) for n, e in enumerate(engines, 1))
        routing = Routing(
            generation=1, host="127.0.0.1", port=draw_free_port(), probe=PROBE, backends=backends, balancer=kind, **more
        )
        balancer = Balancer(ServiceFolder(path=folder), routing, clock=SystemClock())
        async with aiohttp.ClientSession() as client, balancer.listen():
            bed = RouterBed(balancer, engines, client)
            await bed.until_ready(count)
            await scene(bed)
            balancer.write_load()
        for each in engines:
            each.gate.set()
            await each.kill()

    asyncio.run(run())
    load = read_file(ServiceFolder(path=folder).load, Load)
    assert load is not None
    return load


def test_workers_of_both_routers_are_read_without_those_that_drain() -> None:
    smg = {
        "workers": [
            {"id": "a1", "url": "http://127.0.0.1:1", "is_healthy": True, "status": "ready", "load": 0},
            {"id": "b2", "url": "http://127.0.0.1:2", "is_healthy": False, "status": "draining", "load": 1},
        ],
        "total": 2,
    }
    assert parse_workers(smg) == (RouterWorker(url="http://127.0.0.1:1", key="a1", is_ready=True),)
    vllm = {"workers": [{"url": "http://127.0.0.1:1", "model_id": "unknown", "is_healthy": False, "load": 0}]}
    assert parse_workers(vllm) == (RouterWorker(url="http://127.0.0.1:1", key="http://127.0.0.1:1", is_ready=False),)
    for other in ({}, [], {"workers": [{}]}, "text", {"workers": None}):
        with pytest.raises(RouterError):
            parse_workers(other)


def test_policy_follows_the_task_and_a_missing_program_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.serve.router_process.find_router", lambda kind: f"/opt/{kind}")
    argv = make_argv(BalancerType.SMG, "prefix_affinity", port=1, metrics_port=2)
    assert argv[:2] == ["/opt/smg", "launch"] and argv[argv.index("--policy") + 1] == "cache_aware"
    argv = make_argv(BalancerType.VLLM_ROUTER, "least_load", port=1, metrics_port=2)
    assert argv[0] == "/opt/vllm-router" and argv[argv.index("--balance-abs-threshold") + 1] == "0"
    monkeypatch.setattr("broker.serve.router_process.find_router", lambda kind: None)
    with pytest.raises(StateError, match="smg is not installed"):
        make_argv(BalancerType.SMG, "least_load", port=1, metrics_port=2)


def test_program_that_ends_at_once_or_is_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        router = RouterProcess(BalancerType.SMG, "least_load", tmp_path)
        with pytest.raises(StateError, match="smg did not start"):
            await router.start()
        with pytest.raises(RouterError):
            await router.list_workers()
        await router.stop()

    monkeypatch.setattr("broker.serve.router_process.find_router", lambda kind: "/bin/false")
    asyncio.run(run())


@with_router
def test_requests_reach_all_replicas_and_only_paths_of_inference_pass(kind: BalancerType, tmp_path: Path) -> None:
    async def scene(bed: RouterBed) -> None:
        while not all(each.seen for each in bed.engines):
            assert await bed.embed() == 200
        for path in ("/workers", "/add_worker?url=http://127.0.0.1:1", "/v1/../workers", "/flush_cache", "/metrics"):
            async with bed.client.post(bed.url + path, json={"url": "http://127.0.0.1:1"}) as response:
                assert response.status == 404
                assert "does not pass on" in await response.text()
        assert len(await bed.path._process.list_workers()) == 2
        async with bed.client.get(f"{bed.url}/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "stand-in"

    load = play(tmp_path, kind, scene, balancing="round_robin")
    assert load.in_flight == 0 and load.totals.responses["200"] >= 2
    assert set(load.replicas) == {1, 2} and all(each.window.requests for each in load.replicas.values())


@with_router
def test_key_is_required_charged_and_shown_to_neither_router_nor_replica(kind: BalancerType, tmp_path: Path) -> None:
    folder = ServiceFolder(path=tmp_path)
    key, text = create_key(folder, "ann", now_s=SystemClock().now_s())

    async def scene(bed: RouterBed) -> None:
        assert await bed.embed() == 401
        assert await bed.embed(headers={"authorization": f"Bearer {text}"}) == 200
        assert await bed.complete("Once", 12, authorization=f"Bearer {text}") == expect_text("Once", 12)
        assert not any(text in str(headers) for each in bed.engines for headers in each.headers)

    play(tmp_path, kind, scene)
    assert read_usage(folder).keys[key.id].completion_tokens == 12


@with_router
def test_stream_of_a_lost_replica_continues_or_breaks_off_visibly(kind: BalancerType, tmp_path: Path) -> None:
    async def scene(bed: RouterBed) -> None:
        for each in bed.engines:
            each.gate.clear()
        has_begun = asyncio.Event()
        stream = asyncio.ensure_future(bed.complete("Once", 12, has_begun))
        await has_begun.wait()
        (number,) = [n for n, route in bed.balancer.table.routes.items() if route.in_flight]
        bed.engines[2 - number].gate.set()
        await bed.engines[number - 1].kill()
        if PROGRAMS[kind].takes_token_ids:
            assert await stream == expect_text("Once", 12)
        else:
            with pytest.raises((aiohttp.ClientPayloadError, ConnectionAbortedError)):
                await stream
            assert await bed.complete("Twice", 12) == expect_text("Twice", 12)

    load = play(tmp_path, kind, scene)
    assert load.resumed == PROGRAMS[kind].takes_token_ids


@with_router
def test_draining_replica_gets_no_more_requests_and_its_open_ones_count_and_end_well(
    kind: BalancerType, tmp_path: Path
) -> None:
    async def scene(bed: RouterBed) -> None:
        for each in bed.engines:
            each.gate.clear()
        slow = [asyncio.ensure_future(bed.embed(str(n))) for n in range(8)]
        while sum(len(each.seen) for each in bed.engines) < 8:
            await asyncio.sleep(0.01)
        routes = bed.balancer.table.routes
        assert routes[1].in_flight + routes[2].in_flight == 8 and routes[1].in_flight == len(bed.engines[0].seen) > 0
        routing = bed.balancer._routing
        drained = (replace(routing.backends[0], is_draining=True), routing.backends[1])
        bed.balancer.adopt(replace(routing, generation=2, backends=drained))
        await bed.until_applied()
        bed.engines[1].gate.set()
        before = len(bed.engines[0].seen)
        assert [await bed.embed() for _ in range(10)] == [200] * 10
        assert len(bed.engines[0].seen) == before
        assert routes[1].in_flight == before
        bed.engines[0].gate.set()
        assert await asyncio.gather(*slow) == [200] * 8
        assert routes[1].in_flight == 0

    play(tmp_path, kind, scene, balancing="round_robin")


@with_router
def test_requests_wait_while_no_replica_is_ready_and_one_that_returns_serves_again(
    kind: BalancerType, tmp_path: Path
) -> None:
    async def scene(bed: RouterBed) -> None:
        bed.engines[0].is_healthy = False
        await bed.until_ready(0)
        waiting = asyncio.ensure_future(bed.embed())
        while not bed.balancer.path.counts.waiting:
            await asyncio.sleep(0.01)
        bed.engines[0].is_healthy = True
        assert await waiting == 200

    play(tmp_path, kind, scene, count=1)


@with_router
def test_router_that_dies_is_started_again_even_if_no_port_is_free_at_first(
    kind: BalancerType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, refusals = router_process._draw_free_ports, [OSError("no port is free")]

    def refuse_once(count: int) -> list[int]:
        if refusals:
            raise refusals.pop()
        return draw(count)

    async def scene(bed: RouterBed) -> None:
        assert await bed.embed() == 200
        port, process = bed.path._process.port, bed.path._process._process
        monkeypatch.setattr(router_process, "_draw_free_ports", refuse_once)
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(300):
            while bed.path._process.port == port or not bed.path._has_workers:
                await asyncio.sleep(0.02)
        assert await bed.embed() == 200 and not refusals

    play(tmp_path, kind, scene)
