"""Hosts of a pool without sshd: each is a home folder on this machine, with its own lock."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from broker.clock import SystemClock
from broker.clouds.base import Cloud
from broker.clouds.ssh.cloud import SshCloud
from broker.clouds.ssh.hosts import COMMAND
from broker.errors import AuthError, TransientError
from broker.sites.facts import Machine
from broker.sites.login import SshLogin
from broker.sites.openssh import Completed, call
from broker.sites.pools import Host, list_offers
from broker.types import Node
from tests.clouds.contract import Bed

SIZE = Machine(vcpus=4, memory_gib=16)


class PoolBed(Bed):
    """A pool `lab` of hosts h1, h2 ... Those in `dead` do not answer; `answers_lost` of the next claims get lost."""

    look_s = 0.2  # each look starts a Python on every host

    def __init__(self, root: Path, *, host_count: int = 3) -> None:
        self.root = root
        self.clock = SystemClock()
        self.hosts: list[Host] = [
            Host(pool="lab", login=SshLogin(host=f"h{number}"), machine=SIZE, usd_hour=0.1)
            for number in range(1, host_count + 1)
        ]
        self.dead: set[str] = set()
        self.taken: list[IO[str]] = []
        self.answers_lost = 0
        self.is_logged_out = False
        self.cloud = self.pool = self.make_cloud()
        self.offer = replace(list_offers(self.hosts)[0], spot_usd_hour=0.03)

    def make_cloud(self) -> SshCloud:
        return SshCloud(
            lambda: self.hosts,
            folder=self.root / "state",
            clock=self.clock,
            run=self.run_on_host,
            find_lock=lambda host: str(self.find_home(host.name) / "locks" / "lock"),
        )

    def reopen(self) -> Cloud:
        return self.make_cloud()

    def find_home(self, name: str) -> Path:
        return self.root / "hosts" / name

    async def run_on_host(self, host: Host, program: bytes, timeout_s: float) -> Completed:
        if self.is_logged_out:
            raise AuthError(f"host `{host.name}` cannot be reached: Permission denied", hints=("ssh-copy-id",))
        if host.name in self.dead:
            raise TransientError(f"host `{host.name}` cannot be reached: timed out")
        home = self.find_home(host.name)
        home.mkdir(parents=True, exist_ok=True)
        env = {"HOME": str(home), "PATH": os.pathsep.join((f"{sys.base_prefix}/bin", os.environ["PATH"]))}
        done = await call(["sh", "-c", COMMAND], stdin=program, timeout_s=timeout_s, what=host.name, env=env)
        if self.answers_lost and b'"verb": "claim"' in program:
            self.answers_lost -= 1
            raise TransientError(f"host `{host.name}` did not answer")
        return done

    def fill(self) -> None:
        self.leave_room(0)

    def leave_room(self, count: int) -> None:
        """Take the other hosts, as another user's broker does."""
        for host in self.hosts[count:]:
            path = self.find_home(host.name) / "locks" / "lock"
            path.parent.mkdir(parents=True)
            self.taken.append(path.open("w"))
            fcntl.flock(self.taken[-1], fcntl.LOCK_EX)

    def log_out(self) -> None:
        self.is_logged_out = True

    def lose_next_answer(self) -> None:
        self.answers_lost = 1

    async def end_from_inside(self, node: Node) -> None:
        (self.find_folder(node) / "home/.broker/shutdown").write_text("lease")

    def find_folder(self, node: Node) -> Path:
        return self.find_home(node.handle.split("/")[3]) / ".broker-pool" / node.id

    def clean_up(self, owners: Sequence[str]) -> None:
        self.dead, self.is_logged_out = set(), False
        for each in self.taken:
            each.close()

        async def end_all() -> None:
            for owner in owners:
                await self.pool.terminate_nodes(tuple(await self.pool.list_nodes(owner)))

        asyncio.run(end_all())
