"""The log of a run is followed through short interruptions of the connection, and no further than they are short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.app import clusters
from broker.app.clusters import find_run_id
from broker.app.container import Context
from broker.errors import TransientError, UsageError
from broker.types import Cluster, ClusterStatus, Placement, RunStatus
from tests.clouds.clock_jumps import JumpingClock
from tests.simulation.world import make_offer
from tests.state.samples import NODE

CLUSTER = Cluster(
    name="c", status=ClusterStatus.UP, placement=Placement(offer=make_offer("east1a"), is_spot=False, node_count=1),
    attempt=1, nodes=(NODE,), created_s=0.0,
)  # fmt: skip
LINES = 400


class Gang:
    """A gang that prints a line per poll; `answers(number of the poll)` is "" if the nodes can be reached."""

    def __init__(self, answers: Callable[[int], str]) -> None:
        self._answers, self._polls, self._text = answers, 0, b""

    async def poll(self, cluster: Cluster, run_id: int) -> Any:
        self._polls += 1
        is_silent, is_known = self._answers(self._polls) == "silent", self._answers(self._polls) != "unknown"
        if not is_silent and is_known and self._polls <= LINES:
            self._text += b"line\n"
        status = RunStatus.SUCCEEDED if self._polls >= LINES else RunStatus.RUNNING
        statuses = (status if is_known and not is_silent else None,)
        if not is_known:
            status = RunStatus.SETTING_UP
        return SimpleNamespace(unreachable=(0,) if is_silent else (), status=status, statuses=statuses, returncode=None)

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        if self._answers(self._polls) == "cut":
            raise TransientError("the connection was lost")
        return self._text[offset:], len(self._text)


def follow(answers: Callable[[int], str], *, is_following: bool = True, now: Cluster | None = CLUSTER) -> list[str]:
    context: Any = SimpleNamespace(
        gang=Gang(answers), clock=JumpingClock(), note=lambda text: None,
        store=SimpleNamespace(clusters=SimpleNamespace(get=lambda name: now)),
    )  # fmt: skip

    async def act() -> list[str]:
        return [line async for line in clusters.follow_run(context, CLUSTER, 1, is_following=is_following)]

    return asyncio.run(act())


@pytest.mark.parametrize("fault", ["silent", "cut"])
def test_short_interruption_does_not_end_the_log_of_a_run_that_continues(fault: str) -> None:
    lines = follow(lambda poll: fault if 10 <= poll < 10 + clusters.SILENCE_S_MAX / clusters.POLL_S / 2 else "")
    assert len(lines) > 100 and set(lines) == {"line"}


@pytest.mark.parametrize(
    ("is_following", "first", "now"), [(True, 10, None), (True, 1, CLUSTER), (False, 2, CLUSTER), (True, 10, CLUSTER)]
)
def test_nodes_that_stay_silent_were_never_heard_or_are_taken_down_are_an_error(
    is_following: bool, first: int, now: Cluster | None
) -> None:
    with pytest.raises(UsageError, match="no node of cluster `c` responds"):
        follow(lambda poll: "silent" if poll >= first else "", is_following=is_following, now=now)


def test_a_run_that_never_reaches_its_nodes_is_not_followed_for_ever() -> None:
    """Its ID was drawn before its files were uploaded, and that was interrupted."""
    with pytest.raises(UsageError, match="run 1 has not reached the nodes of `c`"):
        follow(lambda poll: "unknown" if poll < 10 * LINES else "")  # else it would end with these
    begun = int(clusters.UNKNOWN_S_MAX / clusters.POLL_S / 2)
    assert len(follow(lambda poll: "unknown" if poll < begun else "")) == LINES - begun + 1


@pytest.mark.parametrize("run_id", [0, -1, 3])
def test_the_output_of_an_unknown_run_is_refused_and_not_awaited_for_ever(tmp_path: Path, run_id: int) -> None:
    context = Context(tmp_path / "home")
    try:
        for _ in range(2):
            context.store.clusters.next_run_id("dev")
        assert [find_run_id(context, "dev", each) for each in (None, 1, 2)] == [2, 1, 2]
        with pytest.raises(UsageError, match=f"unknown run {run_id} on `dev`") as error:
            find_run_id(context, "dev", run_id)
    finally:
        context.close()
    assert error.value.hints == ("list the runs with `broker queue dev`",)
