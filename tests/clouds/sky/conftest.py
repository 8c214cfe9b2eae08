"""SkyPilot's API server, simulated by the clock: requests that take time, a table of clusters."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from broker.clouds.sky.cloud import SkyCloud
from broker.clouds.sky.errors import SkyError, translate
from broker.clouds.sky.gangs import Request, ServerState, SkyClusterRow
from broker.clouds.sky.state_file import SkyStateFile
from broker.errors import CloudError, UnknownOutcomeError
from broker.types import Node, Offer
from tests.clouds.clock_jumps import JumpingClock
from tests.clouds.contract import Bed

ACCEPT_S, BOOT_S, DOWN_S = 2.0, 180.0, 30.0  # a request waits for a worker; a cluster comes up; it goes down
IDS = itertools.count(1)


@dataclass
class Job:
    """A request to the server, done at `end_s` unless cancelled."""

    id: str
    verb: str
    cluster: str
    begun_s: float
    end_s: float
    task: Mapping[str, Any] = field(default_factory=dict)
    fault: SkyError | None = None
    status: str = "RUNNING"


class FakeEngine:
    """Follows SkyPilot's rules: one cluster per name, INIT while it comes up, in the table until confirmed gone."""

    def __init__(self, clock: JumpingClock, folder: Path, enabled: Sequence[str] = ("lambda",)) -> None:
        self.clock, self.folder = clock, folder
        self.enabled = list(enabled)
        self.jobs: list[Job] = []
        self.clusters: dict[str, SkyClusterRow] = {}
        self.launched: list[tuple[str, Mapping[str, Any]]] = []
        self.refreshed: list[Sequence[str]] = []
        self.refusal: SkyError | None = None  # of every launch from now on
        self.refuses_late = False  # after machines were created
        self.loses_next_answer = False
        self.account = "http://127.0.0.1:46580 as 1234abcd"
        self.broken: CloudError | None = None  # the answer to every `end` and `refresh`

    async def hello(self) -> Mapping[str, str]:
        return {"version": "0.14.1", "url": "http://127.0.0.1:46580"}

    async def list_enabled(self) -> Sequence[str]:
        return self.enabled

    async def check(self, cloud: str) -> tuple[bool, str]:
        said = "Checking credentials.\n\x1b[2m  Lambda: disabled\x1b[0m\n    Reason [compute]: no key in\n      ~/.keys"
        return cloud in self.enabled, f"{said}\n\nNo infra to check/enabled.\n"

    async def launch(self, name: str, task: Mapping[str, Any], *, is_dry: bool = False) -> str:
        await asyncio.sleep(0)
        now_s = self.clock.now_s()
        fault = self.refusal
        took_s = ACCEPT_S + (BOOT_S if fault is None or self.refuses_late else 1.0)
        job = Job(f"r{next(IDS)}", "launch", name, now_s, now_s + took_s, task, fault)
        self.jobs.append(job)
        self.launched.append((name, task))
        if self.loses_next_answer:
            self.loses_next_answer = False
            raise UnknownOutcomeError("SkyPilot did not answer `launch` within 120 s")
        return job.id

    async def fetch_state(self, prefix: str, request_ids: Sequence[str]) -> ServerState:
        await asyncio.sleep(0)
        self._advance()
        shown = [job for job in self.jobs if job.id in request_ids or job.status == "RUNNING"]
        return ServerState(
            clusters=[seen for seen in self.clusters.values() if seen.name.startswith(prefix)],
            requests=[
                Request(id=job.id, verb=job.verb, cluster=job.cluster, status=job.status)
                for job in shown
                if job.cluster.startswith(prefix)
            ],
            account=self.account,
        )

    async def refresh(self, names: Sequence[str]) -> None:
        if self.broken is not None:
            raise self.broken
        self.refreshed.append(names)

    async def fetch(self, request_id: str) -> None:
        job = next(job for job in self.jobs if job.id == request_id)
        if job.fault is not None:
            raise translate(job.fault)

    async def end(self, name: str) -> None:
        if self.broken is not None:
            raise self.broken
        self._advance()
        live = [job for job in self.jobs if job.cluster == name and job.status == "RUNNING"]
        for job in live:
            job.status = "CANCELLED" if job.verb == "launch" else job.status
        if name in self.clusters and not any(job.verb == "down" for job in live):
            now_s = self.clock.now_s()
            self.jobs.append(Job(f"r{next(IDS)}", "down", name, now_s, now_s + DOWN_S))

    async def stop(self, name: str) -> None:
        self._put(name, status="STOPPED")

    async def write_ssh(self, name: str) -> Path | None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Host {name}\n  # {self.clusters[name].launched_at}\n")
        return path

    def vanish(self, name: str) -> None:
        """Remove all machines; SkyPilot has noticed."""
        del self.clusters[name]

    def _advance(self) -> None:
        now_s = self.clock.now_s()
        for job in self.jobs:
            if job.status != "RUNNING":
                continue
            makes_machines = job.verb == "launch" and (job.fault is None or self.refuses_late)
            if makes_machines and now_s >= job.begun_s + ACCEPT_S and self._status(job.cluster) != "UP":
                self._put(job.cluster, status="INIT", task=job.task)
            if now_s >= job.end_s:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        job.status = "FAILED" if job.fault else "SUCCEEDED"
        if job.verb == "down":
            self.clusters.pop(job.cluster, None)
        elif not job.fault:
            self._put(job.cluster, status="UP", task=job.task)

    def _status(self, name: str) -> str:
        return self.clusters[name].status if name in self.clusters else ""

    def _put(self, name: str, *, status: str, task: Mapping[str, Any] | None = None) -> None:
        before = self.clusters.get(name)
        if task is None:
            assert before is not None, f"there is no cluster {name}"
            self.clusters[name] = replace(before, status=status)
            return
        resources = task["resources"]
        cloud, _, region = resources["infra"].partition("/")
        nodes = task["num_nodes"]
        is_new = before is None or before.status == "STOPPED"
        self.clusters[name] = SkyClusterRow(
            name=name,
            status=status,
            cloud=cloud,
            region=region,
            nodes=nodes,
            labels=resources["labels"],
            launched_at=self.clock.now_s() if before is None or is_new else before.launched_at,
            addresses=[f"10.0.0.{rank + 4}" for rank in range(nodes)] if status == "UP" else [],
        )


class SkyBed(Bed):
    """For the contract of all clouds."""

    look_s = 1.0

    def __init__(self, folder: Path) -> None:
        self.clock = JumpingClock()
        self.folder = folder
        self.engine = FakeEngine(self.clock, folder / "generated")
        self.offer = make_offer()
        self.cloud = self.reopen()

    def reopen(self) -> SkyCloud:
        return SkyCloud("lambda", engine=self.engine, state_file=SkyStateFile(self.folder / "sky"), clock=self.clock)

    def fill(self) -> None:
        history = (SkyError(type="CloudError", codes=("instance-operations/launch/insufficient-capacity",)),)
        self.engine.refusal = SkyError(type="ResourcesUnavailableError", message="Failed", history=history)

    def exhaust_quota(self) -> None:
        history = (SkyError(type="ProvisionerError", message="CPUS: 8 of 8", codes=("QUOTA_EXCEEDED",)),)
        self.engine.refusal = SkyError(type="ResourcesUnavailableError", message="Failed", history=history)

    def log_out(self) -> None:
        self.engine.enabled = []

    def lose_next_answer(self) -> None:
        self.engine.loses_next_answer = True

    async def end_from_inside(self, node: Node) -> None:
        self.engine.vanish(node.id.partition("/")[0])


def make_offer(**changes: Any) -> Offer:
    values = {
        "cloud": "lambda",
        "region": "us-east-1",
        "zone": None,
        "instance_type": "gpu_1x_a10",
        "vcpus": 30,
        "memory_gib": 200,
        "accelerator": "A10",
        "accelerator_count": 1,
        "ondemand_usd_hour": 0.75,
        "spot_usd_hour": 0.25,
    }
    return Offer(**(values | changes))


@pytest.fixture
def bed(tmp_path: Path) -> SkyBed:
    return SkyBed(tmp_path)
