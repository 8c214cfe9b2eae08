"""Several documents: headers, chains, `needs`."""

from __future__ import annotations

import pytest

from broker.errors import TaskError
from broker.task.loader import load_tasks_text
from broker.types import Task


def load(*documents: str) -> tuple[Task, ...]:
    return load_tasks_text("\n---\n".join(documents), "pipe.yaml")


def list_needs(tasks: tuple[Task, ...]) -> dict[str | None, dict[str, float]]:
    return {task.name: dict(task.needs) for task in tasks}


def find_message(*documents: str) -> str:
    with pytest.raises(TaskError) as caught:
        load(*documents)
    return "\n".join(f"{each.line}:{each.column} {each.message} | {each.hint}" for each in caught.value.issues)


def test_documents_without_needs_are_a_chain_with_the_sizes_of_outputs() -> None:
    tasks = load("name: all", "name: a\noutputs: {s3://b/a: 120GB, s3://b/c: 8}\nrun: x", "name: b\nrun: x", "run: x")
    assert list_needs(tasks) == {"a": {}, "b": {"a": 128.0}, "task-3": {"b": 0.0}}


def test_header_may_say_serial() -> None:
    assert list_needs(load("name: all\nexecution: serial", "name: a\nrun: x", "name: b\nrun: x"))["b"] == {"a": 0.0}


def test_job_group_has_no_edges_and_may_be_launched() -> None:
    tasks = load("name: all\nexecution: parallel\nprimary_tasks: [a]", "name: a\nrun: x", "name: b\nrun: x")
    assert list_needs(tasks) == {"a": {}, "b": {}}
    assert not any(each.blocks_launch for task in tasks for each in task.notices)


def test_needs_by_name_list_and_size() -> None:
    tasks = load(
        "name: d\nneeds: {b: 1.5GB, c: }\nrun: x",
        "name: a\noutputs: {x: 4}\nrun: x",
        "name: b\nneeds: a\nrun: x",
        "name: c\nneeds: [a]\noutputs: {y: 2}\nrun: x",
    )
    assert list_needs(tasks) == {"d": {"b": 1.5, "c": 2.0}, "a": {}, "b": {"a": 4.0}, "c": {"a": 4.0}}


def test_unknown_need_is_shown_with_its_position() -> None:
    message = find_message("name: prepare\nrun: x", "name: train\nneeds: [prepair]\nrun: x")
    assert message == "5:9 `needs`: unknown task `prepair` | did you mean `prepare`?"
    assert "3:10 " in find_message("name: a\nrun: x\nneeds: {b: 1}").replace("3:9 ", "3:10 ")


def test_cycle_is_reported_with_its_names() -> None:
    message = find_message("name: a\nneeds: [c]\nrun: x", "name: b\nneeds: [a]\nrun: x", "name: c\nneeds: [b]\nrun: x")
    assert message == "2:1 `needs` contains a cycle: a -> c -> b -> a | remove one of them"
    assert "a -> a" in find_message("name: a\nneeds: a\nrun: x")


def test_long_chain_of_needs_does_not_recurse() -> None:
    tasks = load(*[f"name: t{i}\nneeds: [{'' if i == 0 else f't{i - 1}'}]\nrun: x" for i in range(900)])
    assert len(tasks) == 900


def test_tasks_without_or_with_the_same_name_get_one_of_their_own() -> None:
    tasks = load("run: x", "name: a\nrun: x", "name: a\nrun: x", "name: task-1\nrun: x")
    names = [task.name for task in tasks]
    assert len(set(names)) == 4
    assert names[1] == "a"
    assert names[3] == "task-1"
    assert "duplicate task name `a`" in find_message("name: a\nrun: x", "name: a\nneeds: []\nrun: x")


def test_empty_documents_are_not_tasks() -> None:
    assert [task.name for task in load("name: all", "", "name: a\nrun: x", "")] == ["a"]


def test_single_task_takes_the_name_of_the_header() -> None:
    assert [task.name for task in load("name: all", "run: x")] == ["all"]


def test_faults_of_all_documents_are_reported_at_once() -> None:
    message = find_message("nam: a\nrun: x", "name: b\nnum_nodes: 0\nrun: x", "[1]")
    assert [line.split(" ")[0] for line in message.split("\n")] == ["1:1", "5:12", "8:1"]


def test_number_of_tasks_is_bounded() -> None:
    assert "more than 1,000 tasks" in find_message(*["run: x"] * 1100)
