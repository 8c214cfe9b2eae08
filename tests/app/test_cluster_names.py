"""Names of clusters: those that a launch chooses, and those that `broker status` shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.app.clusters import Status, narrow_status
from broker.app.launching import name_cluster
from broker.errors import UsageError
from broker.task.allowed import CLUSTER_NAME, TASK_NAME
from broker.types import Cluster, ClusterStatus, Placement, Task
from tests.simulation.world import make_offer


@given(st.from_regex(TASK_NAME.pattern, fullmatch=True), st.text("0123456789abcdef", min_size=12, max_size=12))
def test_every_valid_task_name_gives_a_valid_cluster_name(name: str, owner: str) -> None:
    wanted = name_cluster(Task(name=name), owner)
    assert CLUSTER_NAME.admits(wanted) and wanted.endswith(owner[:4])


def test_two_launches_of_a_task_mean_the_same_cluster() -> None:
    assert name_cluster(Task(name="train"), "beefbeef") == "train-beef"
    assert name_cluster(Task(), "beefbeef") == "broker-beef"
    assert name_cluster(Task(name="7b"), "beefbeef") == "broker-7b-beef"


def test_status_of_named_clusters_leaves_the_others_out() -> None:
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=1)
    names = ("dev-1", "dev-2", "train")
    clusters = tuple(
        Cluster(name=name, status=ClusterStatus.UP, placement=placement, attempt=1, nodes=()) for name in names
    )
    found = Status(clusters=clusters, spent_usd=dict.fromkeys(names, 1.0), total_usd=3, live_job_ids=(7,), failures={})
    chosen = narrow_status(found, ["dev-*", "dev-1"])
    assert [each.name for each in chosen.clusters] == ["dev-1", "dev-2"]
    assert (chosen.total_usd, chosen.live_job_ids) == (3, (7,))
    with pytest.raises(UsageError, match="unknown cluster `dve`"):
        narrow_status(found, ["train", "dve"])
