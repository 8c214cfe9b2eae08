"""The head of an elastic gang moves: one rank per epoch, whatever fails, restarts or is late."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import TransientError
from broker.jobs.head_moves import HeadMover, list_members
from broker.jobs.health import HealthSignals, Verdict, can_continue, classify, find_next_head
from broker.state.store import Store
from broker.types import Attempt, Cluster, ClusterStatus, GangHead, JobRecovery, NodeState, Placement, RunStatus, Task
from tests.simulation.world import Report, make_offer
from tests.state.samples import NODE, START_S, Hands
from tests.tiers import examples

RUNNING, SETTING_UP, FAILED = RunStatus.RUNNING, RunStatus.SETTING_UP, RunStatus.FAILED
TASK = Task(num_nodes=3, recovery=JobRecovery(nodes_min=1))


class Agents:
    """The agents of three nodes, by the rules of `agent_head.receive`. `fails` says which calls are lost."""

    def __init__(self) -> None:
        self.known = {rank: GangHead() for rank in range(3)}
        self.leaders: dict[int, set[int]] = {0: {0}}  # epoch -> every rank that has led in it
        self.fails: list[bool] = []

    def _hear(self, rank: int, head: GangHead) -> bool:
        if self.fails and self.fails.pop():
            raise TransientError("no answer")
        known = self.known[rank]
        if head.epoch < known.epoch or (head.epoch == known.epoch and head.rank != known.rank):
            return False
        self.known[rank] = head
        return True

    async def move_head(
        self, cluster: Cluster, run_id: int, head: GangHead, *, members: Sequence[int], log_bytes: int
    ) -> bool:
        if not self._hear(head.rank, head):
            return False
        self.leaders.setdefault(head.epoch, set()).add(head.rank)
        for rank in members:
            self._hear(rank, head)
        return True


class Forgetful(HeadMover):
    """The planted bug: the choice is not committed before the nodes are notified."""

    def _name_next(self, attempt: Attempt, signals: HealthSignals) -> Attempt:
        rank = find_next_head(signals)
        return attempt if rank is None else replace(attempt, head=GangHead(epoch=attempt.head.epoch + 1, rank=rank))


class Stage:
    """A gang of three in a store, and a controller's mover, which may be replaced at any time."""

    def __init__(self, folder: Path, maker: type[HeadMover] = HeadMover) -> None:
        self.store = Store(folder / "state.db", clock=Hands())
        job = self.store.jobs.add("j", TASK)
        placement = Placement(offer=make_offer("east1a"), is_spot=True, node_count=3)
        nodes = tuple(replace(NODE, id=f"n{rank}", rank=rank, address=f"10.0.0.{rank}") for rank in range(3))
        self.cluster = Cluster(
            name="c", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=nodes, created_s=START_S
        )
        attempt = Attempt(job_id=job.id, number=1, cluster="c", placement=placement, started_s=START_S)
        self.store.jobs.put_attempt(attempt)
        self.agents = Agents()
        self.maker = maker
        self.restart()
        self.statuses: list[RunStatus | None] = [RUNNING] * 3

    def restart(self) -> None:
        self.mover = self.maker(self.store, self.agents)  # type: ignore[arg-type]

    @property
    def attempt(self) -> Attempt:
        return self.store.jobs.list_attempts(1)[0]

    def lose(self, rank: int) -> None:
        nodes = [
            replace(each, state=NodeState.TERMINATED) if each.rank == rank else each for each in self.cluster.nodes
        ]
        self.cluster = replace(self.cluster, nodes=tuple(nodes))
        self.statuses[rank] = None

    def replace_node(self, rank: int) -> None:
        """Put a new node, which has joined, in the place of a lost one."""
        new = replace(self.cluster.nodes[rank], id=f"new{rank}", address="10.0.1.1", state=NodeState.RUNNING)
        nodes = [new if each.rank == rank else each for each in self.cluster.nodes]
        self.cluster = replace(self.cluster, nodes=tuple(nodes))
        self.agents.known[rank] = self.attempt.head
        self.statuses[rank] = RUNNING

    def step(self) -> bool:
        """Take one step; return whether new nodes can join."""
        followers = tuple(rank for rank, status in enumerate(self.statuses) if status is RUNNING)
        report = Report(
            status=RUNNING, returncode=None, unreachable=(), progress=None,
            statuses=tuple(self.statuses), followers=followers,
        )  # fmt: skip
        signals = make_signals(self.statuses, followers, self.cluster, head=self.attempt.head.rank)
        _, is_open = asyncio.run(self.mover.step(self.attempt, self.cluster, report, signals))
        return is_open


def make_signals(
    statuses: Sequence[RunStatus | None], followers: Sequence[int], cluster: Cluster, *, head: int = 0
) -> HealthSignals:
    return HealthSignals(
        status=RUNNING, returncode=None, unreachable=(), nodes=cluster.nodes, is_spot=True, nodes_min=1,
        head_rank=head, statuses=tuple(statuses), followers=tuple(followers),
    )  # fmt: skip


def test_lowest_survivor_takes_over_and_all_are_notified(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.step()
    stage.lose(0)
    assert stage.step() and stage.attempt.head == GangHead(epoch=1, rank=1)
    assert stage.agents.known[1] == stage.agents.known[2] == stage.attempt.head
    assert "node 1 now coordinates the others" in [each.message for each in stage.store.events.list(job_id=1)]


def test_new_nodes_join_only_once_the_survivors_know_their_head(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.step()
    stage.lose(0)
    stage.agents.fails = [True]
    assert not stage.step() and stage.attempt.head.epoch == 1
    assert stage.step()


@pytest.mark.parametrize(
    ("statuses", "followers", "expected"),
    [
        ((None, RUNNING, RUNNING), (1, 2), 1),
        ((None, None, RUNNING), (2,), 2),  # one that does not answer right now may still run
        ((None, SETTING_UP, RUNNING), (2,), 2),
        ((None, RUNNING, RUNNING), (1,), None),
        ((None, RUNNING, FAILED), (1, 2), None),
        ((None, SETTING_UP, SETTING_UP), (), None),
        ((None, None, None), (), None),
    ],
)
def test_gang_continues_without_its_head_only_if_every_program_does(
    statuses: Sequence[RunStatus | None], followers: Sequence[int], expected: int | None, tmp_path: Path
) -> None:
    stage = Stage(tmp_path)
    stage.lose(0)
    signals = make_signals(statuses, followers, stage.cluster)
    assert find_next_head(signals) == expected
    assert can_continue(signals) == (expected is not None)
    assert classify(signals) is (Verdict.LOST if expected is None else Verdict.RUNNING)
    assert classify(replace(signals, nodes_min=3)) is Verdict.LOST, "too few are left"


STEPS = st.lists(st.sampled_from(["step", "step", "step", "restart", "lose", "replace", "fail"]), max_size=40)


def play(steps: Sequence[str], ranks: Sequence[int], maker: type[HeadMover]) -> None:
    """Play one history. Every epoch has at most one head, and all survivors follow the newest once calls succeed."""
    with TemporaryDirectory() as folder:
        stage = Stage(Path(folder), maker)
        for place, step in enumerate(steps):
            rank = ranks[place % len(ranks)]
            live = [each for each, status in enumerate(stage.statuses) if status]
            if step == "step":
                stage.step()
            elif step == "restart":
                stage.restart()
            elif step == "fail":
                stage.agents.fails = [bool(each) for each in ranks]
            elif step == "lose" and rank in live and len(live) > 1:
                stage.lose(rank)
            elif step == "replace" and rank not in live and stage.step():
                stage.replace_node(rank)
        stage.agents.fails = []
        assert stage.step(), "it never settles"
        assert all(len(each) == 1 for each in stage.agents.leaders.values()), stage.agents.leaders
        report = Report(status=RUNNING, returncode=None, unreachable=(), progress=None, statuses=tuple(stage.statuses))
        heads = {stage.agents.known[rank] for rank in list_members(report, stage.cluster)}
        assert heads == {stage.attempt.head}


@settings(max_examples=examples(60), deadline=None)
@given(steps=STEPS, ranks=st.lists(st.integers(0, 2), min_size=1, max_size=7))
def test_no_history_has_two_heads_in_one_epoch(steps: list[str], ranks: list[int]) -> None:
    play(steps, ranks, HeadMover)


def test_choice_that_is_not_committed_first_is_detected() -> None:
    """The controller names the second node, restarts while that is lost too, and names the third for the same epoch."""
    with pytest.raises(AssertionError):
        play(["step", "lose", "step", "restart", "lose", "step"], [0, 0, 0, 0, 1, 0], Forgetful)
