"""HAProxy as the balancer: configurations as snapshots, answers as recorded, and the real one where installed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from syrupy.assertion import SnapshotAssertion

from broker.clock import SystemClock
from broker.errors import StateError
from broker.serve.balancer import Balancer
from broker.serve.files import Backend, Load, Routing, ServiceFolder, read_file
from broker.serve.haproxy_config import render
from broker.serve.haproxy_control import (
    HaproxyControl,
    NoAnswerError,
    ServerFigures,
    Worker,
    parse_figures,
    parse_workers,
)
from broker.serve.replicas import draw_free_port
from broker.types import BalancerType, ReadinessProbe, ServiceProtocol, TlsFiles
from tests.serve.stand_in import StandIn
from tests.serve.stands import needs_haproxy

PROBE = ReadinessProbe(path="/health", interval_s=0.05)
BACKENDS = (
    Backend(number=1, version=1, host="10.0.0.1", port=8000),
    Backend(number=2, version=1, host="10.0.0.2", port=8000, is_draining=True),
    Backend(number=3, version=2, host="fd00::3", port=19443, is_encrypted=True),
)
HTTP = Routing(
    generation=1, host="127.0.0.1", port=30001, probe=PROBE, backends=BACKENDS, balancer=BalancerType.HAPROXY
)
CASES = {
    "http": HTTP,
    "canary": replace(HTTP, shares={2: 0.1}, balancing="round_robin"),
    "https": replace(HTTP, host="::", tls=TlsFiles(key_path="k", certificate_path="c", client_ca_path="a")),
    "grpc": replace(HTTP, protocol=ServiceProtocol.GRPC),
    "grpc over tls": replace(
        HTTP, protocol=ServiceProtocol.GRPC, tls=TlsFiles(key_path="k", certificate_path="c")
    ),
    "grpc passed through": replace(HTTP, protocol=ServiceProtocol.GRPC, is_tls_passed=True),
    "tcp": replace(HTTP, protocol=ServiceProtocol.TCP),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_configuration(name: str, snapshot: SnapshotAssertion) -> None:
    assert render(CASES[name], {1, 2}) == snapshot


def test_shares_of_several_versions_add_up() -> None:
    backends = tuple(replace(BACKENDS[0], number=number, version=number) for number in (1, 2, 3))
    text = render(replace(HTTP, backends=backends, shares={2: 0.25, 3: 0.25}), {1, 2, 3})
    assert "use_backend version-2 if { rand(10000) lt 2500 }" in text
    assert "use_backend version-3 if { rand(10000) lt 3333 }" in text  # of the three quarters that are left


def test_replicas_that_will_be_preempted_are_used_when_no_other_is_ready() -> None:
    leaving = replace(BACKENDS[0], is_leaving=True)
    text = render(replace(HTTP, backends=(leaving, BACKENDS[2])), {1, 3})
    assert "option allbackups" in text
    assert [line.split()[1] for line in text.splitlines() if line.endswith(" backup")] == ["r1"]


def test_workers_before_and_after_a_reload_are_distinguished() -> None:
    text = """\
#<PID>          <type>          <reloads>       <uptime>        <version>
2345            master          1 [failed: 0]   0d00h00m05s     2.6.12-1+deb12u4
# workers
2665            worker          0               0d00h00m02s     2.6.12-1+deb12u4
# old workers
2357            worker          1               0d00h00m09s     2.6.12-1+deb12u4
# programs
"""
    assert parse_workers(text) == (Worker(pid=2665, is_old=False), Worker(pid=2357, is_old=True))


def test_figures_of_a_worker_are_read_by_the_names_of_columns() -> None:
    text = """\
# pxname,svname,qcur,scur,stot,srv_abrt,req_tot,
clients,FRONTEND,,7,40,,55,
replicas,r1,0,3,30,2,,
replicas,r2,0,1,9,,,
replicas,BACKEND,4,4,39,2,,
"""
    found = parse_figures(text)
    assert (found.arrivals, found.queued) == (55, 4)
    assert found.servers == (
        ServerFigures(name="r1", in_flight=3, broken=2), ServerFigures(name="r2", in_flight=1, broken=0)
    )  # fmt: skip
    assert parse_figures("# pxname,svname,qcur,scur,stot,\nclients,FRONTEND,,1,40,\n").arrivals == 40


def test_haproxy_that_cannot_be_started_or_asked_is_an_error_that_its_controller_handles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start_nothing(*argv: str, **options: Any) -> None:
        raise BlockingIOError("no more processes")

    async def run() -> None:
        monkeypatch.setattr("broker.serve.haproxy_control.find_haproxy", lambda: "/usr/sbin/haproxy")
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start_nothing)
        with pytest.raises(StateError, match="no more processes"):
            await HaproxyControl(tmp_path).start()
        with pytest.raises(NoAnswerError):
            await HaproxyControl(tmp_path / "gone").list_workers()

    asyncio.run(run())


class HaproxyBed:
    def __init__(self, balancer: Balancer, stands: list[StandIn], client: aiohttp.ClientSession) -> None:
        self.balancer, self.stands, self.client = balancer, stands, client
        self.url = f"http://127.0.0.1:{balancer._routing.port}"

    async def until_ready(self, count: int) -> None:
        """Wait until the balancer knows this many ready replicas, and HAProxy has taken that over."""
        path: Any = self.balancer.path
        while sum(each.is_ready for each in self.balancer.table.routes.values()) != count:
            await asyncio.sleep(0.01)
        await self.until_applied(path)

    async def until_applied(self, path: Any) -> None:
        while path._changes.is_pending:
            await asyncio.sleep(0.01)

    async def ask(self, path: str = "/a") -> int:
        async with self.client.post(self.url + path, data=b"x") as response:
            await response.read()
            return response.status


def play(folder: Path, scene: Callable[[HaproxyBed], Awaitable[None]], *, count: int = 2) -> Load:
    async def run() -> None:
        stands = [StandIn() for _ in range(count)]
        for each in stands:
            await each.start()
        backends = tuple(Backend(number=n, version=n, host="127.0.0.1", port=e.port) for n, e in enumerate(stands, 1))
        routing = replace(HTTP, port=draw_free_port(), backends=backends)
        balancer = Balancer(ServiceFolder(path=folder), routing, clock=SystemClock())
        # Each request has a connection of its own, so that a reload closes none that waits for the next request.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as client, balancer.listen():
            bed = HaproxyBed(balancer, stands, client)
            await bed.until_ready(count)
            await scene(bed)
            await balancer.path.refresh()
            balancer.write_load()
        for each in stands:
            await each.kill()

    asyncio.run(run())
    load = read_file(ServiceFolder(path=folder).load, Load)
    assert load is not None
    return load


@needs_haproxy
def test_killed_replica_fails_no_request_and_comes_back(tmp_path: Path) -> None:
    async def scene(bed: HaproxyBed) -> None:
        await bed.stands[0].kill()
        assert [await bed.ask() for _ in range(20)] == [200] * 20
        await bed.until_ready(1)
        await bed.stands[0].start()
        await bed.until_ready(2)
        before = len(bed.stands[0].seen)
        while len(bed.stands[0].seen) == before:
            assert await bed.ask() == 200

    load = play(tmp_path, scene)
    assert load.arrivals >= 21 and load.in_flight == 0


@needs_haproxy
def test_reload_drops_no_request_and_open_ones_still_count_for_their_replica(tmp_path: Path) -> None:
    async def scene(bed: HaproxyBed) -> None:
        for each in bed.stands:
            each.gate.clear()
        slow = [asyncio.ensure_future(bed.ask("/slow")) for _ in range(8)]
        while sum(len(each.seen) for each in bed.stands) < 8:
            await asyncio.sleep(0.01)
        statuses: list[int] = []

        is_over = asyncio.Event()

        async def ask_on() -> None:
            while not is_over.is_set():
                statuses.append(await bed.ask())

        asking = asyncio.ensure_future(ask_on())
        routing = bed.balancer._routing
        drained = (replace(routing.backends[0], is_draining=True), routing.backends[1])
        bed.balancer.adopt(replace(routing, generation=2, backends=drained))
        await bed.until_applied(bed.balancer.path)
        after = len(bed.stands[0].seen)
        for _ in range(10):
            assert await bed.ask() == 200
        is_over.set()
        await asking  # one that is under way counts as well
        assert len(bed.stands[0].seen) == after, "a draining replica got a request"
        await bed.balancer.path.refresh()
        routes = bed.balancer.table.routes
        assert routes[1].in_flight + routes[2].in_flight == 8, "the old worker's requests count"
        assert routes[1].in_flight > 0
        for each in bed.stands:
            each.gate.set()
        assert await asyncio.gather(*slow) == [200] * 8
        assert set(statuses) == {200}

    play(tmp_path, scene)


@needs_haproxy
def test_connections_to_a_replica_that_is_gone_end_and_those_to_others_continue(tmp_path: Path) -> None:
    """Its machine may have vanished without closing them."""

    async def scene(bed: HaproxyBed) -> None:
        gone, left = bed.stands
        for each in bed.stands:
            each.gate.clear()
        slow = [asyncio.ensure_future(bed.ask("/slow")) for _ in range(16)]
        while len(gone.seen) + len(left.seen) < 16:
            await asyncio.sleep(0.01)
        count = len(left.seen)
        assert 0 < count < 16
        routing = bed.balancer._routing
        bed.balancer.adopt(replace(routing, generation=2, backends=routing.backends[1:]))
        async with asyncio.timeout(300):
            while sum(each.done() for each in slow) < 16 - count:
                await asyncio.sleep(0.01)
        left.gate.set()
        results = await asyncio.gather(*slow, return_exceptions=True)
        assert results.count(200) == count

    play(tmp_path, scene)


@needs_haproxy
def test_haproxy_that_dies_is_started_again(tmp_path: Path) -> None:
    async def scene(bed: HaproxyBed) -> None:
        path: Any = bed.balancer.path
        (worker,) = await path._control.list_workers()
        os.kill(path._control._process.pid, signal.SIGKILL)
        while True:
            try:
                if [each.pid for each in await path._control.list_workers()] not in ([], [worker.pid]):
                    break
            except Exception:
                await asyncio.sleep(0.02)
        await bed.until_ready(2)
        assert await bed.ask() == 200

    play(tmp_path, scene)
