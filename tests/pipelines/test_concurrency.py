"""The highest price per hour of a file's tasks: those that run at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from broker.pipelines import concurrency
from broker.pipelines.concurrency import find_usd_hour_max
from broker.types import GroupRole, Plan, Task
from tests.pipelines.test_planner import estimate, make_plan


def plan(name: str, usd: float, needs: tuple[str, ...] = ()) -> Plan:
    return make_plan(Task(name=name, needs=dict.fromkeys(needs, 0.0)), [estimate("aws/a", usd)])


def measure(needs: Mapping[str, tuple[str, ...]], usd: Mapping[str, float]) -> float:
    return find_usd_hour_max([plan(name, usd[name], each) for name, each in needs.items()])


@pytest.fixture(params=[40, 0], ids=["exact", "bound"])
def exact_tasks_max(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(concurrency, "EXACT_TASKS_MAX", request.param)
    return int(request.param)


@pytest.mark.parametrize(
    ("needs", "usd", "expected"),
    [
        ({"a": (), "b": ("a",), "c": ("a",)}, {"a": 3.0, "b": 2.0, "c": 2.0}, 4.0),
        ({"a": (), "b": ("a",), "c": ("a",)}, {"a": 5.0, "b": 2.0, "c": 2.0}, 5.0),
        ({"a": (), "b": ("a",), "c": ("b",)}, {"a": 3.0, "b": 2.0, "c": 7.0}, 7.0),
        ({"c": ("b",), "b": ("a",), "a": ()}, {"a": 3.0, "b": 2.0, "c": 7.0}, 7.0),
        ({"a": (), "b": (), "c": ()}, {"a": 3.0, "b": 2.0, "c": 7.0}, 12.0),
        ({"a": (), "b": ("a",), "c": (), "d": ("c",)}, {"a": 1.0, "b": 4.0, "c": 5.0, "d": 2.0}, 9.0),
    ],
)
def test_tasks_that_need_each_other_do_not_run_at_once(
    needs: Mapping[str, tuple[str, ...]], usd: Mapping[str, float], expected: float, exact_tasks_max: int
) -> None:
    found = measure(needs, usd)
    assert found == expected if exact_tasks_max else found >= expected
    assert found <= sum(usd.values())


def test_the_bound_of_a_large_file_is_below_the_sum_where_tasks_wait(exact_tasks_max: int) -> None:
    needs = {f"t{i}": ((f"t{i - 1}",) if i else ()) for i in range(6)}
    assert measure(needs, {name: float(i + 1) for i, name in enumerate(needs)}) == 6.0


def test_tasks_of_a_group_and_tasks_that_share_a_name_all_count() -> None:
    pair = [plan("a", 3.0), plan("b", 2.0, ("a",))]
    assert find_usd_hour_max(pair) == 3.0
    role = GroupRole(name="g")
    assert find_usd_hour_max([replace(pair[0], task=replace(pair[0].task, group=role)), pair[1]]) == 5.0
    assert find_usd_hour_max([plan("a", 3.0), plan("a", 2.0)]) == 5.0
