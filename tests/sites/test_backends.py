"""Nodes of a cloud that became native, or ceased to be, while they run: only the other backend can see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.clock import SystemClock
from broker.clouds.kubernetes.cloud import KubernetesCloud
from broker.clouds.sky.cloud import SkyCloud
from broker.clouds.sky.state_file import SkyStateFile
from broker.clouds.slurm.cloud import SlurmCloud
from broker.clouds.ssh.cloud import SshCloud
from broker.errors import AuthError
from broker.sites.kubernetes import KubernetesContext
from broker.sites.login import SshLogin
from broker.sites.pools import Host
from broker.sites.slurm import SlurmCluster
from broker.types import Node, NodeState

NODE = Node(
    id="b-0wner-x-00ff/0", cloud="", owner="0wner", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING,
    region="lab", handle="sky://b-0wner-x-00ff/0",
)  # fmt: skip


async def refuse(*_: object) -> Any:
    raise AssertionError("nothing is called for a node that this backend does not know")


def make_pool(folder: Path) -> Any:
    hosts = [Host(pool="lab", login=SshLogin(host="h1"))]
    return SshCloud(lambda: hosts, folder=folder, clock=SystemClock(), run=refuse)


def make_slurm(folder: Path) -> Any:
    return SlurmCloud(lambda: ({"lab": SlurmCluster(name="lab")}, {}), clock=SystemClock(), run=refuse)


def make_kubernetes(folder: Path) -> Any:
    contexts = {"lab": KubernetesContext(name="lab", context="lab")}
    return KubernetesCloud(lambda: (contexts, {}), clock=SystemClock(), run=refuse)


@pytest.mark.parametrize(
    ("name", "make", "file"),
    [
        ("ssh", make_pool, "ssh_pools.yaml"),
        ("slurm", make_slurm, "slurm.yaml"),
        ("kubernetes", make_kubernetes, "kubernetes.yaml"),
    ],
)
def test_nodes_of_skypilot_do_not_count_as_gone_once_the_cloud_is_native(
    tmp_path: Path, name: str, make: Callable[[Path], Any], file: str
) -> None:
    cloud, node = make(tmp_path), replace(NODE, cloud=name)
    found = cloud.find_removal("lab", node)
    assert isinstance(found, AuthError) and f"move `{file}` away" in found.hints[0]
    with pytest.raises(AuthError, match="launched through SkyPilot"):
        asyncio.run(cloud.terminate_nodes([node]))


def test_native_nodes_do_not_count_as_gone_once_their_file_is_missing(tmp_path: Path) -> None:
    cloud = SkyCloud("kubernetes", engine=Any, state_file=SkyStateFile(tmp_path), clock=SystemClock())  # type: ignore[arg-type]
    node = replace(NODE, id="pod-1", cloud="kubernetes", handle="k8s://lab/ml/pod-1")
    found = cloud.find_removal("lab", node)
    assert isinstance(found, AuthError) and "restore `kubernetes.yaml`" in found.hints[0]
    with pytest.raises(AuthError, match="launched natively"):
        asyncio.run(cloud.terminate_nodes([node]))
    assert cloud.find_removal("lab", replace(NODE, cloud="kubernetes")) is None
    assert cloud.find_removal("lab", replace(NODE, cloud="lambda")) is None
