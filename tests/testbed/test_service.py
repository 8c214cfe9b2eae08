"""A service on real hosts: daemon, balancer and one host are lost while clients read streams."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from broker.types import JobStatus, Replica
from tests.cli.conftest import Shell
from tests.serve.live_load import StreamTally, read_streams
from tests.signals import signal_all
from tests.testbed.metadata import MetadataServer
from tests.testbed.test_ssh_pool import Pool

STREAMS, TOKENS, PAUSE_S = 6, 40, 0.05
POLL_S = 0.2
# Without the controller's word, a stream on a host without power would be silent for an hour.
TASK = """\
name: web
resources: {{infra: ssh/lab}}
service:
  readiness_probe: {{path: /health, timeout_seconds: 2}}
  replicas: 2
  ports: 8080
  load_balancer: {{stream_timeout_seconds: 3600}}
run: exec /usr/bin/python3 {engine} {pause_s}
"""


@pytest.fixture
def pool(tmp_path: Path, metadata: MetadataServer, shared: Path) -> Iterator[Pool]:
    pool = Pool(tmp_path, shared)
    yield pool
    for word in ("broker daemon", "broker balancer"):
        signal_all(pool.find_processes(word), signal.SIGTERM)
    for host in pool.hosts.values():
        host.power_off()


@contextlib.asynccontextmanager
async def read_all_along(url: str) -> AsyncIterator[tuple[StreamTally, list[str]]]:
    """Read streams and send short requests; at the end, let those that are open end. Yield what clients saw."""
    tally, errors, stopped = StreamTally(), list[str](), asyncio.Event()

    async def ask(client: aiohttp.ClientSession) -> None:
        while not stopped.is_set():
            async with client.get(f"{url}/name") as response:
                if response.status != 200:
                    errors.append(f"{response.status}: {await response.text()}")
            await asyncio.sleep(PAUSE_S)

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:
        readers = [
            read_streams(client, url, f"s{number}", tally, tokens=TOKENS, stopped=stopped) for number in range(STREAMS)
        ]
        running = asyncio.gather(ask(client), *readers)
        try:
            yield tally, errors
        finally:
            stopped.set()
            await running


def list_replicas(pool: Pool) -> list[Replica]:
    with pool.open_store() as store:
        return list(store.services.list_replicas("web"))


def find_address(pool: Pool, replica: Replica) -> str:
    """Return where a replica runs; empty if it does not."""
    with pool.open_store() as store:
        job = store.jobs.get(replica.job_id)
        if job is None or job.status is not JobStatus.RUNNING:
            return ""
        cluster = store.clusters.get(job.attempts[-1].cluster)
        return cluster.nodes[0].address if cluster is not None and cluster.nodes else ""


def count_ready(shell: Shell) -> int:
    (service,) = shell.read_json("serve", "status")
    return sum(each["status"] == "READY" for each in service["replicas"])


async def until(is_so: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(is_so):
        await asyncio.sleep(POLL_S)


async def lose_all(pool: Pool, url: str) -> None:
    """Lose the daemon and a host under open streams, then the balancer."""
    async with read_all_along(url) as (tally, errors):
        await until(lambda: tally.ended >= STREAMS)
        pool.kill_daemon()
        lost = find_address(pool, list_replicas(pool)[0])
        pool.lose_power(lost)
        await asyncio.to_thread(pool.run, "status")  # brings a daemon back
        await until(lambda: lost not in [find_address(pool, each) for each in list_replicas(pool)])
        await until(lambda: count_ready(pool) == 2)
    print(f"longest silence of a stream {max(tally.gaps_s):.0f} s, {tally.ended} streams")
    assert (tally.broken, tally.different, errors) == (0, 0, [])
    signal_all(pool.find_processes("broker balancer"), signal.SIGKILL)
    async with aiohttp.ClientSession() as client:
        while True:  # the daemon replaces it without a command
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"{url}/name") as response:
                    if response.status == 200:
                        break
            await asyncio.sleep(POLL_S)


def test_streams_survive_a_silent_power_loss_and_no_replica_is_double(pool: Pool, shared: Path) -> None:
    pool.wait_until(lambda: "3 of 3 hosts answer" in pool.run("check", "ssh", code=None).stdout, "all hosts are up")
    engine = shared / "engine.py"
    shutil.copy(Path(__file__).with_name("engine.py"), engine)
    engine.chmod(0o644)
    pool.run("serve", "up", pool.write("web.yaml", TASK.format(engine=engine, pause_s=PAUSE_S)), "-y", "--wait")
    pool.wait_until(lambda: count_ready(pool) == 2, "both replicas are ready")
    (service,) = pool.read_json("serve", "status")
    asyncio.run(lose_all(pool, f"http://{service['endpoint']}"))
    pool.wait_until(lambda: len(list_replicas(pool)) == 2, "the lost replica is gone for certain")
    replicas = list_replicas(pool)
    own = {each.job_id for each in replicas}
    pool.wait_until(lambda: set(pool.list_live_jobs()) == own, "no replica is double")
    places = {find_address(pool, each) for each in replicas}
    assert len(places) == 2 and all(pool.hosts[each].is_alive for each in places)
    pool.run("serve", "down", "web", "-y")
    assert pool.is_at_rest() and not pool.find_processes("broker balancer")
    for address in places:
        assert not pool.hosts[address].try_execute("pgrep", "-f", "engine.py").stdout, "no program is left"
    assert not list((pool.home / "serve").iterdir())
