"""The file of Slurm clusters, and the offers of their partitions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.clouds.slurm.check import parse_partitions
from broker.errors import TaskError
from broker.sites.facts import Machine
from broker.sites.slurm import (
    Partition,
    SlurmCluster,
    join_command,
    list_offers,
    read_clusters,
    split_machine,
    write_partitions,
)

NODE = Machine(vcpus=96, memory_gib=1000, accelerator="H100", accelerator_count=8)


def read(tmp_path: Path, text: str) -> dict[str, SlurmCluster]:
    path = tmp_path / "slurm.yaml"
    path.write_text(text)
    return dict(read_clusters(path))


def test_cluster_without_a_login_is_this_machine(tmp_path: Path) -> None:
    found = read(tmp_path, "here: {}\nhpc: {login: login1, user: alice, options: [--account=lab]}\n")
    assert found["here"].login is None
    login = found["hpc"].login
    assert login and (login.host, login.user, found["hpc"].options) == ("login1", "alice", ("--account=lab",))


@pytest.mark.parametrize("is_in_path", [True, False])
def test_command_is_found_where_only_a_login_shell_knows_slurm(tmp_path: Path, is_in_path: bool) -> None:
    folder = tmp_path / "opt/slurm/bin"
    folder.mkdir(parents=True)
    (folder / "sinfo").write_text('#!/bin/sh\ncat\nprintf "<%s>" "$@"\necho problem >&2\nexit 3\n')
    (folder / "sinfo").chmod(0o755)
    (tmp_path / ".bash_profile").write_text(f'echo "Welcome"\nexport PATH="{folder}:$PATH"\n')
    for name in ("sh", "bash", "cat"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    path = f"{tmp_path}:{folder}" if is_in_path else str(tmp_path)
    done = subprocess.run(
        ["sh", "-c", join_command(["sinfo", "-o", "%R|%c", "a b", "it's"])],
        env={"HOME": str(tmp_path), "PATH": path}, input="script\n", capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (3, "script\n<-o><%R|%c><a b><it's>", "problem\n")


def test_unknown_option_is_reported_with_its_position(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        read(tmp_path, "hpc:\n  options: [account=lab]\n")
    assert (caught.value.issues[0].line, caught.value.issues[0].hint) == (2, "such as `--account=lab`")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--comment=project7", "`--comment` is set by broker"),
        ("--comm=project7", "`--comm` is set by broker"),
        ("--job-name=train", "`--job-name` is set by broker"),
        ("--clusters=b", "`--clusters` is set by broker"),
        ("--requeue", "`--requeue` is set by broker"),
        ("--array=0-3", "`--array` is set by broker"),
        ("--account lab", "`--account lab` is not an option of sbatch"),
    ],
)
def test_option_that_would_lose_or_repeat_a_job_is_refused(tmp_path: Path, option: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        read(tmp_path, f"hpc:\n  options: ['{option}']\n")
    assert [issue.message for issue in caught.value.issues] == [message]


def test_other_options_are_passed_on(tmp_path: Path) -> None:
    options = ("--account=lab", "--no-kill", "--exclude=n[1-3]", "--constraint=a100", "--qos=high", "--nodelist=n4")
    found = read(tmp_path, f"hpc:\n  options: [{', '.join(map(repr, options))}]\n")
    assert found["hpc"].options == options


def test_preemptible_partition_is_offered_as_spot(tmp_path: Path) -> None:
    clusters = read(tmp_path, "hpc: {usd_hour: {low: 8, gpu: 16}, qos: [scavenger], preemptible_qos: [scavenger]}\n")
    partitions = [
        Partition(name="low", machine=NODE, node_count=4, is_preemptible=True),
        Partition(name="gpu", machine=NODE, node_count=2),
    ]
    write_partitions(tmp_path / "slurm.json", {"hpc": partitions})
    offers = [each for each in list_offers(clusters, tmp_path / "slurm.json") if each.accelerator_count == 8]
    assert {each.zone: (each.ondemand_usd_hour, each.spot_usd_hour) for each in offers} == {
        "low": (None, 8.0),
        "low@scavenger": (None, 8.0),
        "gpu": (16.0, None),
        "gpu@scavenger": (None, 16.0),
    }


def test_parts_of_a_node_are_offered_at_their_share_of_its_price(tmp_path: Path) -> None:
    clusters = read(tmp_path, "hpc: {usd_hour: 16}\n")
    write_partitions(tmp_path / "slurm.json", {"hpc": [Partition(name="gpu", machine=NODE, node_count=2)]})
    offers = list_offers(clusters, tmp_path / "slurm.json")
    assert [(each.accelerator_count, each.vcpus, each.ondemand_usd_hour) for each in offers] == [
        (8, 96, 16.0), (4, 48, 8.0), (2, 24, 4.0), (1, 12, 2.0),
    ]  # fmt: skip


def test_partition_that_gives_whole_nodes_offers_no_part_at_a_part_of_the_price(tmp_path: Path) -> None:
    rules = "PartitionName=gpu OverSubscribe=EXCLUSIVE State=UP\nPartitionName=shared OverSubscribe=NO State=UP\n"
    nodes = "".join(f"{name}|96|1024000|gpu:h100:8|4|up|infinite\n" for name in ("gpu", "shared"))
    write_partitions(tmp_path / "slurm.json", {"hpc": parse_partitions(nodes, rules)})
    offers = list_offers(read(tmp_path, "hpc: {usd_hour: 16}\n"), tmp_path / "slurm.json")
    assert [each.ondemand_usd_hour for each in offers if each.zone == "gpu"] == [16.0]
    assert len([each for each in offers if each.zone == "shared"]) == 4


def test_only_the_named_partitions_are_offered(tmp_path: Path) -> None:
    clusters = read(tmp_path, "hpc: {partitions: [gpu]}\n")
    partitions = [Partition(name=name, machine=NODE, node_count=1) for name in ("gpu", "debug")]
    write_partitions(tmp_path / "slurm.json", {"hpc": partitions})
    assert {each.zone for each in list_offers(clusters, tmp_path / "slurm.json")} == {"gpu"}


@given(vcpus=st.integers(1, 512), memory_gib=st.floats(0.5, 4096), cards=st.integers(0, 16))
def test_parts_fit_into_the_machine_together(vcpus: int, memory_gib: float, cards: int) -> None:
    machine = Machine(vcpus=vcpus, memory_gib=memory_gib, accelerator="T4" if cards else None, accelerator_count=cards)
    parts = list(split_machine(machine))
    assert parts[0] == (
        1.0,
        Machine(vcpus=vcpus, memory_gib=round(memory_gib, 2), accelerator=machine.accelerator, accelerator_count=cards),
    )
    for share, part in parts:
        count = round(1 / share)
        assert part.accelerator_count * count == cards
        assert part.vcpus * count <= vcpus or part.vcpus == 1
