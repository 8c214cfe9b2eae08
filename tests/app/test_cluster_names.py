"""Checks and decisions of `broker launch` before anything starts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.app.launching import name_cluster
from broker.task.allowed import CLUSTER_NAME, TASK_NAME
from broker.types import Task


@given(st.from_regex(TASK_NAME.pattern, fullmatch=True), st.text("0123456789abcdef", min_size=12, max_size=12))
def test_every_valid_task_name_gives_a_valid_cluster_name(name: str, owner: str) -> None:
    wanted = name_cluster(Task(name=name), owner)
    assert CLUSTER_NAME.admits(wanted) and wanted.endswith(owner[:4])


def test_two_launches_of_a_task_mean_the_same_cluster() -> None:
    assert name_cluster(Task(name="train"), "beefbeef") == "train-beef"
    assert name_cluster(Task(), "beefbeef") == "broker-beef"
    assert name_cluster(Task(name="7b"), "beefbeef") == "broker-7b-beef"
