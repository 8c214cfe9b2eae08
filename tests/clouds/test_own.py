"""`ssh`, `slurm` and `kubernetes` are native where the state folder has their file, else through SkyPilot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.clouds import CHECKS, CLOUDS, own
from broker.clouds.kubernetes.cloud import KubernetesCloud
from broker.clouds.slurm.cloud import SlurmCloud
from broker.clouds.ssh.cloud import SshCloud
from broker.config import Config
from broker.sites import FILES, find_file, list_native
from broker.sites.facts import Machine, find_facts, write_facts
from broker.sites.offers import list_own_offers
from broker.types import Offer

POOLS = "lab: {hosts: [a, {ip: b, cpus: 4, memory: 16}]}\n"


def test_without_files_no_cloud_is_native(tmp_path: Path) -> None:
    config = Config(home=tmp_path, owner="me")
    assert list_native(tmp_path) == () and not list_own_offers(tmp_path)
    assert own.make_ssh(config, clock=SystemClock()) is None
    assert own.make_slurm(config, clock=SystemClock()) is None
    assert own.make_kubernetes(config, clock=SystemClock()) is None


def test_file_makes_its_cloud_native(tmp_path: Path) -> None:
    config = Config(home=tmp_path, owner="me")
    (tmp_path / "ssh_pools.yaml").write_text(POOLS)
    (tmp_path / "slurm.yaml").write_text("here: {}\n")
    (tmp_path / "kubernetes.yaml").write_text("")
    assert isinstance(own.make_kubernetes(config, clock=SystemClock()), KubernetesCloud)
    assert isinstance(own.make_ssh(config, clock=SystemClock()), SshCloud)
    assert isinstance(own.make_slurm(config, clock=SystemClock()), SlurmCloud)
    assert list_native(tmp_path) == ("ssh", "slurm", "kubernetes")


def test_other_clouds_are_never_native(tmp_path: Path) -> None:
    assert find_file("lambda", tmp_path) is None


def test_offers_are_those_whose_size_is_known(tmp_path: Path) -> None:
    (tmp_path / "ssh_pools.yaml").write_text(POOLS)
    assert [offer.instance_type for offer in list_own_offers(tmp_path)] == ["4cpu-16gb"]
    write_facts(find_facts("ssh", tmp_path), {"lab/a": Machine(vcpus=8, memory_gib=32)})
    offers: list[Offer] = list(list_own_offers(tmp_path))
    assert {(each.cloud, each.region, each.instance_type) for each in offers} == {
        ("ssh", "lab", "8cpu-32gb"),
        ("ssh", "lab", "4cpu-16gb"),
    }


@pytest.mark.parametrize("cloud", sorted(FILES))
def test_check_says_how_to_make_it_native(cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_SKY_PYTHON", "/nowhere/python")
    inspector = own.find_inspector(cloud)
    results = asyncio.run(inspector.inspect(Config(home=tmp_path, owner="me"), clock=SystemClock()))
    native = results[-1]
    assert str(tmp_path / FILES[cloud]) in native.note and not native.is_needed
    assert CLOUDS[cloud].startswith("broker.clouds.own:") and CHECKS[cloud].startswith("broker.clouds.own:")
