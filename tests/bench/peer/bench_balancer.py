"""Broker's balancer beside SkyServe's and HAProxy's, in one run: `make bench-peer`, or

    python -m tests.bench.peer.bench_balancer --peer .venv-peer/bin/python

Each has the same two engines behind it, one process or thread of its own, and no TLS. They answer in turns, so that a
busy machine slows all alike; each figure is the median of its turns. Then one engine is killed under requests that
follow each other: how many fail, and how long the slowest takes. HAProxy is left out where it is not installed.

The bench fails if broker's balancer takes more processor time than SkyServe's, or fails a request that SkyServe's does
not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from broker.serve.haproxy_control import find_haproxy
from broker.serve.replicas import draw_free_port
from tests.bench.serve_balancer import ask_repeatedly
from tests.serve.live_bed import POLL_S, LiveBed, read_cpu_s

SKY_SIDE = Path(__file__).parent / "sky_balancer.py"
BROKER, SKYSERVE, HAPROXY = "broker", "SkyServe", "HAProxy"
CONNECTIONS, TURNS, REQUESTS, STREAMS, TOKENS = 16, 6, 800, 64, 20
REQUESTS_AFTER_DEATH = 20
START_S = 120.0
HAPROXY_CONFIG = """\
global
    nbthread 1
defaults
    mode http
    timeout connect 5s
    timeout client 120s
    timeout server 120s
    option redispatch 1
    retries 3
    retry-on conn-failure
frontend clients
    bind 127.0.0.1:{port}
    default_backend replicas
backend replicas
    balance random(2)
    default-server check inter 1000ms fall 1 rise 1 observe layer4 error-limit 1 on-error mark-down
{servers}
"""


@dataclass
class Peer:
    """One balancer and its figures."""

    name: str
    url: str
    pid: int
    request_ms: list[float] = field(default_factory=list)  # of processor time
    stream_ms: list[float] = field(default_factory=list)
    failed: int = 0
    slowest_s: float = 0.0


@contextlib.asynccontextmanager
async def run_controller(engines: Mapping[int, str]) -> AsyncIterator[str]:
    """Answer SkyServe's balancer in its controller's place; yield the address."""
    known = {url: {"gpu_type": "unknown"} for url in engines.values()}

    async def answer(request: web.BaseRequest) -> web.Response:
        await request.read()
        return web.json_response({"replica_info": known})

    runner = web.ServerRunner(web.Server(answer, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def launch(argv: list[str]) -> Iterator[int]:
    """Run a process for the length of the block; yield its id."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@contextlib.asynccontextmanager
async def run_peers(folder: Path, bed: LiveBed, sky: Path | None) -> AsyncIterator[list[Peer]]:
    """Run the other balancers in front of the bed's engines; yield all that answer."""
    engines = {number: f"http://127.0.0.1:{each.port}" for number, each in bed.replicas.items()}
    async with contextlib.AsyncExitStack() as stack:
        peers = [Peer(BROKER, bed.url, bed.pid)]
        if sky is not None:
            controller, port = await stack.enter_async_context(run_controller(engines)), draw_free_port()
            pid = stack.enter_context(launch([str(sky), str(SKY_SIDE), controller, str(port)]))
            peers.append(Peer(SKYSERVE, f"http://127.0.0.1:{port}", pid))
        if (program := find_haproxy()) is not None:
            port = draw_free_port()
            servers = "\n".join(f"    server r{number} 127.0.0.1:{each.port}" for number, each in bed.replicas.items())
            config = folder / "peer.cfg"
            config.write_text(HAPROXY_CONFIG.format(port=port, servers=servers))
            pid = stack.enter_context(launch([program, "-db", "-f", str(config)]))
            peers.append(Peer(HAPROXY, f"http://127.0.0.1:{port}", pid))
        async with aiohttp.ClientSession() as client:
            for each in peers:
                await until_answered(client, each)
        yield peers


async def until_answered(client: aiohttp.ClientSession, peer: Peer) -> None:
    """Wait until a balancer knows its engines. SkyServe's asks for them after five seconds, then every twenty."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(aiohttp.ClientError):
            async with client.get(f"{peer.url}/a") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(POLL_S)
    sys.exit(f"{peer.name} does not answer")


async def measure_cpu(peers: list[Peer]) -> None:
    """Add the processor time per short request and per stream, in turns."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS)) as client:
        for turn in range(TURNS + 1):
            for peer in peers:
                before_s = read_cpu_s(peer.pid)
                await asyncio.gather(
                    *(ask_repeatedly(client, peer.url, REQUESTS // CONNECTIONS) for _ in range(CONNECTIONS))
                )
                between_s = read_cpu_s(peer.pid)
                await asyncio.gather(*(read_stream(client, peer) for _ in range(STREAMS)))
                if turn:  # the first one opens connections
                    peer.request_ms.append((between_s - before_s) / REQUESTS * 1000)
                    peer.stream_ms.append((read_cpu_s(peer.pid) - between_s) / STREAMS * 1000)


async def read_stream(client: aiohttp.ClientSession, peer: Peer) -> None:
    body = {"prompt": "hello", "stream": True, "max_tokens": TOKENS}
    async with client.post(f"{peer.url}/v1/completions", json=body) as response:
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def measure_death(bed: LiveBed, peer: Peer) -> None:
    """Kill an engine, and send requests one after the other at once."""
    number = next(iter(bed.replicas))
    bed.kill(number)
    async with aiohttp.ClientSession() as client:
        for _ in range(REQUESTS_AFTER_DEATH):
            start_s = time.monotonic()
            try:
                async with client.get(f"{peer.url}/a") as response:
                    peer.failed += response.status != 200
                    await response.read()
            except aiohttp.ClientError:
                peer.failed += 1
            peer.slowest_s = max(peer.slowest_s, time.monotonic() - start_s)
        bed.restart(number)
        await bed.until_ready(len(bed.replicas))
        await until_answered(client, peer)


async def compare(folder: Path, sky: Path | None) -> int:
    """Print the table; return 1 if broker's balancer is behind SkyServe's."""
    bed = LiveBed(folder)
    async with bed.run(2), run_peers(folder, bed, sky) as peers:
        await measure_cpu(peers)
        for each in peers:
            await measure_death(bed, each)
    print(f"{'balancer':<12}{'ms CPU/request':>16}{'ms CPU/stream':>16}{'failed of 20':>14}{'slowest s':>12}")
    for each in peers:
        request_ms, stream_ms = statistics.median(each.request_ms), statistics.median(each.stream_ms)
        print(f"{each.name:<12}{request_ms:>16.3f}{stream_ms:>16.3f}{each.failed:>14}{each.slowest_s:>12.3f}")
    found = {each.name: each for each in peers}
    own, other = found[BROKER], found.get(SKYSERVE)
    if other is None:
        return 0
    ratio = statistics.median(other.request_ms) / statistics.median(own.request_ms)
    print(f"SkyServe's takes {ratio:.1f} times the processor time of broker's for a request")
    return int(ratio < 1 or own.failed > other.failed)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--peer", type=Path, help="Python of an environment with SkyPilot; without it, HAProxy only")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(compare(Path(folder), given.peer))


if __name__ == "__main__":
    sys.exit(main())
