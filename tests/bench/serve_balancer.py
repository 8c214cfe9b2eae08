"""The cost of the balancer: processor time per request, latency, memory per idle stream, time to see a death."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from broker.serve.keys import create_key
from broker.serve.replicas import draw_free_port
from broker.types import ReadinessProbe
from tests.bench.serve_requests import RequestReport
from tests.serve.live_bed import POLL_S, STAND_IN, LiveBed, read_cpu_s, read_resident_bytes

CONNECTIONS = 16
TURNS, REQUESTS_PER_TURN = 8, 1_600
CHAIN_S, TURN_S, LATENCY_TURNS = 3.0, 3.0, 8
REPORTS = 4  # of one load until it counts as settled
HALF_LOAD = 0.5
LATE_MS_MAX = 1.0  # of the generator; beyond it, the latencies are its own


def make_bed(folder: Path, *, is_encrypted: bool, is_https: bool = False, engine: str = STAND_IN) -> LiveBed:
    """Return a bed whose requests have an API key, and whose replicas are probed as often as those of a service."""
    pause_s = 3600.0 if engine == STAND_IN else 0.0  # streams stay idle
    bed = LiveBed(folder, pause_s=pause_s, is_encrypted=is_encrypted, is_https=is_https, engine=engine)
    _, key = create_key(bed.folder, "bench", now_s=time.time())
    bed.headers = {"authorization": f"Bearer {key}"}
    bed.routing = replace(bed.routing, probe=ReadinessProbe(path="/health"))
    return bed


@dataclass
class AddedLatency:
    """Short requests through the balancer and to an engine, at `rate` per second.

    `capacity` is what the balancer could serve by its processor time, `chain_rate` what generator, balancer and engines
    served together on the cores of this machine; the rate is half of the smaller one.
    """

    capacity: float
    chain_rate: float
    rate: float
    balanced: RequestReport
    direct: RequestReport
    balancer_cpu_share: float  # of one core, while it had requests

    @property
    def is_sound(self) -> bool:
        """Return whether the generator kept to its times and each request was answered."""
        reports = (self.balanced, self.direct)
        return all(each.late_p99_ms <= LATE_MS_MAX and not each.failed for each in reports)


async def measure_added_latency(folder: Path, *, is_encrypted: bool, cpu_ms: float) -> AddedLatency:
    """Measure latency at half of the highest rate, given the balancer's processor time per request.

    The direct requests go to the engine itself, so that with TLS its entrance counts as added, too.
    """
    bed = make_bed(folder, is_encrypted=is_encrypted, engine="tests.bench.serve_engine")
    async with bed.run(2):
        (filled,) = await _send_requests(bed, [bed.routing.port], "--seconds", f"{CHAIN_S}")
        rate = HALF_LOAD * min(1000 / cpu_ms, filled.rate)
        ports = [bed.routing.port, next(iter(bed.replicas.values())).port]
        before_s = read_cpu_s(bed.pid)
        balanced, direct = await _send_requests(
            bed, ports, "--rate", f"{rate:.0f}", "--seconds", f"{TURN_S}", "--turns", f"{LATENCY_TURNS}"
        )
        busy_s = read_cpu_s(bed.pid) - before_s
    return AddedLatency(
        capacity=1000 / cpu_ms,
        chain_rate=filled.rate,
        rate=rate,
        balanced=balanced,
        direct=direct,
        balancer_cpu_share=busy_s / (TURN_S * LATENCY_TURNS),
    )


async def _send_requests(bed: LiveBed, ports: list[int], *words: str) -> list[RequestReport]:
    """Run the generator in a process of its own."""
    key = bed.headers["authorization"].removeprefix("Bearer ")
    argv = [sys.executable, "-m", "tests.bench.serve_requests", *words, "--key", key, *map(str, ports)]
    generator = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    output, _ = await generator.communicate()
    assert generator.returncode == 0
    return [RequestReport(**each) for each in json.loads(output)]


async def measure_request_cpu_ms(bed: LiveBed) -> tuple[float, float]:
    """Return the processor time per short request over kept connections, of the balancer and of a minimal proxy.

    They answer in turns, and each figure is the median of its turns, so that a busy machine slows both alike.
    """
    port = draw_free_port()
    engines = [str(each.port) for each in bed.replicas.values()]
    bare = subprocess.Popen([sys.executable, "-m", "tests.bench.bare_proxy", "--port", str(port), *engines])
    pids = {bed.url: bed.pid, f"http://127.0.0.1:{port}": bare.pid}
    took_ms: dict[str, list[float]] = {url: [] for url in pids}
    try:
        connector = aiohttp.TCPConnector(limit=CONNECTIONS)
        async with aiohttp.ClientSession(connector=connector, headers=bed.headers) as client:
            await _until_answered(client, f"http://127.0.0.1:{port}")
            for turn in range(TURNS + 1):
                for url, pid in pids.items():
                    before_s = read_cpu_s(pid)
                    await asyncio.gather(
                        *(ask_repeatedly(client, url, REQUESTS_PER_TURN // CONNECTIONS) for _ in range(CONNECTIONS))
                    )
                    if turn:  # the first one opens connections
                        took_ms[url].append((read_cpu_s(pid) - before_s) / REQUESTS_PER_TURN * 1000)
    finally:
        bare.kill()
        bare.wait()
    balancer_ms, bare_ms = (statistics.median(each) for each in took_ms.values())
    return balancer_ms, bare_ms


async def ask_repeatedly(client: aiohttp.ClientSession, url: str, count: int) -> None:
    """Send requests one after the other."""
    for _ in range(count):
        async with client.post(f"{url}/echo", data=b"x" * 200) as response:
            assert response.status == 200
            await response.read()


async def _until_answered(client: aiohttp.ClientSession, url: str) -> None:
    while True:
        try:
            return await ask_repeatedly(client, url, 1)
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(POLL_S)


async def measure_death_s(bed: LiveBed) -> float:
    """Kill a replica under requests; return the time until the balancer has taken it out."""
    async with aiohttp.ClientSession(headers=bed.headers) as client:

        async def ask() -> None:
            while True:
                async with client.get(f"{bed.url}/a") as response:
                    assert response.status == 200

        asking = asyncio.ensure_future(ask())
        number = next(iter(bed.replicas))
        killed_s = time.time()
        bed.kill(number)
        while (load := bed.read_load()) and load.replicas[number].is_ready:
            await asyncio.sleep(POLL_S)
        assert load is not None and not asking.done()
        asking.cancel()
    bed.restart(number)
    await bed.until_ready(2)
    return load.replicas[number].since_s - killed_s


async def measure_idle_bytes(bed: LiveBed, count: int) -> float:
    """Return the balancer's memory per stream that is open and silent, the connection to its replica included.

    It is read once the load has settled.
    """
    before = read_resident_bytes(bed.pid)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=False), headers=bed.headers) as client:
        body = {"prompt": "hello", "stream": True, "max_tokens": 100}
        answers = await asyncio.gather(*(client.post(f"{bed.url}/v1/completions", json=body) for _ in range(count)))
        await _until_settled(bed, count)
        grown = read_resident_bytes(bed.pid) - before
        for each in answers:
            each.close()
    return grown / count


async def _until_settled(bed: LiveBed, in_flight: int) -> None:
    """Wait until the balancer has reported this load several times: it returns free memory after the second one."""
    seen = set[float]()
    while len(seen) < REPORTS:
        load = bed.read_load()
        if load is not None and load.in_flight == in_flight:
            seen.add(load.time_s)
        await asyncio.sleep(POLL_S)
