"""The batch job of a gang, as options and script; and Slurm's output as partitions and jobs."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.clouds.slurm.check import inspect, judge_cluster, parse_partitions
from broker.clouds.slurm.commands import parse_line, parse_pairs
from broker.clouds.slurm.script import find_partition, make_argv, make_comment, make_script, name_job, read_comment
from broker.config import Config
from broker.errors import InvalidRequestError, TransientError
from broker.sites.facts import Machine, find_facts
from broker.sites.openssh import Completed
from broker.sites.slurm import Partition, SlurmCluster, read_partitions, write_partitions
from broker.types import NodeRequest, Offer, Placement

PARTITION = Partition(
    name="gpu",
    machine=Machine(vcpus=96, memory_gib=1000, accelerator="H100", accelerator_count=8),
    node_count=4,
    grace_s=60,
    time_limit="2-00:00:00",
    gres="h100",
)


def make_request(zone: str = "gpu", **more: object) -> NodeRequest:
    offer = Offer(
        cloud="slurm", region="hpc", zone=zone, instance_type="24cpu-250gb-2xH100", vcpus=24, memory_gib=250,
        accelerator="H100", accelerator_count=2, spot_usd_hour=4.0, ondemand_usd_hour=4.0,
    )  # fmt: skip
    placement = Placement(offer=offer, is_spot=True, node_count=3)
    fields = {"owner": "0123456789ab", "cluster": "train", "attempt": 2, "token": "ff" * 16, **more}
    return NodeRequest(placement=placement, **fields)  # type: ignore[arg-type]


def test_allocation_asks_for_the_offers_part_of_each_node() -> None:
    argv = make_argv(SlurmCluster(name="hpc", options=("--account=lab",)), PARTITION, make_request(), now_s=1.0)
    assert {"--partition=gpu", "--nodes=3", "--cpus-per-task=24", "--mem=256000M", "--gres=gpu:h100:2"} <= set(argv)
    assert {"--time=2-00:00:00", "--no-requeue", "--dependency=singleton", "--account=lab"} <= set(argv)
    assert not [each for each in argv if each.startswith("--qos")]


def test_qos_is_part_of_the_zone() -> None:
    argv = make_argv(SlurmCluster(name="hpc", time="60"), PARTITION, make_request("gpu@low"), now_s=1.0)
    assert {"--partition=gpu", "--qos=low", "--time=60"} <= set(argv)


def test_unlimited_partition_gets_no_time_limit() -> None:
    partition = Partition(name="gpu", machine=PARTITION.machine, node_count=1, time_limit="infinite")
    assert not [
        each for each in make_argv(SlurmCluster(name="hpc"), partition, make_request(), now_s=1.0) if "--time" in each
    ]


@pytest.mark.parametrize(
    ("default", "limit", "expected"),
    [
        ("NONE", "infinite", None),
        ("01:00:00", "infinite", "--time=UNLIMITED"),
        ("01:00:00", "2-00:00:00", "--time=2-00:00:00"),
    ],
)
def test_default_time_of_a_partition_does_not_end_a_job(default: str, limit: str, expected: str | None) -> None:
    rules = f"PartitionName=gpu DefaultTime={default} MaxTime=UNLIMITED State=UP\n"
    (partition,) = parse_partitions(f"gpu|8|1024|(null)|1|up|{limit}\n", rules)
    argv = make_argv(SlurmCluster(name="hpc"), partition, make_request(), now_s=1.0)
    assert [each for each in argv if each.startswith("--time")] == ([expected] if expected else [])


def test_job_is_named_by_owner_and_token_alone() -> None:
    assert name_job("me", "a") == name_job("me", "a")
    assert len({name_job("me", "a"), name_job("me", "b"), name_job("you", "a")}) == 3


def test_tags_are_read_from_the_comment() -> None:
    import json

    tags = make_comment(make_request(), now_s=12.5)
    assert read_comment(json.dumps(tags)) == tags
    assert "|" not in json.dumps(tags)


@pytest.mark.parametrize("text", ["", "(null)", "hello", "[]", "{}", '{"o": "me"}', "3"])
def test_comment_of_a_foreign_job_is_ignored(text: str) -> None:
    assert read_comment(text) is None


def test_script_carries_program_machine_and_the_partitions_grace_time() -> None:
    script = make_script(make_request(), PARTITION, program="PROGRAM", machine="MACHINE", kill_wait_s=30).decode()
    packed = zlib.decompress(base64.b64decode(script.split()[-1])).decode()
    assert packed.startswith("PROGRAM\n") and "'MACHINE'" in packed and '"notice_s": 60' in packed
    assert max(len(line) for line in script.splitlines()) < 100_000, "one argument of a program has a limit"


def test_node_may_use_all_cpus_of_its_allocation_wherever_the_site_binds_tasks() -> None:
    script = make_script(make_request(), PARTITION, program="PROGRAM", machine="MACHINE", kill_wait_s=30).decode()
    (step,) = [line for line in script.splitlines() if "srun" in line and not line.startswith("#")]
    assert "--cpu-bind=none" in step.split()


def test_partition_that_is_gone_is_reported_with_what_to_do() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        find_partition([PARTITION], make_request("debug"))
    assert "broker check slurm" in caught.value.hints[0]


def test_partitions_are_read_from_sinfo_and_scontrol() -> None:
    nodes = (
        "low|2|1000|(null)|2|up|1:00:00\ngpu|96+|1024000+|gpu:h100:8(S:0-1)|4|up|infinite\nold|1|1|(null)|1|down|1\n"
    )
    rules = (
        "PartitionName=low PreemptMode=CANCEL GraceTime=10 PriorityTier=1 State=UP\n"
        "PartitionName=gpu PreemptMode=REQUEUE GraceTime=0 PriorityTier=10 State=UP\n"
    )
    low, gpu = parse_partitions(nodes, rules)
    assert (low.name, low.is_preemptible, low.grace_s, low.machine.vcpus) == ("low", True, 10.0, 2)
    assert low.machine.memory_gib * 1024 <= 1000, "never more than the node has"
    assert (gpu.name, gpu.is_preemptible, gpu.gres) == ("gpu", False, "h100")
    assert (gpu.machine.accelerator, gpu.machine.accelerator_count) == ("H100", 8)


@pytest.mark.parametrize(
    ("gres", "kind", "name", "count"),
    [
        ("gpu:4", "", "GPU", 4),
        ("gpu:4(S:0-1)", "", "GPU", 4),
        ("gpu:2080ti:8(S:0-1)", "2080ti", "RTX2080TI", 8),
        ("gpu:3090:4", "3090", "RTX3090", 4),
        ("gpu:rtx_3090:4", "rtx_3090", "RTX3090", 4),
        ("gpu:nvidia_a100-sxm4-80gb:8(S:0-1)", "nvidia_a100-sxm4-80gb", "A100-80GB", 8),
        ("gpu:tesla_v100:2", "tesla_v100", "V100", 2),
        ("gpu:1g.5gb:7", "", None, 0),
        ("gpu:a100_1g.5gb:14(S:0),gpu:a100:2(S:1)", "a100", "A100", 2),
        ("nvme:1,gpu:a100:2,shard:8", "a100", "A100", 2),
        ("vgpu:3", "", None, 0),
    ],
)
def test_cards_are_read_from_the_gres_of_a_partition(gres: str, kind: str, name: str | None, count: int) -> None:
    (partition,) = parse_partitions(f"gpu|8|1024|{gres}|1|up|infinite\n", "")
    found = partition.machine
    assert (partition.gres, found.accelerator, found.accelerator_count) == (kind, name, count)


def test_line_of_squeue_is_read_whatever_the_comment() -> None:
    line = parse_line('7|PENDING|Resources|2||N/A|N/A|low|{"a":"x|y"}')
    assert line is not None
    assert (line.id, line.state, line.node_count, line.start_s, line.comment) == (7, "PENDING", 2, None, '{"a":"x|y"}')


@pytest.mark.parametrize(
    "line",
    [
        "7_3|RUNNING|None|1|n1|N/A|N/A|low|",
        "7_[4-9%2]|PENDING|Resources|1||N/A|N/A|low|",
        "8+1|PENDING|None|1||N/A|N/A|low|",
        "the second line of a comment",
        "a | b",
        "",
        "|||||||||",
    ],
)
def test_other_jobs_of_the_user_are_ignored(line: str) -> None:
    assert parse_line(line) is None


def test_value_with_a_space_is_one_value() -> None:
    assert parse_pairs("JobId=1 OS=Linux 6.1 #1 SMP Port=1") == {"JobId": "1", "OS": "Linux 6.1 #1 SMP", "Port": "1"}


@pytest.mark.parametrize(("memory_mb", "has_note"), [(1, True), (64000, False)])
def test_check_says_where_the_memory_of_nodes_is_unknown(memory_mb: int, has_note: bool) -> None:
    """Slurm's default is 1 MB, which no task with `memory` matches; without `memory`, such nodes are offered."""
    partitions = parse_partitions(f"gpu|8|{memory_mb}|(null)|1|up|infinite\n", "")
    result = judge_cluster(SlurmCluster(name="hpc"), partitions, is_needed=True)
    assert result.is_ok and ("`RealMemory`" in result.note) is has_note


def test_check_replaces_what_an_earlier_one_found_and_keeps_what_does_not_answer(tmp_path: Path) -> None:
    config = Config(home=tmp_path, owner="0wner")
    (config.home / "slurm.yaml").write_text("here: {}\nsilent: {}\n")
    old = [Partition(name="old", machine=Machine(vcpus=1, memory_gib=1), node_count=1)]
    facts = find_facts("slurm", config.home)
    write_partitions(facts, {"here": old, "silent": old, "left-the-file": old})

    async def run(cluster: SlurmCluster, argv: Sequence[str], stdin: bytes) -> Completed:
        if cluster.name == "silent":
            raise TransientError("`silent` does not answer")
        text = "new|4|4000|(null)|2|up|infinite\n" if argv[0] == "sinfo" else "PartitionName=new PriorityTier=1\n"
        return Completed(returncode=0, stdout=text.encode(), stderr=b"")

    results = asyncio.run(inspect(config, clock=SystemClock(), run=run))
    assert [(each.name, each.is_ok) for each in results] == [
        ("here", True), ("silent", False),
    ]  # fmt: skip
    kept = {name: [each.name for each in found] for name, found in read_partitions(facts).items()}
    assert kept == {"here": ["new"], "silent": ["old"]}
