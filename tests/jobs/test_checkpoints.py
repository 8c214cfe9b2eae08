"""Checkpoints outlive the nodes, or the user is warned before paying that they would not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.config import Config, find_checkpoint_url
from broker.errors import UsageError
from broker.jobs.checkpoints import apply_default_checkpoints, check_checkpoints, find_checkpoint_dir
from broker.optimizer.planner import make_plan
from broker.types import (
    CheckpointSpec,
    Cluster,
    ClusterStatus,
    JobRecovery,
    Node,
    NodeState,
    Placement,
    Plan,
    Resources,
    StorageMount,
    Task,
)
from tests.simulation.world import make_offer

AWS = replace(make_offer("east1a"), cloud="aws")
LOCAL = replace(make_offer("east1a"), cloud="local")


def make_config(folder: Path) -> Config:
    return Config(home=folder, owner="me")


def make_cluster(handle: str) -> Cluster:
    placement = Placement(offer=AWS, is_spot=True, node_count=1)
    node = Node(
        id="n", cloud="aws", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING, address="10.0.0.1",
        region="r", zone="z", token="t", is_spot=True, created_s=0.0, handle=handle,
    )  # fmt: skip
    return Cluster(name="c", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=(node,))


def plan(task: Task, *clouds: str) -> Plan:
    offers = [AWS if cloud == "aws" else LOCAL for cloud in clouds]
    asked = tuple(Resources(cloud=cloud) for cloud in clouds)  # `local` only where it is asked for
    return make_plan(replace(task, resources=asked), offers, prices_as_of="2026-11-01")


def test_nodes_elsewhere_are_never_sent_to_a_folder_of_this_machine(tmp_path: Path) -> None:
    config, far, near = make_config(tmp_path), make_cluster("ssh://u@h:22"), make_cluster("/nodes/1")
    assert find_checkpoint_dir(config, Task(), near, name="job-1") == str(tmp_path / "checkpoints" / "job-1")
    assert find_checkpoint_dir(config, Task(), far, name="job-1") is None
    there = Task(checkpoint=CheckpointSpec(to="s3://b/runs/"))
    assert {find_checkpoint_dir(config, there, each, name="job-1") for each in (far, near)} == {"s3://b/runs/me-job-1"}


@pytest.mark.parametrize(
    "task",
    [
        Task(name="t", run="python -m trainers.lm"),
        Task(name="t", run="python x.py --to $BROKER_CHECKPOINT_DIR"),
        Task(name="t", run="python x.py", checkpoint=CheckpointSpec(every_s=60.0)),
    ],
)
def test_task_that_saves_its_state_is_not_launched_where_that_would_be_lost(task: Task) -> None:
    with pytest.raises(UsageError) as caught:
        check_checkpoints([plan(task, "local", "aws")])
    assert "`t` may run on aws" in str(caught.value) and "to: s3://BUCKET" in caught.value.hints[0]
    assert check_checkpoints([plan(task, "local")]) == []
    (settled,) = apply_default_checkpoints([task], "gs://b")
    assert settled.checkpoint.to == "gs://b" and check_checkpoints([plan(settled, "aws")]) == []
    (kept,) = apply_default_checkpoints([settled], "s3://other")
    assert kept is settled, "the task takes precedence over the default"


def test_machines_without_a_program_need_no_place_for_checkpoints() -> None:
    """Otherwise a cluster for later, or the machine of a server, starts only if its nodes get access to the bucket."""
    (bare,) = apply_default_checkpoints([Task(name="dev", setup="pip install torch")], "s3://b")
    assert bare.checkpoint.to is None


def test_task_that_only_has_torch_set_up_may_keep_its_state_elsewhere() -> None:
    task = Task(name="t", setup="python3 -m trainers.setup", run="python x.py")
    (note,) = check_checkpoints([plan(task, "aws")])
    assert "has no checkpoint location" in note


def test_task_that_saves_into_a_bucket_of_its_own_is_launched_without_a_notice() -> None:
    own = StorageMount(target="/ckpt", source=("s3://mine",))
    task = Task(name="t", run="python x.py --out /ckpt", checkpoint=CheckpointSpec(stall_s=9), storage_mounts=(own,))
    assert check_checkpoints([plan(task, "aws")]) == []
    for unwritten in (replace(own, mode="COPY"), replace(own, is_read_only=True)):
        with pytest.raises(UsageError):
            check_checkpoints([plan(replace(task, storage_mounts=(unwritten,)), "aws")])


def test_task_that_saves_nothing_is_launched_with_a_notice() -> None:
    (sentence,) = check_checkpoints([plan(Task(name="t", run="python x.py"), "aws")])
    assert "starts from scratch" in sentence


def test_cached_setup_without_a_place_has_a_notice() -> None:
    task = Task(name="t", setup="pip install x", run="python x.py", recovery=JobRecovery(caches_setup=True))
    assert "`cache_setup` of `t` has no effect" in " ".join(check_checkpoints([plan(task, "aws")]))
    assert "cache_setup" not in " ".join(check_checkpoints([plan(replace(task, recovery=JobRecovery()), "aws")]))


def test_default_comes_from_the_environment_then_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BROKER_CHECKPOINTS", raising=False)
    config = make_config(tmp_path)
    assert find_checkpoint_url(config.home) is None
    (tmp_path / "config.toml").write_text('checkpoints = "gs://b/runs"\n')
    assert find_checkpoint_url(config.home) == "gs://b/runs"
    monkeypatch.setenv("BROKER_CHECKPOINTS", "/mnt/shared")
    assert find_checkpoint_url(config.home) == "/mnt/shared"
    monkeypatch.setenv("BROKER_CHECKPOINTS", "ftp://b")
    with pytest.raises(UsageError, match=r"BROKER_CHECKPOINTS must be .*, not `ftp://b`"):
        find_checkpoint_url(config.home)
    monkeypatch.delenv("BROKER_CHECKPOINTS")
    for text, words in (
        ("checkpoint = 1", "unknown setting `checkpoint`"),
        ("x", "config.toml"),
        ("checkpoints = 3", "3"),
    ):
        (tmp_path / "config.toml").write_text(text)
        with pytest.raises(UsageError, match=words):
            find_checkpoint_url(config.home)
