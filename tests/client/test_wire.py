"""Values and errors on their way between a client and a server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from broker.app.market import Market, find_cache
from broker.app.planning import read_task
from broker.client.wire import (
    VERBS,
    check_fields,
    decode,
    decode_error,
    encode,
    encode_error,
    find_verb,
    read_signature,
)
from broker.errors import (
    BrokerError,
    CapacityError,
    DamagedRowError,
    InvalidRequestError,
    Issue,
    RunFailedError,
    TaskError,
    UnreachedError,
    UsageError,
)
from broker.optimizer.forecast import forecast_plan
from broker.types import Goal, Plan, Secret, Task

TASK = """\
name: train
resources: {accelerators: 'H100:8', any_of: [{infra: aws, use_spot: true}, {infra: gcp}]}
num_nodes: 2
envs: {WHO: world, EMPTY: '', 'NULL': 'null', NUMBER: '1e3', 'YES': 'true'}
secrets: {TOKEN: swordfish}
goal: {work: 40h, deadline: 3d}
run: python train.py
"""


def test_task_arrives_as_it_was_sent() -> None:
    task = read_task(TASK)
    assert decode(encode(task, is_argument=True), Task) == task


def test_plan_arrives_with_its_forecast() -> None:
    task = read_task("resources: {accelerators: 'H100:8', use_spot: true}\ngoal: {work: 40h}\nrun: python train.py\n")
    plan = Market(find_cache()).plan(task)
    found = decode(encode([plan]), Sequence[Plan])[0]
    assert list(found.estimates) == list(plan.estimates) and found.rejections == plan.rejections
    forecast = forecast_plan(plan)
    assert forecast is not None and forecast_plan(found) == forecast


def test_secret_is_revealed_only_on_the_way_to_the_server() -> None:
    task = read_task(TASK)
    assert "swordfish" in str(encode(task, is_argument=True))
    assert "swordfish" not in str(encode(task)) and encode(Secret(value="x")) == {"value": "***"}


def test_field_of_a_newer_client_is_refused_and_fields_with_their_default_are_not_sent() -> None:
    task = read_task("file_mounts: {/d: {source: 's3://b', mode: MOUNT}}\nrun: x\n")
    (plain,) = encode(task, is_argument=True)["storage_mounts"]
    assert "is_read_only" not in plain
    (mount,) = task.storage_mounts
    data = encode(replace(task, storage_mounts=(replace(mount, is_read_only=True),)), is_argument=True)
    assert data["storage_mounts"][0]["is_read_only"] is True
    check_fields(data, decode(data, Task), "task")
    data["storage_mounts"][0]["is_encrypted"] = True  # a field that this version lacks
    with pytest.raises(InvalidRequestError, match=r"`task\.storage_mounts` has the field `is_encrypted`"):
        check_fields(data, decode(data, Task), "task")
    with pytest.raises(InvalidRequestError, match=r"`tasks` has the field `more`"):
        check_fields([{"run": "x", "more": 1}], decode([{"run": "x", "more": 1}], tuple[Task, ...]), "tasks")


def test_infinite_number_is_transmitted() -> None:
    assert decode(encode(Goal(work_hours=math.inf)), Goal).work_hours == math.inf


@pytest.mark.parametrize(
    "error",
    [
        UsageError("what", hints=["next"], details=["why"]),
        RunFailedError("failed", returncode=7, hints=["next"]),
        CapacityError("full", scope="region"),
        UnreachedError("away", node_id="i-1"),
        DamagedRowError("jobs", "7", "torn"),
        TaskError([Issue(file="a.yaml", line=1, column=2, message="wrong", hint="right")]),
    ],
)
def test_error_arrives_with_its_class_and_data(error: BrokerError) -> None:
    found = decode_error(encode_error(error))
    assert type(found) is type(error) and found.exit_code == error.exit_code
    assert vars(found) == vars(error) and str(found) == str(error)


def test_error_of_a_newer_server_keeps_its_message() -> None:
    found = decode_error({"kind": "FutureError", "message": "new"})
    assert type(found) is BrokerError and found.message == "new"
    assert type(decode_error({"kind": "annotations", "message": "no class"})) is BrokerError


def test_data_of_another_shape_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        decode({"num_nodes": "two"}, Task)


@pytest.mark.parametrize("name", VERBS)
def test_verb_has_types_for_all_that_it_takes_and_returns(name: str) -> None:
    verb = VERBS[name]
    assert find_verb(verb.function) is verb
    signature = read_signature(verb.function)
    assert set(verb.owned) <= set(signature.arguments)
