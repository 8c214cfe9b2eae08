"""The joint meaning of a report and a list: the table of verdicts, at the borders of each rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.jobs.health import (
    GANG_UNREACHABLE_S_MIN,
    MISSES_MIN,
    NOTICE_S_MAX,
    PEER_LOSS_S_MAX,
    UNREACHABLE_S_MIN,
    HealthSignals,
    Verdict,
    classify,
    find_unreachable_s_max,
    list_lost_ranks,
    measure_doubt_s,
)
from broker.types import Node, NodeEnd, NodeState, RunStatus

FAILURES = [(RunStatus.FAILED, Verdict.FAILED), (RunStatus.FAILED_SETUP, Verdict.FAILED_SETUP)]


def make_nodes(*states: NodeState, reason: str = "") -> tuple[Node, ...]:
    return tuple(
        Node(
            id=f"n{rank}", cloud="x", owner="me", cluster="c", attempt=1, rank=rank, state=state,
            reason=reason if state is NodeState.TERMINATED else "",
        )
        for rank, state in enumerate(states)
    )  # fmt: skip


UP = make_nodes(NodeState.RUNNING, NodeState.RUNNING)
CALM = HealthSignals(status=RunStatus.RUNNING, returncode=None, unreachable=(), nodes=UP, is_spot=True)


def test_a_run_that_answers_with_all_its_nodes_is_running() -> None:
    assert classify(CALM) is Verdict.RUNNING
    assert classify(replace(CALM, status=RunStatus.SETTING_UP)) is Verdict.RUNNING


@pytest.mark.parametrize("state", [NodeState.TERMINATED, NodeState.STOPPED])
def test_one_lost_node_loses_a_gang_whatever_it_reports_but_a_success(state: NodeState) -> None:
    lost = replace(CALM, nodes=make_nodes(NodeState.RUNNING, state))
    for status in (RunStatus.RUNNING, RunStatus.FAILED, RunStatus.CANCELLED):
        assert classify(replace(lost, status=status)) is Verdict.LOST
    assert classify(replace(lost, status=RunStatus.SUCCEEDED)) is Verdict.SUCCEEDED


@pytest.mark.parametrize(("ranks", "patience_s"), [((1,), UNREACHABLE_S_MIN), ((0, 1), GANG_UNREACHABLE_S_MIN)])
def test_silence_is_a_loss_only_when_it_is_both_repeated_and_long(ranks: tuple[int, ...], patience_s: float) -> None:
    silent = replace(CALM, status=None, unreachable=ranks)
    assert classify(replace(silent, misses=MISSES_MIN - 1, unreachable_s=1e6)) is Verdict.UNCLEAR
    assert classify(replace(silent, misses=10**6, unreachable_s=patience_s - 0.1)) is Verdict.UNCLEAR
    assert classify(replace(silent, misses=MISSES_MIN, unreachable_s=patience_s)) is Verdict.LOST
    assert (MISSES_MIN, UNREACHABLE_S_MIN, GANG_UNREACHABLE_S_MIN) == (3, 120.0, 600.0)


def test_nodes_that_are_confirmed_gone_do_not_count_among_those_that_could_answer() -> None:
    three = make_nodes(NodeState.RUNNING, NodeState.RUNNING, NodeState.TERMINATED)
    assert find_unreachable_s_max(replace(CALM, nodes=three, unreachable=(0, 1))) == GANG_UNREACHABLE_S_MIN
    assert find_unreachable_s_max(replace(CALM, nodes=three, unreachable=(1,))) == UNREACHABLE_S_MIN


def test_missed_polls_are_reset_once_all_nodes_answer() -> None:
    assert classify(replace(CALM, misses=MISSES_MIN, unreachable_s=UNREACHABLE_S_MIN)) is Verdict.RUNNING


@pytest.mark.parametrize(("status", "verdict"), FAILURES)
def test_an_exit_code_on_machines_that_stay_is_the_users_failure(status: RunStatus, verdict: Verdict) -> None:
    failed = replace(CALM, status=status, returncode=3, is_spot=False)
    assert classify(failed) is verdict
    assert classify(replace(failed, unreachable=(1,))) is Verdict.UNCLEAR, "its peer may be gone"
    assert classify(replace(failed, returncode=None)) is Verdict.APART
    assert classify(replace(failed, is_noticed=True)) is Verdict.LOST


def test_a_program_that_succeeded_is_not_lost_with_its_nodes() -> None:
    gone = make_nodes(NodeState.RUNNING, NodeState.TERMINATED)
    ended = replace(CALM, status=RunStatus.FAILED, returncode=74, nodes=gone, is_unflushed=True)
    assert classify(ended) is Verdict.FAILED and classify(replace(ended, is_unflushed=False)) is Verdict.LOST
    assert classify(replace(ended, status=RunStatus.SETTING_UP, unreachable=(0, 1))) is Verdict.FAILED


def test_a_notice_alone_does_not_end_the_run() -> None:
    assert classify(replace(CALM, is_noticed=True)) is Verdict.RUNNING


def test_a_failure_of_a_spot_gang_is_doubted_until_the_list_had_time_to_learn_of_a_loss() -> None:
    failed = replace(CALM, status=RunStatus.FAILED, returncode=1)
    assert classify(replace(failed, failed_s=PEER_LOSS_S_MAX - 0.1)) is Verdict.UNCLEAR
    assert classify(replace(failed, failed_s=PEER_LOSS_S_MAX)) is Verdict.FAILED


@pytest.mark.parametrize("code", [143, -15])
def test_a_program_that_was_sent_sigterm_is_doubted_for_a_whole_notice(code: int) -> None:
    ended = replace(CALM, status=RunStatus.FAILED, returncode=code)
    assert measure_doubt_s(ended) == NOTICE_S_MAX == 150.0
    assert measure_doubt_s(replace(ended, is_spot=False)) == 2 * PEER_LOSS_S_MAX == 10.0
    preempted = replace(
        ended, returncode=1, nodes=make_nodes(NodeState.RUNNING, NodeState.TERMINATED, reason="preempted")
    )
    assert measure_doubt_s(preempted) == NOTICE_S_MAX


def test_failures_are_not_doubted_if_no_peer_can_be_lost() -> None:
    failed = replace(CALM, status=RunStatus.FAILED, returncode=1)
    assert measure_doubt_s(failed) == PEER_LOSS_S_MAX
    assert measure_doubt_s(replace(failed, is_spot=False)) == 0.0
    assert measure_doubt_s(replace(failed, nodes=UP[:1])) == 0.0


def test_a_cancelled_run_is_cancelled_and_one_rank_out_of_reach_makes_a_run_unclear() -> None:
    assert classify(replace(CALM, status=RunStatus.CANCELLED)) is Verdict.CANCELLED
    assert classify(replace(CALM, unreachable=(1,))) is Verdict.UNCLEAR


def test_an_elastic_program_continues_with_its_first_node_and_enough_others() -> None:
    three = make_nodes(NodeState.RUNNING, NodeState.RUNNING, NodeState.TERMINATED)
    elastic = replace(CALM, nodes=three, nodes_min=2)
    assert classify(elastic) is Verdict.RUNNING
    assert classify(replace(elastic, nodes_min=3)) is Verdict.LOST
    assert classify(replace(elastic, nodes_min=None)) is Verdict.LOST
    assert classify(replace(elastic, status=RunStatus.SETTING_UP)) is Verdict.LOST
    first = make_nodes(NodeState.TERMINATED, NodeState.RUNNING, NodeState.RUNNING)
    assert classify(replace(elastic, nodes=first)) is Verdict.LOST
    stopped = make_nodes(NodeState.RUNNING, NodeState.RUNNING, NodeState.STOPPED)
    assert classify(replace(elastic, nodes=stopped)) is Verdict.LOST, "it holds its place and cannot be replaced"


def test_an_elastic_program_does_not_go_on_after_it_has_filled_a_node() -> None:
    """Each new node would be filled in turn; as a loss of the gang, its failures at one step are counted."""
    states = (NodeState.RUNNING, NodeState.RUNNING, NodeState.TERMINATED)
    elastic = replace(CALM, nodes=make_nodes(*states, reason=NodeEnd.OUT_OF_MEMORY), nodes_min=2)
    assert classify(elastic) is Verdict.LOST
    assert classify(replace(elastic, nodes=make_nodes(*states, reason=NodeEnd.PREEMPTED))) is Verdict.RUNNING
    assert classify(replace(elastic, status=RunStatus.SUCCEEDED)) is Verdict.SUCCEEDED


def test_lost_ranks_are_named_by_rank() -> None:
    nodes = make_nodes(NodeState.STOPPED, NodeState.PENDING, NodeState.TERMINATED, NodeState.RUNNING)
    assert list_lost_ranks(nodes) == [0, 2]
