"""A balancer and replicas as processes of their own, which can be killed with SIGKILL while clients read streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import aiohttp

from broker.agent import FOLDER
from broker.runtime.credentials import make_credential
from broker.serve.credentials import CLIENT_SECRET, make_secrets
from broker.serve.files import Backend, Load, Routing, ServiceFolder, read_file, write_file
from broker.serve.replicas import draw_free_port
from broker.types import ReadinessProbe, TlsFiles
from tests.serve.live_load import LoadTally, StreamTally, read_streams, steady_load

PROBE = ReadinessProbe(path="/health", interval_s=0.05, timeout_s=15)
STAND_IN = "tests.serve.stand_in"
POLL_S = 0.01


def read_cpu_s(pid: int) -> float:
    """Return the processor time of a process in seconds (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_resident_bytes(pid: int) -> int:
    """Return the resident memory of a process (Linux)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


ENTRANCE = """\
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import agent_entrance
pem, client, port, program_port = Path(sys.argv[2]), Path(sys.argv[3]).read_text(), *map(int, sys.argv[4:])
agent_entrance.serve("127.0.0.1", port, program_port, agent_entrance.make_context(pem, client))
"""


@dataclass
class Replica:
    """An engine at `port`; the balancer connects to the backend's port, where an `entrance` may precede the engine."""

    backend: Backend
    port: int
    process: subprocess.Popen[bytes]
    entrance: subprocess.Popen[bytes] | None = None


def _make_tls_files(path: Path) -> TlsFiles:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(make_credential("the bed's balancer", valid=timedelta(days=1)).value)
    return TlsFiles(key_path=str(path), certificate_path=str(path))


class LiveBed:
    """Replica processes behind a balancer process. `pause_s` is the time between two tokens of a stream.

    `is_encrypted`: each replica has the entrance of a node, as a process of its own. `is_https`: clients use TLS.
    `engine` is the module of the replicas' program.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pause_s: float = 0.0,
        is_encrypted: bool = False,
        is_https: bool = False,
        engine: str = STAND_IN,
    ) -> None:
        self.folder, self.pause_s, self.is_encrypted = ServiceFolder(path=folder), pause_s, is_encrypted
        self._engine = engine
        self.replicas: dict[int, Replica] = {}
        self.draining: set[int] = set()
        self.headers: dict[str, str] = {}  # of requests of clients
        self.routing = Routing(generation=1, host="127.0.0.1", port=draw_free_port(), probe=PROBE)
        self.url = f"{'https' if is_https else 'http'}://127.0.0.1:{self.routing.port}"
        if is_https:
            self.routing = replace(self.routing, tls=_make_tls_files(folder / "client-facing.pem"))
        self._balancer: subprocess.Popen[bytes] | None = None
        self._drawn = 0

    @property
    def pid(self) -> int:
        assert self._balancer is not None
        return self._balancer.pid

    @contextlib.asynccontextmanager
    async def run(self, count: int) -> AsyncIterator[None]:
        """Start the replicas and the balancer; kill what is left at the end."""
        try:
            for _ in range(count):
                self.add(version=1)
            self.publish()
            self._balancer = self._launch_balancer()
            await self.until_ready(count)
            yield
        finally:
            entrances = [each.entrance for each in self.replicas.values()]
            for process in (*(each.process for each in self.replicas.values()), *entrances, self._balancer):
                if process is not None:
                    process.kill()
                    process.wait()

    def _launch_balancer(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "broker", "balancer", str(self.folder.path)]
        return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def replace_balancer(self) -> None:
        """Kill the balancer with SIGKILL and start another."""
        assert self._balancer is not None
        self._balancer.kill()
        self._balancer.wait()
        self._balancer = self._launch_balancer()
        while (load := self.read_load()) is None or load.pid != self.pid:
            await asyncio.sleep(POLL_S)
        await self.until_ready(len(self.replicas))

    def add(self, *, version: int) -> int:
        """Start a replica on a free port; return its number. It gets requests once it is published."""
        self._drawn += 1
        backend = Backend(
            number=self._drawn, version=version, host="127.0.0.1", port=draw_free_port(),
            is_encrypted=self.is_encrypted,
        )  # fmt: skip
        port = draw_free_port() if self.is_encrypted else backend.port
        replica = Replica(backend, port, self._launch(port))
        if self.is_encrypted:
            replica.entrance = self._launch_entrance(backend.port, port)
        self.replicas[self._drawn] = replica
        return self._drawn

    def _launch_entrance(self, port: int, program_port: int) -> subprocess.Popen[bytes]:
        secrets = make_secrets(self.folder, "bed")
        pem, client = self.folder.replica_pem, self.folder.path / "client.pem"
        client.write_text(secrets[CLIENT_SECRET].value)
        words = [str(FOLDER), str(pem), str(client), str(port), str(program_port)]
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", ENTRANCE, *words])

    def _launch(self, port: int) -> subprocess.Popen[bytes]:
        pause = ["--pause", str(self.pause_s)] if self.pause_s else []
        return subprocess.Popen([sys.executable, "-m", self._engine, "--port", str(port), *pause])

    def kill(self, number: int) -> None:
        """Kill the engine with SIGKILL; an entrance stays, as it does where only the program dies."""
        self.replicas[number].process.send_signal(signal.SIGKILL)
        self.replicas[number].process.wait()

    def restart(self, number: int) -> None:
        """Start a killed replica again at its port."""
        replica = self.replicas[number]
        replica.process = self._launch(replica.port)

    def publish(self) -> None:
        """Write the routing file, as the service's controller does."""
        backends = tuple(
            replace(each.backend, is_draining=number in self.draining) for number, each in self.replicas.items()
        )
        self.routing = replace(self.routing, generation=self.routing.generation + 1, backends=backends)
        write_file(self.folder.routing, self.routing)

    def share(self, shares: dict[int, float]) -> None:
        """Publish with other shares of versions."""
        self.routing = replace(self.routing, shares=shares)
        self.publish()

    def read_load(self) -> Load | None:
        return read_file(self.folder.load, Load)

    async def until_ready(self, count: int) -> None:
        """Wait until the balancer acts on the newest routing file, and this many replicas are ready."""
        while True:
            load = self.read_load()
            if load and load.generation == self.routing.generation:
                ready = [number for number, each in load.replicas.items() if each.is_ready]
                if len([number for number in ready if number not in self.draining]) >= count:
                    return
            await asyncio.sleep(POLL_S)

    async def kill_at_random(self, kills: int, draw: random.Random, *, ready_min: int) -> None:
        """Kill a random replica that has streams, this many times; each is started again at once."""
        for _ in range(kills):
            await self.until_ready(ready_min)
            load = self.read_load()
            assert load is not None
            busy = [number for number, each in load.replicas.items() if each.is_ready and each.in_flight]
            number = draw.choice(sorted(busy) or sorted(self.replicas))
            self.kill(number)
            while (load := self.read_load()) and load.replicas[number].is_ready:
                await asyncio.sleep(POLL_S)
            self.restart(number)
        await self.until_ready(ready_min)

    async def replace_all(self, version: int) -> None:
        """Replace the replicas one by one, as a rolling update does: start, wait, drain, end."""
        for number in list(self.replicas):
            count = len(self.replicas)
            self.add(version=version)
            self.publish()
            await self.until_ready(count + 1)
            self.draining.add(number)
            self.publish()
            while not (
                (load := self.read_load())
                and load.generation == self.routing.generation
                and not load.replicas[number].in_flight
            ):
                await asyncio.sleep(POLL_S)
            self.kill(number)
            if (entrance := self.replicas.pop(number).entrance) is not None:
                entrance.kill()
                entrance.wait()
            self.draining.discard(number)
            self.publish()


async def survive(bed: LiveBed, *, streams: int, kills: int, tokens: int, seed: int) -> StreamTally:
    """Keep this many streams open while replicas are killed; let the open ones end."""
    tally = StreamTally()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        readers = [
            asyncio.ensure_future(read_streams(client, bed.url, f"s{number}", tally, tokens=tokens))
            for number in range(streams)
        ]
        await bed.kill_at_random(kills, random.Random(seed), ready_min=2)
        ended = tally.ended
        while tally.ended < ended + streams and not tally.broken:
            await asyncio.sleep(POLL_S)
        for each in readers:
            each.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return tally


async def update(bed: LiveBed, *, updates: int, clients: int, streams: int) -> LoadTally:
    """Replace all replicas this many times under load."""
    async with steady_load(bed.url, clients=clients, streams=streams) as tally:
        for version in range(2, updates + 2):
            await bed.replace_all(version)
    return tally
