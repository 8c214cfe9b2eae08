"""What the cloud makes of an API server's answers about pods: which it deletes, sweeps, counts and leaves alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from broker.clock import SystemClock
from broker.clouds.kubernetes import node_program
from broker.clouds.kubernetes.cloud import KubernetesCloud
from broker.clouds.kubernetes.manifest import FINALIZER, REQUEST_ANNOTATION, make_record, name_gang
from broker.errors import QuotaError, TransientError, UnknownOutcomeError
from broker.sites.facts import Machine
from broker.sites.kubernetes import KubernetesContext, Pool
from broker.sites.openssh import Completed
from broker.types import NodeRequest, NodeState, Placement

NOW_S = 1_780_000_000.0
OWNER = "0123456789ab"
MACHINE = Machine(vcpus=2, memory_gib=4)
POOL = Pool(name="default", machine=MACHINE, node_count=4, selector={}, disk_gib=20)


class PodClock(SystemClock):
    """A clock that stands still."""

    def now_s(self) -> float:
        return NOW_S


class RecordedServer:
    """Answers each list with the same pods, and records all requests."""

    def __init__(self, *pods: Any, **context: Any) -> None:
        self.pods, self.calls = list(pods), list[tuple[str, str]]()
        self.refusals: dict[str, str] = {}  # end of a pod's name -> kubectl's error for its creation
        self.silent: set[str] = set()
        self.hides_nodes = self.is_creation_lost = False
        self.paths: list[str] = []
        names = context.pop("names", ("test",))
        contexts = {name: KubernetesContext(name=name, context=name, namespace="ml", **context) for name in names}
        self.cloud = KubernetesCloud(lambda: (contexts, {"test": [POOL]}), clock=PodClock(), run=self.run)

    async def run(self, context: KubernetesContext, words: Sequence[str], stdin: bytes) -> Completed:
        if context.name in self.silent:
            raise TransientError(f"context `{context.name}` does not answer")
        if self.hides_nodes and words[-1] == "/api/v1/nodes":
            return Completed(returncode=1, stdout=b"", stderr=b"Error from server (Forbidden): nodes is forbidden")
        target = json.loads(stdin)["metadata"]["name"] if words[0] == "create" else words[2].partition("?")[0]
        self.calls.append((words[0], target.rpartition("/")[2]))
        self.paths.append(words[2] if words[0] == "delete" else "")
        if self.is_creation_lost and words[0] == "create":
            raise TransientError("kubectl did not end in time")
        error = next((text for end, text in self.refusals.items() if words[0] == "create" and target.endswith(end)), "")
        answer = json.dumps({"items": self.pods}).encode()
        return Completed(returncode=1 if error else 0, stdout=answer, stderr=error.encode())

    def list_calls(self, verb: str) -> list[str]:
        return sorted(name for each, name in self.calls if each == verb)


def make_request(*, cluster: str = "train", node_count: int = 1) -> NodeRequest:
    offer = MACHINE.make_offer("kubernetes", "test", zone="default", ondemand_usd_hour=0.1)
    placement = Placement(offer=offer, is_spot=False, node_count=node_count)
    return NodeRequest(owner=OWNER, cluster=cluster, attempt=1, token="t", placement=placement)


def show_time(seconds_ago: float) -> str:
    return datetime.fromtimestamp(NOW_S - seconds_ago, UTC).isoformat().replace("+00:00", "Z")


def make_pod(name: str, *, cluster: str = "train", status: Any = None, is_kept: bool = True, **metadata: Any) -> Any:
    record = json.dumps(make_record(make_request(cluster=cluster), 0, now_s=1.0))
    return {
        "metadata": {
            "name": name, "namespace": "ml", "annotations": {REQUEST_ANNOTATION: record},
            "finalizers": [FINALIZER] if is_kept else [], **metadata,
        },
        "spec": {"nodeName": "n0", "containers": [{"name": "node", "image": "x"}]},
        "status": status or {"phase": "Running"},
    }  # fmt: skip


def end(seconds_ago: float, *, phase: str = "Failed") -> Any:
    ended = {"terminated": {"exitCode": 71, "finishedAt": show_time(seconds_ago)}}
    return {"phase": phase, "containerStatuses": [{"name": "node", "state": ended}]}


def wait_for_room(seconds: float) -> Any:
    condition = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": show_time(seconds),
    }  # fmt: skip
    return {"phase": "Pending", "conditions": [condition]}


def test_records_of_ended_pods_stay_for_an_hour_while_their_cluster_lives() -> None:
    server = RecordedServer(
        make_pod("recent", status=end(1800)),
        make_pod("old", status=end(7200)),
        make_pod("of-a-gone-cluster", cluster="gone", status=end(10)),
        make_pod("without-a-record", status=end(7200), is_kept=False),
        make_pod("living"),
    )
    assert asyncio.run(server.cloud.sweep(OWNER, ["train"])) == 2
    assert server.list_calls("delete") == ["of-a-gone-cluster", "old"]
    assert server.list_calls("patch") == ["of-a-gone-cluster", "old"]


@pytest.mark.parametrize(
    ("context", "deleted"), [({}, ["long"]), ({"queue": "team"}, []), ({"is_autoscaled": True}, [])]
)
def test_pods_that_wait_for_room_are_given_up_after_a_while_unless_room_may_be_made(
    context: dict[str, Any], deleted: list[str]
) -> None:
    server = RecordedServer(
        make_pod("long", status=wait_for_room(301)), make_pod("short", status=wait_for_room(200)), **context
    )
    asyncio.run(server.cloud.list_nodes(OWNER))
    assert server.list_calls("delete") == deleted


def test_pod_that_is_being_deleted_is_not_deleted_at_every_list() -> None:
    outlived = end(60, phase="Running")
    pods = make_pod("first", status=outlived), make_pod("ending", status=outlived, deletionTimestamp=show_time(5))
    server = RecordedServer(*pods)
    asyncio.run(server.cloud.list_nodes(OWNER))
    assert server.list_calls("delete") == ["first"]


@pytest.mark.parametrize(("seconds_ago", "ended_s"), [(3600, NOW_S - 3600), (-120, NOW_S)])
def test_node_ended_when_the_server_says_but_never_in_the_future(seconds_ago: float, ended_s: float) -> None:
    (node,) = asyncio.run(RecordedServer(make_pod("a", status=end(seconds_ago))).cloud.list_nodes(OWNER)).nodes
    assert (node.state, node.ended_s) == (NodeState.TERMINATED, ended_s)


def test_pod_without_an_address_is_still_pending() -> None:
    started = {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]}
    server = RecordedServer(make_pod("a", status=started), make_pod("b", status={**started, "podIP": "10.0.0.1"}))
    nodes = asyncio.run(server.cloud.list_nodes(OWNER)).nodes
    assert [node.state for node in nodes] == [NodeState.PENDING, NodeState.RUNNING]


def test_refused_gang_leaves_the_pods_of_an_earlier_call_alone() -> None:
    server = RecordedServer()
    server.hides_nodes = True  # so that it does not know the room
    server.refusals = {
        "-0": "Error from server (AlreadyExists): pods already exists",
        "-1": 'Error from server (Forbidden): pods is forbidden: exceeded quota: team',
    }  # fmt: skip
    request = make_request(node_count=3)
    with pytest.raises(QuotaError):
        asyncio.run(server.cloud.create_nodes(request))
    assert server.list_calls("delete") == [f"{name_gang(request)}-2"]


@pytest.mark.parametrize("context", [{"queue": "team"}, {"is_autoscaled": True}])
def test_gang_that_may_wait_is_created_without_room(context: dict[str, Any]) -> None:
    server = RecordedServer(**context)  # its list of nodes is empty, too
    asyncio.run(server.cloud.create_nodes(make_request(node_count=2)))
    assert len(server.list_calls("create")) == 2


def test_cluster_that_is_off_is_not_asked_to_delete() -> None:
    server = RecordedServer(make_pod("a"))
    nodes = asyncio.run(server.cloud.list_nodes(OWNER)).nodes
    off = RecordedServer(is_off=True)
    asyncio.run(off.cloud.terminate_nodes(nodes))
    assert not off.calls
    asyncio.run(server.cloud.terminate_nodes(nodes))
    assert server.list_calls("delete") == ["a"]


def test_one_context_that_answers_is_enough() -> None:
    server = RecordedServer(names=("gone", "test"))
    server.silent = {"gone"}
    asyncio.run(server.cloud.check())
    server.silent = {"gone", "test"}
    with pytest.raises(TransientError, match="gone"):
        asyncio.run(server.cloud.check())


def test_pod_whose_creation_was_not_answered_may_exist() -> None:
    server = RecordedServer(queue="team")
    server.is_creation_lost = True
    with pytest.raises(UnknownOutcomeError):
        asyncio.run(server.cloud.create_nodes(make_request()))


def test_gang_that_has_ended_is_returned_and_not_completed() -> None:
    """The request is answered already: further pods would cost money for a gang that lost a node."""
    server = RecordedServer(make_pod("first", status=end(60)), queue="team")
    (node,) = asyncio.run(server.cloud.create_nodes(make_request(node_count=2)))
    assert node.state is NodeState.TERMINATED and not server.list_calls("create")


def test_deletion_leaves_time_for_its_confirmation() -> None:
    """With a grace period of 0, the server would delete the object while the processes still run."""
    server = RecordedServer(make_pod("a"))
    asyncio.run(server.cloud.terminate_nodes(asyncio.run(server.cloud.list_nodes(OWNER)).nodes))
    assert [path for path in server.paths if path] == ["/api/v1/namespaces/ml/pods/a?gracePeriodSeconds=1"]


class HeldMachine:
    """A machine that ends at its third wait."""

    waits = 0

    def wait(self, timeout: float | None = None) -> int:
        self.waits += 1
        if timeout is not None and self.waits < 3:
            raise subprocess.TimeoutExpired("machine", timeout)
        return 72


@pytest.mark.parametrize(
    ("is_claimed", "unclaimed_s", "is_ended"), [(True, -1.0, False), (False, 1e6, False), (False, -1.0, True)]
)
def test_node_that_its_creator_never_called_shuts_down(
    tmp_path: Path, is_claimed: bool, unclaimed_s: float, is_ended: bool
) -> None:
    state = tmp_path / "home" / ".broker"
    (state / "runs" if is_claimed else state).mkdir(parents=True)
    assert node_program.wait(HeldMachine(), str(tmp_path), unclaimed_s) == 72  # type: ignore[arg-type]
    assert (state / "shutdown").exists() is is_ended
