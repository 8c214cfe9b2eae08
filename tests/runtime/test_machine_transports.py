"""Nodes that are process trees on a foreign host, reached through a relay; here the host is this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from local_gang import Rig

from broker.clock import SystemClock
from broker.config import Config
from broker.errors import TransientError, UnreachedError
from broker.runtime.transports import kubernetes, pool, slurm
from broker.runtime.transports.machine import MachineTransport
from broker.sites.openssh import Completed
from broker.types import Node, NodeState

NODE = Node(
    id="n", cloud="x", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING, token="t", address="",
    handle="",
)  # fmt: skip


class Here(MachineTransport):
    """Handles are the folders of the local cloud's nodes."""

    def _make_argv(self, node: Node, command: Sequence[str], *, has_terminal: bool = False) -> Sequence[str]:
        return command

    def _find_folder(self, node: Node) -> str:
        return node.handle


def test_a_command_runs_in_the_node_with_its_input(rig: Rig) -> None:
    async def act() -> None:
        node = (await rig.make_cluster()).nodes[0]
        done = await Here(clock=SystemClock()).run(node, ["sh", "-c", "cat; pwd"], timeout_s=300.0, stdin=b"in ")
        assert done.returncode == 0 and done.stdout.decode().startswith("in /")

    asyncio.run(act())


def test_a_host_that_has_a_python_by_another_name_only_is_reached(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"sh": shutil.which("sh"), "env": shutil.which("env"), "python3.9": os.path.realpath(sys.executable)}
    for name, target in names.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(target or name)

    async def act() -> None:
        node = (await rig.make_cluster()).nodes[0]
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        done = await Here(clock=SystemClock()).run(node, ["echo", "up"], timeout_s=300.0)
        assert (done.returncode, done.stdout) == (0, b"up\n")

    asyncio.run(act())


def test_a_host_whose_login_shell_prints_is_reached(rig: Rig) -> None:
    class Noisy(Here):
        def _make_argv(self, node: Node, command: Sequence[str], *, has_terminal: bool = False) -> Sequence[str]:
            return ["sh", "-c", 'echo "Welcome to host"; exec "$@"', "sh", *command]

    async def act() -> None:
        node = (await rig.make_cluster()).nodes[0]
        transport = Noisy(clock=SystemClock())
        done = await transport.run(node, ["echo", "up"], timeout_s=300.0)
        assert (done.returncode, done.stdout) == (0, b"up\n")
        stream = await transport.open_stream(node, ["echo", '{"a": 1}'])
        assert await stream.read() == {"a": 1}
        stream.close()

    asyncio.run(act())


def test_a_node_that_never_answered_is_distinguished_from_one_that_is_gone(rig: Rig) -> None:
    async def act() -> None:
        transport = Here(clock=SystemClock())
        node = (await rig.make_cluster()).nodes[0]
        with pytest.raises(UnreachedError, match="cannot be reached"):
            await transport.run(replace(node, id="other", handle="/nowhere"), ["true"], timeout_s=300.0)
        await transport.run(node, ["true"], timeout_s=300.0)
        with pytest.raises(TransientError, match="cannot be reached") as caught:
            await transport.run(replace(node, handle="/nowhere"), ["true"], timeout_s=300.0)
        assert not isinstance(caught.value, UnreachedError)

    asyncio.run(act())


def test_a_shell_on_a_silent_node_is_abandoned_within_a_minute() -> None:
    limits_s: list[float] = []

    class Silent(Here):
        async def run(self, node: Node, argv: Sequence[str], *, timeout_s: float, **options: object) -> Completed:
            limits_s.append(timeout_s)
            raise TransientError(f"node `{node.id}` did not answer within {timeout_s:g} s")

    with pytest.raises(TransientError, match="did not answer"):
        asyncio.run(Silent(clock=SystemClock()).open_shell(NODE))
    assert limits_s and max(limits_s) <= 60.0


@pytest.mark.parametrize(
    ("module", "handle", "file"),
    [
        (pool, "pool://lab/10.0.0.1/n", "ssh_pools.yaml"),
        (slurm, "slurm://tiger/7/host/n", "slurm.yaml"),
        (kubernetes, "k8s://lab/ml/n", "kubernetes.yaml"),
    ],
)
def test_a_host_that_is_no_longer_in_the_file_is_named(module: object, handle: str, file: str, tmp_path: Path) -> None:
    transport: MachineTransport = module.make_transport(Config(home=tmp_path, owner="me"), clock=SystemClock())  # type: ignore[attr-defined]
    with pytest.raises(TransientError, match=f"of node `n` is not in `{file}`"):
        asyncio.run(transport.run(replace(NODE, handle=handle), ["true"], timeout_s=300.0))


def test_the_hosts_of_a_pool_are_logged_in_to_as_its_file_says(tmp_path: Path) -> None:
    (tmp_path / "ssh_pools.yaml").write_text("lab:\n  user: ada\n  hosts:\n    - ip: 10.0.0.1\n")
    transport = pool.make_transport(Config(home=tmp_path, owner="me"), clock=SystemClock())
    argv = transport._make_argv(replace(NODE, handle="pool://lab/10.0.0.1/n"), ["echo", "a b"])
    assert "10.0.0.1" in argv and argv[-1] == "exec echo 'a b'"


def test_a_host_that_is_added_while_a_daemon_runs_is_logged_in_to(tmp_path: Path) -> None:
    file = tmp_path / "ssh_pools.yaml"
    file.write_text("lab:\n  hosts: [h1]\n")
    transport = pool.make_transport(Config(home=tmp_path, owner="me"), clock=SystemClock())
    assert "h1" in transport._make_argv(replace(NODE, handle="pool://lab/h1/n"), ["true"])
    file.write_text("lab:\n  hosts: [h1, h2]\n")
    os.utime(file, (1000.0, 1000.0))  # it changed long ago
    assert "h2" in transport._make_argv(replace(NODE, handle="pool://lab/h2/n"), ["true"])


def test_a_file_that_is_being_saved_neither_hides_nor_fails_its_nodes(tmp_path: Path) -> None:
    file = tmp_path / "ssh_pools.yaml"
    file.write_text("lab:\n  hosts: [h1]\n")
    transport = pool.make_transport(Config(home=tmp_path, owner="me"), clock=SystemClock())
    transport._make_argv(replace(NODE, handle="pool://lab/h1/n"), ["true"])
    for text in ("", "lab:\n  hos", "lab: ["):
        file.write_text(text)
        assert "h1" in transport._make_argv(replace(NODE, handle="pool://lab/h1/n"), ["true"])
    (tmp_path / "ssh_pools.yaml").write_text("lab: [")
    fresh = pool.make_transport(Config(home=tmp_path, owner="me"), clock=SystemClock())
    with pytest.raises(TransientError):
        fresh._make_argv(replace(NODE, handle="pool://lab/h1/n"), ["true"])


def test_allocation_in_which_broker_runs_does_not_reach_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its SLURM_GPUS or SLURM_EXPORT_ENV, srun fails ("Invalid generic resource", "hostname: No such file")."""
    (tmp_path / "slurm.yaml").write_text("here: {}\n")
    for name in ("SLURM_GPUS", "SLURM_EXPORT_ENV", "SLURMD_NODENAME", "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    transport = slurm.make_transport(Config(home=tmp_path, owner="me"), clock=SystemClock())
    argv = transport._make_argv(replace(NODE, handle="slurm://here/7/n0/n"), ["env"])
    assert argv[0] == "env" and "--jobid=7" in argv
    removed = {name for option, name in pairwise(argv[: argv.index("srun")]) if option == "-u"}
    assert removed >= {"SLURM_GPUS", "SLURM_EXPORT_ENV", "SLURMD_NODENAME"} and "SLURM_CONF" not in removed


def test_pods_are_reached_with_the_context_and_namespace_of_their_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    (tmp_path / "kubernetes.yaml").write_text("arn:aws:eks:cluster/a: {namespace: new, kubeconfig: /k}\n")
    transport = kubernetes.make_transport(Config(home=tmp_path, owner="me"), clock=SystemClock())
    node = replace(NODE, handle="k8s://arn%3Aaws%3Aeks%3Acluster%2Fa/old/pod-1", id="pod-1")
    argv = transport._make_argv(node, ["sh", "-c", "true"], has_terminal=True)
    assert argv[:3] == ["/bin/kubectl", "--context=arn:aws:eks:cluster/a", "--kubeconfig=/k"]
    assert argv[3:7] == ["exec", "-i", "-t", "--quiet"]
    assert argv[7:] == ["--namespace=old", "pod-1", "--container=node", "--", "sh", "-c", "true"]
