"""When a rehearsal preempts a job, and the losses that it notes of a service."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from broker.rehearsal.cloud import PreemptedNode
from broker.rehearsal.driver import ForcedPreemption
from broker.rehearsal.gang import WatchedProgram
from broker.rehearsal.report import Line
from broker.rehearsal.run import JobDriver
from broker.rehearsal.service_watch import ReplicaWatch
from broker.rehearsal.uptime import ReadyCount


def make_driver(*forced_preemptions: ForcedPreemption, preemptions: int = 1) -> JobDriver:
    attempts = {
        number: WatchedProgram(number=number, started_s=0.0, source=Path("a"), progress_file=Path("b"), running_s=0.0)
        for number in range(1, len(forced_preemptions) + 2)
    }
    context = cast(Any, SimpleNamespace(program=SimpleNamespace(attempts=attempts)))
    return JobDriver(context, preemptions, None, print, forced_preemptions=list(forced_preemptions))


def make_line(step: int) -> Line:
    return Line(step=step, total=30, loss=None, checkpoint_step=10, time_s=None)


def test_a_job_is_preempted_in_the_middle_and_past_a_checkpoint() -> None:
    driver = make_driver()
    assert not driver._is_due(1, make_line(14)) and driver._is_due(1, make_line(15))
    done = ForcedPreemption(attempt=1, step=15, notice_s=0.0)
    assert not make_driver(done)._is_due(2, make_line(20))


def test_a_preemption_before_the_first_step_is_followed_by_one_between_checkpoints() -> None:
    """A program that only starts slowly, on a busy machine, looks like one that never reports its steps."""
    early = ForcedPreemption(attempt=1, step=None, notice_s=0.0)
    assert make_driver()._is_due(1, None)
    driver = make_driver(early)
    assert not driver._is_due(2, None), "a program that reports nothing is preempted as often as requested"
    assert not driver._is_due(2, make_line(14)) and driver._is_due(2, make_line(15))


def test_the_loss_of_a_warned_replica_is_compared_with_the_time_before_its_notice() -> None:
    node = PreemptedNode(node_id="n", preemption=1, ended_s=None)
    cloud = SimpleNamespace(name="aws", list_preempted=lambda: [node])
    watch = ReplicaWatch(cast(Any, SimpleNamespace(rehearsed={"aws": cloud})))
    watch._places["n"] = 1, "aws us-east-1a"
    watch.counts.append(ReadyCount(time_s=0.0, wanted=1, ready=1))
    watch._note_losses()
    watch.counts.append(ReadyCount(time_s=1.0, wanted=1, ready=0))
    assert not watch.losses
    node = PreemptedNode(node_id="n", preemption=1, ended_s=2.0)
    watch._note_losses()
    assert [(each.announced, each.counted, each.replicas) for each in watch.losses] == [(1, 2, (1,))]
