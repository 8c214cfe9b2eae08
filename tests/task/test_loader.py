"""Task files: results, and errors for invalid ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.errors import TaskError
from broker.task.codec import decode_task, encode_task
from broker.task.diagnostics import render_issue
from broker.task.loader import load_tasks_text
from broker.task.notices import refuse_blocking
from broker.task.override import override_resources
from broker.types import Autostop, CheckpointSpec, Goal, Quantity, Task

BROKEN = sorted((Path(__file__).parent.parent / "data" / "broken").glob("*.yaml"))


def load(text: str) -> Task:
    (task,) = load_tasks_text(text, "task.yaml")
    return task


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_broken_file_gets_its_message(path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        for task in load_tasks_text(path.read_text(), path.name):
            refuse_blocking(task.notices)
    message = "\n".join(render_issue(issue) for issue in caught.value.issues) + "\n"
    snapshot = path.with_suffix(".txt")
    if os.environ.get("BROKER_UPDATE_SNAPSHOTS"):
        snapshot.write_text(message)
    assert message == snapshot.read_text()


def test_there_are_thirty_broken_files() -> None:
    assert len(BROKEN) >= 30


def test_all_faults_of_a_file_are_reported_at_once() -> None:
    path = next(path for path in BROKEN if path.stem.endswith("many_errors"))
    with pytest.raises(TaskError) as caught:
        load_tasks_text(path.read_text(), path.name)
    assert [issue.line for issue in caught.value.issues] == [1, 3, 4, 6, 7, 8]


@given(st.text(max_size=300))
@example("a: &a [*a]")
@example("\ud800")
@example("run: !!python/object:os.system x")
def test_any_text_is_a_task_or_a_task_error(text: str) -> None:
    try:
        load_tasks_text(text, "any.yaml")
    except TaskError as error:
        assert error.issues


def test_aliases_cannot_blow_a_small_file_up() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(TaskError, match="expands to more than"):
        load_tasks_text("\n".join(lines), "bomb.yaml")


def test_yaml_is_read_by_its_1_2_rules() -> None:
    task = load("resources: {labels: {on: off, time: 22:22, octal: 010, yes: yes}}\nrun: echo")
    assert task.resources[0].labels == {"on": "off", "time": "22:22", "octal": "010", "yes": "yes"}


def test_set_of_accelerators_is_either_and_list_is_an_order() -> None:
    either = load("resources: {accelerators: {A100-80GB:8, H100: 4}}\nrun: x")
    assert [(each.accelerator, each.accelerator_count) for each in either.resources] == [("A100-80GB", 8), ("H100", 4)]
    assert not either.is_ordered
    assert load("resources: {accelerators: [A100:8, H100:8]}\nrun: x").is_ordered


def test_any_of_inherits_the_common_fields() -> None:
    task = load("resources:\n  use_spot: true\n  any_of:\n  - {infra: aws/us-east-1}\n  - {infra: gcp}\nrun: x")
    assert [(each.cloud, each.region, each.use_spot) for each in task.resources] == [
        ("aws", "us-east-1", True),
        ("gcp", None, True),
    ]


def test_amounts_durations_and_sizes_are_converted_to_their_units() -> None:
    task = load(
        "resources: {cpus: 4+, memory: 32GB+, disk_size: 1TB, autostop: {idle_minutes: 10, down: true}}\n"
        "goal: {work: {hours: 100, on: A100:8}, deadline: 1d12h, budget: 50, confidence: 0.95}\n"
        "checkpoint: {every: 10m, stall: 0, restart: 90s, size: 512MB, same_ranks: true}\nrun: x"
    )
    resources = task.resources[0]
    assert resources.cpus == Quantity(value=4, is_minimum=True)
    assert resources.memory_gib == Quantity(value=32, is_minimum=True)
    assert resources.disk_size_gib == 1024
    assert task.autostop == Autostop(idle_minutes=10, is_down=True)
    assert task.goal == Goal(work_hours=100, work_on="A100:8", deadline_hours=36, budget_usd=50, confidence=0.95)
    assert task.checkpoint == CheckpointSpec(every_s=600, stall_s=0, restart_s=90, size_gib=0.5, is_for_same_ranks=True)


def test_several_documents_are_a_pipeline() -> None:
    tasks = load_tasks_text("name: whole\n---\nname: one\nrun: a\n---\nname: two\nrun: b\n", "pipe.yaml")
    assert [task.name for task in tasks] == ["one", "two"]


def test_given_env_fills_an_empty_one() -> None:
    (task,) = load_tasks_text("envs: {TOKEN: }\nrun: x", "t.yaml", envs={"TOKEN": "abc"})
    assert task.envs == {"TOKEN": "abc"}


def test_codec_keeps_all_but_the_secrets() -> None:
    task = load("secrets: {KEY: hunter2}\nresources: {accelerators: H100:8, labels: {a: b}}\nrun: x")
    text = encode_task(task)
    assert "hunter2" not in text
    assert "hunter2" not in repr(task)
    assert decode_task(text, {"KEY": "hunter2"}) == task


def test_flag_replaces_place_and_accelerator() -> None:
    task = load("resources: {infra: aws/us-east-1, accelerators: {A100:8, H100:8}}\nrun: x")
    changed = override_resources(task, infra="local", accelerators="L4:1", num_nodes=3)
    assert changed.num_nodes == 3
    assert [(each.cloud, each.region, each.accelerator) for each in changed.resources] == [("local", None, "L4")]
    with pytest.raises(TaskError, match="cpus"):
        override_resources(task, cpus="lots")
