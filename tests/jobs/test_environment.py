"""The variables that describe a managed job to its program."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from broker.config import Config
from broker.jobs.environment import make_envs
from broker.types import (
    Attempt,
    CheckpointSpec,
    Cluster,
    ClusterStatus,
    Job,
    JobStatus,
    Node,
    NodeState,
    Placement,
    Task,
)
from tests.simulation.world import make_offer

PLACEMENT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=1)
JOB = Job(id=7, name="j", status=JobStatus.RUNNING, task=Task(), submitted_s=0.0, uid="abcde")
ATTEMPT = Attempt(job_id=7, number=3, cluster="c", placement=PLACEMENT, started_s=0.0)
ADVICE = {"BROKER_CHECKPOINT_EVERY_S": "60"}


def make(job: Job, home: Path, *, handle: str, first: Job | None = None, number: int = 3) -> dict[str, str]:
    node = Node(id="n", cloud="x", owner="me", cluster="c", attempt=3, rank=0, state=NodeState.RUNNING, handle=handle)
    cluster = Cluster(name="c", status=ClusterStatus.UP, placement=PLACEMENT, attempt=3, nodes=(node,))
    config = Config(home=home, owner="owner")
    return make_envs(config, job, replace(ATTEMPT, number=number), cluster, advice=ADVICE, find_job={7: first}.get)


def test_a_remote_program_without_a_bucket_gets_its_identity_and_no_folder(tmp_path: Path) -> None:
    found = make(JOB, tmp_path, handle="ssh://u@h")
    parent = found.pop("TRACEPARENT")
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", parent)
    assert {name: value for name, value in found.items() if not name.startswith("SKYPILOT_")} == {
        "BROKER_JOB_ID": "7", "BROKER_ATTEMPT": "3", **ADVICE,
    }  # fmt: skip


def test_a_single_job_is_the_only_one_of_its_kind_as_in_skypilot(tmp_path: Path) -> None:
    found = make(JOB, tmp_path, handle="ssh://u@h")
    assert {name: value for name, value in found.items() if name.startswith("SKYPILOT_")} == {
        "SKYPILOT_TASK_ID": f"broker-{JOB.stem}", "SKYPILOT_TASK_IDS": f"broker-{JOB.stem}",
        "SKYPILOT_MANAGED_JOB_ID": "7", "SKYPILOT_JOB_RANK": "0", "SKYPILOT_NUM_JOBS": "1",
    }  # fmt: skip
    share = replace(JOB, task=Task(envs={"SKYPILOT_JOB_RANK": "2", "SKYPILOT_NUM_JOBS": "4"}))
    found = make(share, tmp_path, handle="ssh://u@h")
    assert (found["SKYPILOT_JOB_RANK"], found["SKYPILOT_NUM_JOBS"]) == ("2", "4")


def test_a_task_of_a_pipeline_knows_the_ids_of_all_in_their_order_and_a_retry_replaces_the_first(
    tmp_path: Path,
) -> None:
    prepare, train = (replace(JOB, id=number, pipeline="p") for number in (7, 8))
    again = replace(prepare, id=9, resumes=7)
    found = make_envs(
        Config(home=tmp_path, owner="owner"),
        train,
        ATTEMPT,
        Cluster(name="c", status=ClusterStatus.UP, placement=PLACEMENT, attempt=3),
        advice={},
        members=(prepare, train, again),
    )
    assert found["SKYPILOT_TASK_IDS"].split("\n") == [f"broker-{again.stem}", f"broker-{train.stem}"]


def test_a_program_joins_the_trace_of_its_job_unless_the_task_names_another(tmp_path: Path) -> None:
    again = make(replace(JOB, id=8), tmp_path, handle="ssh://u@h")
    assert again["TRACEPARENT"] != make(JOB, tmp_path, handle="ssh://u@h")["TRACEPARENT"]
    own = replace(JOB, task=Task(envs={"TRACEPARENT": "00-1-2-01"}))
    assert make(own, tmp_path, handle="ssh://u@h")["TRACEPARENT"] == "00-1-2-01"


def test_ids_for_experiment_trackers_are_the_same_in_every_attempt(tmp_path: Path) -> None:
    first, second = (make(JOB, tmp_path, handle="ssh://u@h", number=number) for number in (3, 4))
    assert {name for name in first if first[name] != second[name]} == {"BROKER_ATTEMPT", "TRACEPARENT"}
    assert first["SKYPILOT_TASK_ID"] == "broker-job-7-abcde"  # no attempt in it: fit for WANDB_RUN_ID
    assert not first.keys() & {"WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID"}  # the task's own stay as they are


@pytest.mark.parametrize("pipeline", ["", "mine-1"])
def test_tasks_of_a_pipeline_share_a_folder_beside_their_own(tmp_path: Path, pipeline: str) -> None:
    bucket = CheckpointSpec(to="s3://bucket/folder/")
    job = replace(JOB, pipeline=pipeline, task=Task(checkpoint=bucket))
    found = make(job, tmp_path, handle="ssh://u@h")
    assert found["BROKER_CHECKPOINT_DIR"].startswith("s3://bucket/folder/owner-")
    assert found.get("BROKER_PIPELINE_DIR") == ("s3://bucket/folder/owner-mine-1" if pipeline else None)


def test_on_this_machine_the_folders_are_those_of_the_state_folder(tmp_path: Path) -> None:
    found = make(replace(JOB, pipeline="mine-1"), tmp_path, handle="/nodes/n")
    assert found["BROKER_PIPELINE_DIR"].startswith(str(tmp_path)) and found["BROKER_PIPELINE_DIR"].endswith("mine-1")
    assert found["BROKER_CHECKPOINT_DIR"].startswith(str(tmp_path))


def test_a_retry_uses_the_folder_of_the_job_that_it_continues(tmp_path: Path) -> None:
    first = make(JOB, tmp_path, handle="/nodes/n")
    retry = make(replace(JOB, id=9, resumes=7), tmp_path, handle="/nodes/n")
    another = make(replace(JOB, id=9), tmp_path, handle="/nodes/n")
    assert first["BROKER_CHECKPOINT_DIR"] == retry["BROKER_CHECKPOINT_DIR"] != another["BROKER_CHECKPOINT_DIR"]


def test_a_retried_group_uses_the_shared_folder_of_the_first_one(tmp_path: Path) -> None:
    first = replace(JOB, pipeline="rl-aaaaa")
    retry = replace(JOB, id=9, resumes=7, pipeline="rl-bbbbb")
    found = make(retry, tmp_path, handle="/nodes/n", first=first)
    assert found["BROKER_PIPELINE_DIR"] == make(first, tmp_path, handle="/nodes/n")["BROKER_PIPELINE_DIR"]
    alone = make(retry, tmp_path, handle="/nodes/n")  # the record of the first job was dropped
    assert alone["BROKER_PIPELINE_DIR"].endswith("rl-bbbbb")
