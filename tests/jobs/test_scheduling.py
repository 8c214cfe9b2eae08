"""The handling of due times is decided from values: one start at most, and a record for everything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.jobs.scheduling import BUSY, FULL, decide_step
from broker.types import DueOutcome, JobSchedule, Overlap, ScheduleSpec
from tests.tiers import examples

MINUTE = 60.0
T = 1_800_000_000.0  # a whole minute


def make(overlap: Overlap = Overlap.SKIP, *, next_s: float | None = T) -> JobSchedule:
    spec = ScheduleSpec(cron="* * * * *", overlap=overlap)
    return JobSchedule(name="j", uid="u", spec=spec, next_s=next_s, is_paused=False, created_s=T, hedge=2)


def test_nothing_happens_before_the_due_time() -> None:
    step = decide_step(make(), waiting_s=None, is_busy=False, now_s=T - 1)
    assert step.is_idle and step.next_s == T
    assert decide_step(make(next_s=None), waiting_s=None, is_busy=False, now_s=1e11 / 2).is_idle


def test_due_time_starts_a_job_and_the_schedule_moves_on() -> None:
    step = decide_step(make(), waiting_s=None, is_busy=False, now_s=T + 3)
    assert (step.records, step.start_s, step.next_s) == ((), T, T + MINUTE)


def test_newest_missed_due_time_is_caught_up_and_the_others_are_recorded() -> None:
    step = decide_step(make(), waiting_s=None, is_busy=False, now_s=T + 3 * MINUTE + 20)
    assert (step.start_s, step.next_s) == (T + 3 * MINUTE, T + 4 * MINUTE)
    (missed,) = step.records
    assert (missed.outcome, missed.due_s, missed.count, missed.last_s) == (
        DueOutcome.MISSED, T, 3, T + 2 * MINUTE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overlap", "waiting_s", "outcome", "detail"),
    [
        (Overlap.SKIP, None, DueOutcome.SKIPPED, BUSY),
        (Overlap.QUEUE, None, DueOutcome.WAITING, ""),
        (Overlap.QUEUE, T - MINUTE, DueOutcome.SKIPPED, FULL),
    ],
)
def test_due_time_of_a_live_job_is_skipped_or_waits(
    overlap: Overlap, waiting_s: float | None, outcome: DueOutcome, detail: str
) -> None:
    step = decide_step(make(overlap), waiting_s=waiting_s, is_busy=True, now_s=T)
    (record,) = step.records
    assert (record.due_s, record.outcome, record.detail, step.start_s) == (T, outcome, detail, None)


def test_waiting_due_time_starts_when_the_job_has_ended_also_between_due_times() -> None:
    waiting = make(Overlap.QUEUE, next_s=T + MINUTE)
    assert decide_step(waiting, waiting_s=T, is_busy=True, now_s=T + 5).is_idle
    step = decide_step(waiting, waiting_s=T, is_busy=False, now_s=T + 5)
    assert (step.records, step.start_s, step.next_s) == ((), T, T + MINUTE)
    ended = decide_step(replace(waiting, next_s=None), waiting_s=T, is_busy=False, now_s=T + 5)
    assert (ended.start_s, ended.next_s) == (T, None)


def test_next_due_time_waits_where_the_one_before_it_starts() -> None:
    step = decide_step(make(Overlap.QUEUE), waiting_s=T - MINUTE, is_busy=False, now_s=T)
    (record,) = step.records
    assert (step.start_s, record.due_s, record.outcome) == (T - MINUTE, T, DueOutcome.WAITING)


@settings(max_examples=examples(200), deadline=None, derandomize=True, database=None)
@given(
    overlap=st.sampled_from(Overlap), waits=st.booleans(), is_busy=st.booleans(), late_s=st.integers(0, 3000).map(float)
)
def test_every_due_time_is_started_or_recorded_exactly_once(
    overlap: Overlap, *, waits: bool, is_busy: bool, late_s: float
) -> None:
    waiting_s = T - MINUTE if waits and overlap is Overlap.QUEUE else None
    step = decide_step(make(overlap), waiting_s=waiting_s, is_busy=is_busy, now_s=T + late_s)
    told = [each.due_s + MINUTE * number for each in step.records for number in range(each.count)]
    if step.start_s is not None:
        assert not is_busy
        told += [step.start_s] if step.start_s >= T else []
    assert sorted(told) == [T + MINUTE * number for number in range(int(late_s // MINUTE) + 1)]
    assert step.next_s == T + MINUTE * (late_s // MINUTE + 1)
    assert sum(each.outcome is DueOutcome.WAITING for each in step.records) <= 1
