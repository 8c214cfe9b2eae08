"""What the balancer costs: processor time per request, latency, memory per idle stream, time to see a death."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import aiohttp

from broker.serve.keys import create_key
from broker.types import ReadinessProbe
from tests.serve.live_bed import LOOK_S, LiveBed, draw_free_port, read_cpu_s, read_resident_bytes

CONNECTIONS, REQUESTS = 16, 4_000
TURNS, REQUESTS_PER_TURN = 8, 1_600


def make_bed(folder: Path, *, is_encrypted: bool, is_https: bool = False) -> LiveBed:
    """Return a bed whose requests have an API key, and whose replicas are probed as often as those of a service."""
    bed = LiveBed(folder, pause_s=3600.0, is_encrypted=is_encrypted, is_https=is_https)
    _, key = create_key(bed.folder, "bench", now_s=time.time())
    bed.headers = {"authorization": f"Bearer {key}"}
    bed.routing = replace(bed.routing, probe=ReadinessProbe(path="/health"))
    return bed


async def measure_added_ms(bed: LiveBed, *, rate: float) -> tuple[float, float]:
    """Return by how much the balancer raises p50 and p99 of short requests that are sent at this rate per second.

    Requests go to the balancer and to an engine in turn, so that a busy machine slows both alike.
    """
    engine = f"http://127.0.0.1:{next(iter(bed.replicas.values())).port}"
    took_s: dict[str, list[float]] = {bed.url: [], engine: []}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=bed.headers) as client:

        async def ask(url: str) -> None:
            begun_s = time.perf_counter()
            async with client.post(f"{url}/echo", data=b"x" * 200) as response:
                await response.read()
            took_s[url].append(time.perf_counter() - begun_s)

        sent = list[asyncio.Task[None]]()
        begun_s = time.perf_counter()
        for number in range(REQUESTS):
            await asyncio.sleep(begun_s + number / rate - time.perf_counter())
            sent += [asyncio.ensure_future(ask(url)) for url in took_s]
        await asyncio.gather(*sent)
    balanced, direct = ([each * 1000 for each in sorted(took_s[url])] for url in (bed.url, engine))
    p99 = int(REQUESTS * 0.99)
    return statistics.median(balanced) - statistics.median(direct), balanced[p99] - direct[p99]


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
                        *(_ask(client, url, REQUESTS_PER_TURN // CONNECTIONS) for _ in range(CONNECTIONS))
                    )
                    if turn:  # the first one opens connections
                        took_ms[url].append((read_cpu_s(pid) - before_s) / REQUESTS_PER_TURN * 1000)
    finally:
        bare.kill()
        bare.wait()
    balancer_ms, bare_ms = (statistics.median(each) for each in took_ms.values())
    return balancer_ms, bare_ms


async def _ask(client: aiohttp.ClientSession, url: str, count: int) -> None:
    for _ in range(count):
        async with client.post(f"{url}/echo", data=b"x" * 200) as response:
            assert response.status == 200
            await response.read()


async def _until_answered(client: aiohttp.ClientSession, url: str) -> None:
    while True:
        try:
            return await _ask(client, url, 1)
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(LOOK_S)


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
            await asyncio.sleep(LOOK_S)
        assert load is not None and not asking.done()
        asking.cancel()
    bed.restart(number)
    await bed.until_ready(2)
    return load.replicas[number].since_s - killed_s


async def measure_idle_bytes(bed: LiveBed, count: int) -> float:
    """Return the balancer's memory per stream that is open and silent, the connection to its replica included."""
    before = read_resident_bytes(bed.pid)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=False), headers=bed.headers) as client:
        body = {"prompt": "hello", "stream": True, "max_tokens": 100}
        answers = await asyncio.gather(*(client.post(f"{bed.url}/v1/completions", json=body) for _ in range(count)))
        grown = read_resident_bytes(bed.pid) - before
        for each in answers:
            each.close()
    return grown / count
