"""A service of the product: `broker serve up` with its daemon, balancer and replicas as real processes."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

from tests.cli.conftest import Shell
from tests.serve.live_load import LoadTally, steady_load

POLL_S = 0.1
TASK = """\
name: web
resources: {{cpus: 1+, infra: local}}
service: {{readiness_probe: /health, replicas: {replicas}}}
envs: {{VERSION: "{version}"}}
run: exec {python} -m tests.serve.stand_in --port $BROKER_REPLICA_PORT --pause {pause_s}
"""


@dataclass
class LiveService:
    """Commands on one service whose replicas are stand-in engines."""

    shell: Shell
    replicas: int
    pause_s: float = 0.02

    def _write(self, version: int) -> str:
        text = TASK.format(replicas=self.replicas, version=version, python=sys.executable, pause_s=self.pause_s)
        return self.shell.write("web.yaml", text)

    async def _run(self, *arguments: str) -> str:
        return (await asyncio.to_thread(self.shell.run, *arguments)).stdout

    async def start(self) -> str:
        """Bring the service up; return its URL once all replicas are ready."""
        await self._run("serve", "up", self._write(1), "-y", "--wait")
        await self.until_version(1)
        (service,) = json.loads(await self._run("serve", "status", "--json"))
        return f"http://{service['endpoint']}"

    async def until_version(self, version: int) -> None:
        """Wait until all replicas are of this version and ready, and no other is left."""
        while not await asyncio.to_thread(self._has_version, version):
            await asyncio.sleep(POLL_S)

    def _has_version(self, version: int) -> bool:
        with self.shell.open_store() as store:
            rows = store.services.list_replicas("web")
        return (
            [row.version for row in rows if row.ready_s is not None]
            == [version] * self.replicas
            == [row.version for row in rows]
        )

    async def update(self, version: int) -> None:
        """Update to a version and wait until its replicas have replaced the others."""
        await self._run("serve", "update", "web", self._write(version), "-y")
        await self.until_version(version)

    async def stop(self) -> None:
        """Take the service down; its machines are gone afterwards."""
        await self._run("serve", "down", "--all", "-y")


async def roll(service: LiveService, *, updates: int, clients: int, streams: int) -> LoadTally:
    """Bring the service up, update it this many times under load, and take it down."""
    url = await service.start()
    try:
        async with steady_load(url, clients=clients, streams=streams) as tally:
            for version in range(2, updates + 2):
                await service.update(version)
    finally:
        await service.stop()
    return tally
