from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from broker.clock import SystemClock
from broker.clouds.gcp import login
from broker.clouds.gcp.cloud import GcpCloud
from broker.clouds.gcp.login import Login
from broker.clouds.gcp.state_file import GcpStateFile
from broker.types import Node, NodeRequest, Offer, Placement
from tests.clouds.clock_jumps import JumpingClock
from tests.clouds.contract import Bed
from tests.testbed.gce import FakeGce
from tests.testbed.gce_server import serve

OWNER = "0123456789ab"
Result = TypeVar("Result")


class Bench:
    """A fake Compute Engine, and a cloud that talks to it through Google's own library."""

    def __init__(self, gce: FakeGce, url: str, folder: Path) -> None:
        self.gce, self.url, self.folder = gce, url, folder
        self.cloud = self.make_cloud()

    def make_cloud(self, **changes: Any) -> GcpCloud:
        """Make a cloud as another process would, over the same state folder."""
        mine = Login(**({"project": self.gce.project, "source": "test", "endpoint": self.url} | changes))
        return GcpCloud(mine, state_file=GcpStateFile(self.folder), clock=SystemClock())

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run(work)


class GcpBed(Bed):
    """For the contract of all clouds."""

    def __init__(self, gce: FakeGce, url: str, folder: Path, clock: JumpingClock) -> None:
        self.gce, self.folder, self.clock = gce, folder, clock
        self.login = Login(project=gce.project, source="test", endpoint=url)
        self.offer = make_offer("n1-standard-4+1xT4")
        self.cloud = self.reopen()

    def reopen(self) -> GcpCloud:
        return GcpCloud(self.login, state_file=GcpStateFile(self.folder), clock=self.clock)

    def fill(self) -> None:
        self.gce.capacity["us-central1-a", "n1-standard-4"] = 0

    def exhaust_quota(self) -> None:
        self.gce.limits.update({("us-central1", f"{kind}NVIDIA_T4_GPUS"): 1 for kind in ("", "PREEMPTIBLE_")})

    def log_out(self) -> None:
        self.gce.allowed = set()

    def lose_next_answer(self) -> None:
        self.gce.fail("POST", "/instances", has_effect=True)

    def throttle_next_create(self) -> None:
        self.gce.fail("POST", "/instances", code="rateLimitExceeded", status=403)

    def leave_room(self, count: int) -> None:
        self.gce.capacity["us-central1-a", "n1-standard-4"] = count

    def list_orphans(self) -> list[str]:
        """List everything except the owner's one rule that denies other ssh, which is free of charge and stays."""
        return [name for name in self.gce.firewalls if not name.endswith("-shut")]

    def list_untagged(self) -> list[str]:
        told = {name: each["description"] for name, each in self.gce.firewalls.items()}
        labels = {}
        for (_, name), each in self.gce.instances.items():
            labels[name] = each["labels"]
            labels[f"disk of {name}"] = each["disks"][0]["initializeParams"].get("labels", {})
        plain = [name for name, text in told.items() if json.loads(text).get("owner") != OWNER]
        return plain + [name for name, each in labels.items() if not {"broker-owner", "broker-cluster"} <= set(each)]

    async def preempt(self, node: Node) -> None:
        self.gce.preempt(node.id.rpartition("/")[2])

    async def end_from_inside(self, node: Node) -> None:
        self.gce.shut_down(node.id.rpartition("/")[2])


def make_offer(instance_type: str = "e2-standard-4", zone: str | None = "us-central1-a", **changes: Any) -> Offer:
    accelerator, count = None, 0
    if "+" in instance_type:
        number, _, accelerator = instance_type.partition("+")[2].partition("x")
        count = int(number)
    return Offer(
        **(
            {
                "cloud": "gcp",
                "region": "us-central1",
                "zone": zone,
                "instance_type": instance_type,
                "vcpus": 4,
                "memory_gib": 16,
                "accelerator": accelerator,
                "accelerator_count": count,
                "ondemand_usd_hour": 1.0,
                "spot_usd_hour": 0.25,
            }
            | changes
        )
    )


def make_request(
    offer: Offer | None = None, *, token: str = "0" * 32, is_spot: bool = True, node_count: int = 1, **changes: Any
) -> NodeRequest:
    placement = Placement(offer=offer or make_offer(), is_spot=is_spot, node_count=node_count)
    values = {"owner": OWNER, "cluster": "train", "attempt": 1, "boot": "#!/bin/sh\necho hello\n"}
    return NodeRequest(**(values | {"token": token, "placement": placement} | changes))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    gce = FakeGce()
    with serve(gce) as url:
        yield Bench(gce, url, tmp_path / "gcp")


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[GcpBed]:
    clock = JumpingClock()
    gce = FakeGce(now=clock.now_s, list_lag_s=5.0)
    with serve(gce) as url:
        yield GcpBed(gce, url, tmp_path / "gcp", clock)


@pytest.fixture
def request_of() -> Callable[..., NodeRequest]:
    return make_request


@pytest.fixture
def offer_of() -> Callable[..., Offer]:
    return make_offer


@pytest.fixture
def no_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Remove all logins; return the folder where gcloud would keep one."""
    names = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT", "BROKER_GCP_ENDPOINT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "gcloud"
    folder.mkdir()
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(folder))
    monkeypatch.setattr(login, "PRODUCT_NAME", tmp_path / "none")
    return folder
