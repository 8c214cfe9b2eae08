"""A command's objects, wired together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.errors import UnknownNameError
from broker.runtime.keys import Keys
from broker.task.loader import load_tasks_text
from broker.types import Cluster, ClusterStatus, IntentEnd, NodeRequest, Task
from tests.simulation.world import make_plan


@dataclass
class Hosts:
    """A cloud that provides hosts, as far as a boot script requires one."""

    name: str = "simulated"
    user: str = "ubuntu"
    settle_s: float = 0.0


def test_keys_are_deleted_with_their_clusters_once_the_cloud_was_compared_with_the_records(tmp_path: Path) -> None:
    """Until then, nodes without a record may be running, and only these keys give access to them."""
    context = Context(tmp_path)
    context.__dict__["clouds"] = {"simulated": Hosts()}
    keys = Keys(context.config.keys)
    keys.ensure("ended", "t0")
    placement = make_plan(Task(), node_count=1).choice.placement
    request = NodeRequest(owner="me", cluster="new", attempt=1, token="t1", placement=placement)
    context.store.intents.put(request)
    context._write_boot(request)
    assert keys.find("ended", "t0")
    context.store.meta.mark_adopted("simulated")
    context._write_boot(request)
    assert not keys.find("ended", "t0") and keys.find("new", "t1")
    context.store.close()


def test_unknown_accelerator_of_a_file_is_refused_with_its_place(tmp_path: Path) -> None:
    (task,) = load_tasks_text("run: x\nresources:\n  accelerators: A1000:8", "train.yaml")
    with pytest.raises(UnknownNameError) as caught:
        Context(tmp_path).plan(task)
    assert caught.value.details == ("requested in train.yaml:3:3",)
    assert "did you mean `A100`" in caught.value.hints[0]


def test_surplus_launch_of_a_killed_command_starts_the_daemon_that_terminates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command shows its machine: the cluster is up in another place."""
    revived: list[Context] = []
    monkeypatch.setattr(Context, "ensure_daemon", lambda context: revived.append(context))
    context = Context(tmp_path)
    placement = make_plan(Task(), node_count=1).choice.placement
    cluster = Cluster(name="dev", status=ClusterStatus.INIT, placement=placement, attempt=1)
    context.store.clusters.put(cluster)
    context.store.intents.put(NodeRequest(owner="me", cluster="dev", attempt=1, token="t1", placement=placement))
    context.restart_daemon_if_needed()
    assert revived == [], "a command brings it up"
    context.store.clusters.put(replace(cluster, status=ClusterStatus.UP))
    context.restart_daemon_if_needed()
    assert revived == [context]
    context.store.intents.close("t1", IntentEnd.TERMINATED)
    context.restart_daemon_if_needed()
    assert revived == [context]
    context.store.close()
