"""A plan counts on starts that earlier jobs have measured, where `setup` is restored from an archive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from broker.app.container import Context
from broker.types import Attempt, EventKind, Goal, JobRecovery, Outcome, OutcomeKind, Resources, Task, make_event

TASK = Task(
    name="train", setup="pip install .", run="x", recovery=JobRecovery(caches_setup=True),
    goal=Goal(work_hours=20.0, deadline_hours=40.0),
    resources=(Resources(cloud="aws", accelerator="A100", accelerator_count=8),),
)  # fmt: skip


def test_plan_of_a_task_with_an_archive_counts_on_measured_starts(tmp_path: Path) -> None:
    context = Context(tmp_path)
    told = context.plan(TASK)
    job = context.store.jobs.add("train", TASK)
    now_s = context.clock.now_s()
    for number, (took_s, kind) in enumerate([(1900.0, EventKind.SETUP_KEPT), (90.0, EventKind.SETUP_RESTORED)], 1):
        attempt = Attempt(
            job_id=job.id, number=number, cluster=f"c-{number}", placement=told.choice.placement, started_s=now_s,
            resumed_s=now_s + took_s, ended_s=now_s + 9000.0, outcome=Outcome(kind=OutcomeKind.PREEMPTED),
        )  # fmt: skip
        context.store.jobs.put_attempt(attempt)
        context.store.events.add(make_event(kind, number=number, setup_s=1800.0, size_gib=1.0), job_id=job.id)
    known = Context(tmp_path).plan(TASK)
    assert known.choice.breakdown is not None and known.choice.breakdown.recovery_s == 90.0
    assert known.task == TASK, "the plan names the task as it was given"
    assert told.choice.expected_usd is not None and known.choice.expected_usd is not None
    other = Context(tmp_path).plan(replace(TASK, setup="conda install x"))
    assert other.choice.breakdown is not None and other.choice.breakdown.recovery_s == 300.0
