"""A controller's memory between two polls: silence, failures, stalls, and when to ask again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.jobs.health import MISSES_MIN, UNREACHABLE_S_MIN
from broker.jobs.monitor import (
    ATTENDED_S,
    GAP_S_MAX,
    LEASE_EVERY_S,
    LIST_EVERY_S,
    SILENCE_EVERY_S,
    AttemptMonitor,
    is_due,
    list_answering,
    with_silence,
)
from broker.runtime.reports import GangReport
from broker.types import Attempt, Cluster, ClusterStatus, Node, NodeEnd, NodeState, Placement, Progress, RunStatus
from tests.simulation.world import make_offer

NODES = tuple(
    Node(id=f"n{rank}", cloud="x", owner="me", cluster="c", attempt=1, rank=rank, state=NodeState.RUNNING)
    for rank in range(3)
)
CLUSTER = Cluster(
    name="c",
    status=ClusterStatus.UP,
    placement=Placement(offer=make_offer("east1a"), is_spot=True, node_count=3),
    attempt=1,
    nodes=NODES,
)


def report(
    status: RunStatus = RunStatus.RUNNING,
    *,
    unreachable: tuple[int, ...] = (),
    step: int | None = None,
    reason: str = "",
    advised: tuple[int, ...] = (),
    returncode: int | None = None,
) -> GangReport:
    progress = None if step is None else Progress(step=step)
    return GangReport(
        status=status,
        returncode=returncode,
        statuses=(status,),
        unreachable=unreachable,
        progress=progress,
        run_id=1,
        reason=reason,
        advised=advised,
    )


def test_an_action_is_due_after_its_interval_or_a_clock_set_back() -> None:
    assert not is_due(100.0, 10.0, 100.0)
    assert not is_due(100.0, 10.0, 109.9)
    assert is_due(100.0, 10.0, 110.0)
    assert is_due(100.0, 10.0, 99.9)


def test_lists_and_leases_are_due_at_once_and_then_at_their_intervals() -> None:
    watch = AttemptMonitor("c")
    assert watch.needs_list(report(), 1000.0) and watch.needs_lease(1000.0)
    watch.record_list(1000.0)
    watch.record_lease(1000.0)
    assert not watch.needs_list(report(), 1000.0 + LIST_EVERY_S - 0.1)
    assert watch.needs_list(report(), 1000.0 + LIST_EVERY_S)
    assert not watch.needs_lease(1000.0 + LEASE_EVERY_S - 0.1)
    assert watch.needs_lease(1000.0 + LEASE_EVERY_S)
    assert LIST_EVERY_S == 10.0 and LEASE_EVERY_S == 60.0, "a lease lasts 900 s: it may fail often before that"


def test_a_gang_is_attended_for_five_renewals_after_the_last_one() -> None:
    watch = AttemptMonitor("c")
    assert not watch.is_attended(1000.0), "it has not been renewed yet"
    watch.record_lease(1000.0)
    assert watch.is_attended(1000.0 + ATTENDED_S - 0.1) and not watch.is_attended(1000.0 + ATTENDED_S)
    assert ATTENDED_S == 5 * LEASE_EVERY_S


def test_nodes_that_answer_are_those_that_live_and_are_not_silent() -> None:
    gone = replace(CLUSTER, nodes=(*NODES[:2], replace(NODES[2], state=NodeState.TERMINATED)))
    assert list_answering(report(unreachable=(0,)), gone) == {"n1"}
    assert list_answering(report(), CLUSTER) == {"n0", "n1", "n2"}


@pytest.mark.parametrize(
    "suspicious",
    [report(unreachable=(1,)), report(RunStatus.FAILED), report(RunStatus.FAILED_SETUP)],
)
def test_a_suspicious_report_asks_for_a_list_at_once(suspicious: GangReport) -> None:
    watch = AttemptMonitor("c")
    watch.record_list(1000.0)
    assert watch.is_suspicious(suspicious) and watch.needs_list(suspicious, 1000.0)
    assert not watch.is_suspicious(report()) and not watch.is_suspicious(report(RunStatus.SUCCEEDED))


def test_silence_counts_observed_seconds_and_bounds_each_gap_between_looks() -> None:
    watch = AttemptMonitor("c")
    looks = [watch.record_silence(1000.0 + 10.0 * look) for look in range(14)]
    assert looks.index(True) == UNREACHABLE_S_MIN / 10.0, "from the first silent look on"
    asleep = AttemptMonitor("c")
    jumps = [asleep.record_silence(1000.0 + 3600.0 * look) for look in range(6)]
    assert jumps.index(True) == UNREACHABLE_S_MIN / GAP_S_MAX, "an hour asleep is one gap, no more"


def test_an_answer_ends_the_silence_and_the_next_one_counts_from_its_own_start() -> None:
    watch = AttemptMonitor("c")
    for look in range(12):
        watch.read_signals(report(unreachable=(1,)), CLUSTER, 1000.0 + 10.0 * look)
    before = watch.read_signals(report(unreachable=(1,)), CLUSTER, 1120.0)
    assert (before.misses, before.unreachable_s, before.unreachable) == (13, 120.0, (1,))
    calm = watch.read_signals(report(), CLUSTER, 1130.0)
    assert (calm.misses, calm.unreachable_s) == (0, 0.0)
    again = watch.read_signals(report(unreachable=(1,)), CLUSTER, 1140.0)
    assert (again.misses, again.unreachable_s) == (1, 0.0) and again.misses < MISSES_MIN


def test_a_silence_continues_from_what_an_earlier_process_recorded_until_an_answer() -> None:
    watch = AttemptMonitor("c", silent_s=300.0)
    looks = [watch.read_signals(report(unreachable=(1,)), CLUSTER, 1000.0 + 10.0 * look) for look in range(3)]
    assert [look.unreachable_s for look in looks] == [300.0, 310.0, 320.0]
    assert [look.misses for look in looks] == [1, 2, 3], "but a restarted process makes three observations of its own"
    watch.read_signals(report(), CLUSTER, 1030.0)
    assert watch.read_signals(report(unreachable=(1,)), CLUSTER, 1040.0).unreachable_s == 0.0


def test_a_silence_is_recorded_once_a_minute_and_its_end_at_once() -> None:
    attempt = Attempt(job_id=1, number=1, cluster="c", placement=CLUSTER.placement, started_s=0.0)
    assert with_silence(attempt, 0.0) == attempt and with_silence(attempt, SILENCE_EVERY_S - 0.1) == attempt
    silent = with_silence(attempt, SILENCE_EVERY_S)
    assert silent.silent_s == SILENCE_EVERY_S
    assert with_silence(silent, 2 * SILENCE_EVERY_S - 0.1) == silent
    assert with_silence(silent, 2 * SILENCE_EVERY_S).silent_s == 2 * SILENCE_EVERY_S
    assert with_silence(silent, 0.0) == attempt


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.FAILED_SETUP])
def test_a_failure_is_as_old_as_its_first_observation_and_forgotten_when_it_is_retracted(status: RunStatus) -> None:
    watch = AttemptMonitor("c")
    assert watch.read_signals(report(status, returncode=3), CLUSTER, 1000.0).failed_s == 0.0
    signals = watch.read_signals(report(status, returncode=3), CLUSTER, 1004.0)
    assert (signals.failed_s, signals.returncode, signals.status) == (4.0, 3, status)
    assert watch.read_signals(report(), CLUSTER, 1005.0).failed_s == 0.0
    assert watch.read_signals(report(status), CLUSTER, 1006.0).failed_s == 0.0


def test_a_reported_success_is_final_and_other_signals_stay_current() -> None:
    watch = AttemptMonitor("c")
    watch.observe(report())
    assert not watch.has_succeeded
    watch.observe(report(RunStatus.SUCCEEDED))
    watch.observe(report(RunStatus.FAILED))
    signals = watch.read_signals(report(RunStatus.FAILED, reason=NodeEnd.PREEMPTED), CLUSTER, 1000.0, nodes_min=2)
    assert signals.status is RunStatus.SUCCEEDED and signals.is_noticed and signals.is_spot and signals.nodes_min == 2
    assert signals.nodes == NODES
    assert not watch.read_signals(report(reason="another"), CLUSTER, 1000.0).is_noticed


def test_a_stall_is_measured_from_the_newest_step() -> None:
    watch = AttemptMonitor("c")
    assert watch.measure_stall_s(report(), 1000.0) == 0.0
    assert watch.measure_stall_s(report(), 1010.0) == 10.0, "no step yet: from the first look"
    assert watch.measure_stall_s(report(step=1), 1020.0) == 0.0
    assert watch.measure_stall_s(report(step=1), 1035.0) == 15.0
    assert watch.measure_stall_s(report(step=2), 1036.0) == 0.0


def test_no_stall_time_counts_while_the_head_is_silent() -> None:
    watch = AttemptMonitor("c")
    watch.measure_stall_s(report(step=1), 1000.0)
    assert watch.measure_stall_s(report(step=1), 1010.0) == 10.0
    assert watch.measure_stall_s(report(unreachable=(0,)), 1030.0) == 10.0
    assert watch.measure_stall_s(report(unreachable=(0,)), 1050.0) == 10.0
    assert watch.measure_stall_s(report(step=1), 1055.0) == 15.0
    assert watch.measure_stall_s(report(step=1, unreachable=(1,)), 1060.0) == 20.0, "another rank does not report steps"


def test_each_node_is_reported_once_by_its_rank() -> None:
    watch = AttemptMonitor("c")
    assert watch.list_new_advisories(report(advised=(2, 1)), CLUSTER) == [1, 2]
    assert watch.list_new_advisories(report(advised=(0, 1, 2)), CLUSTER) == [0]
    assert watch.list_new_advisories(report(advised=(0, 1, 2)), CLUSTER) == []
