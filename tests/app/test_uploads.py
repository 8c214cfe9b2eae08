"""`down` waits for uploads of every node: a silent node has not uploaded, and a node that is gone is not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from broker.app import uploads as waiting
from broker.app.uploads import HOLD_S, SILENCE_S, wait_for_uploads
from broker.errors import BrokerError, StateError
from broker.runtime.reports import Uploads
from broker.types import Cluster, ClusterStatus, Placement
from tests.clouds.beds import make_node
from tests.simulation.world import make_offer

NODES = tuple(replace(make_node(f"n{rank}"), rank=rank) for rank in range(2))
CLUSTER = Cluster(
    name="dev", status=ClusterStatus.UP, attempt=1, nodes=NODES,
    placement=Placement(offer=make_offer("here"), is_spot=False, node_count=2),
)  # fmt: skip
CLEAN = Uploads(has_mounts=True)
PENDING = Uploads(has_mounts=True, file_count=1, size_bytes=7, urls=("s3://bucket/out",))


class FakeContext:
    """A context with its clock, and a gang that gives these answers in turn and then repeats the last one."""

    def __init__(self, answers: Sequence[Uploads]) -> None:
        self._answers = list(answers)
        self.time_s, self.notes = 0.0, list[str]()
        self.context: Any = SimpleNamespace(clock=self, gang=self, note=self.notes.append)

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s

    async def read_uploads(self, cluster: Cluster, *, timeout_s: float) -> Uploads:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    async def list_runs(self, cluster: Cluster) -> list[Any]:
        return []

    def wait(self) -> None:
        asyncio.run(wait_for_uploads(self.context, CLUSTER))


def test_node_that_is_silent_for_a_moment_may_have_pending_files() -> None:
    bed = FakeContext([PENDING, replace(CLEAN, silent=("n1",)), PENDING, CLEAN])
    bed.wait()
    assert bed.time_s == 3 * waiting.POLL_S, "its silence was not taken for an upload"
    assert len(bed.notes) == 1 and "1 file (0.000 GB) for `s3://bucket/out` is uploaded" in bed.notes[0]


def test_cluster_whose_nodes_answer_late_is_asked_again_before_its_files_are_given_up() -> None:
    bed = FakeContext([Uploads(silent=("n0", "n1")), PENDING, CLEAN])
    bed.wait()
    assert len(bed.notes) == 1 and "1 file (0.000 GB) for `s3://bucket/out` is uploaded" in bed.notes[0]


def test_node_that_stays_silent_is_lost_and_named() -> None:
    bed = FakeContext([replace(CLEAN, silent=("n1",))])
    bed.wait()
    assert SILENCE_S <= bed.time_s < SILENCE_S + 2 * waiting.POLL_S
    assert bed.notes == ["no answer from `n1`: files that are not yet in their mounted bucket are lost"]


def test_cluster_stays_up_when_nothing_arrives() -> None:
    bed = FakeContext([PENDING])
    with pytest.raises(BrokerError, match="still up: nothing was uploaded for 30m") as caught:
        bed.wait()
    assert bed.time_s == HOLD_S and "--now dev" in caught.value.hints[1]


def test_progress_prolongs_the_wait() -> None:
    bed = FakeContext([*[replace(PENDING, sent_bytes=sent) for sent in range(int(HOLD_S) + 100)], CLEAN])
    bed.wait()
    assert bed.time_s == HOLD_S + 100


@pytest.mark.parametrize(("answer", "notes"), [(Uploads(), 0), (Uploads(silent=("n0", "n1")), 1)])
def test_cluster_without_mounts_or_without_nodes_is_not_waited_for(answer: Uploads, notes: int) -> None:
    bed = FakeContext([answer])
    bed.wait()
    assert bed.time_s == 0.0 and len(bed.notes) == notes


@pytest.mark.parametrize(
    ("hints", "shown"),
    [
        (("install OpenSSH's client",), ("install OpenSSH's client", "or terminate it without")),
        (("run `broker down --now dev`, or use another BROKER_HOME",), ("terminate it without",)),
    ],
)
def test_cluster_whose_nodes_this_machine_cannot_ask_stays_up_and_the_error_names_the_way_out(
    hints: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    """Without ssh or without the cluster's keys: files may be on their way, and the machines are paid for."""
    bed = FakeContext([CLEAN])

    async def fail(cluster: Cluster, *, timeout_s: float) -> Uploads:
        raise StateError("`ssh` is not installed", hints=hints)

    bed.read_uploads = fail  # type: ignore[method-assign]
    with pytest.raises(BrokerError, match=r"`dev` is still up, at [0-9.]+ USD/h: `ssh` is not installed") as caught:
        bed.wait()
    assert not isinstance(caught.value, StateError)
    assert len(caught.value.hints) == len(shown)
    assert all(hint.startswith(start) for hint, start in zip(caught.value.hints, shown, strict=True))
    assert caught.value.hints[-1].endswith("`broker down --now dev`")
