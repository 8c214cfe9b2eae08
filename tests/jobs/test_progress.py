"""Progress and silence of an attempt, as they are recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.jobs.monitor import SILENCE_EVERY_S
from broker.jobs.progress import complete_progress, record_progress, record_silence
from broker.jobs.replanning import cut_to_rest
from broker.state.store import Store
from broker.types import Attempt, Goal, Progress, Task
from tests.state.samples import ATTEMPT, START_S, Hands
from tests.state.test_durability import FULL, NORMAL, Recording


def test_the_end_of_a_silence_is_on_the_disk_at_once(tmp_path: Path) -> None:
    """After a power cut a silence is observed again, but its end is not: a gang would be given up too soon."""
    store = Recording(tmp_path / "state.db")
    attempt = replace(ATTEMPT, job_id=store.jobs.add("j", Task()).id)
    store.jobs.put_attempt(attempt)
    store.commits.clear()
    attempt = record_silence(store, attempt, 2 * SILENCE_EVERY_S)
    assert store.commits == [NORMAL] and store.jobs.list_attempts(attempt.job_id) == [attempt]
    attempt = record_silence(store, attempt, 0.0)
    assert store.commits == [NORMAL, FULL] and attempt.silent_s == 0.0
    assert record_silence(store, attempt, 0.0) == attempt and len(store.commits) == 2


def test_only_a_checkpoint_of_a_later_step_is_a_new_one(tmp_path: Path) -> None:
    clock = Hands()
    store = Store(tmp_path / "state.db", clock=clock)
    job_id = store.jobs.add("j", Task()).id
    attempt = replace(ATTEMPT, job_id=job_id)
    store.jobs.put_attempt(attempt)

    def report(attempt: Attempt, step: int, checkpoint_step: int | None) -> float | None:
        clock.time_s += 10
        job = store.jobs.get(job_id)
        assert job is not None
        attempt = record_progress(store, clock, job, attempt, Progress(step=step, checkpoint_step=checkpoint_step))
        stored = store.jobs.list_attempts(job_id)[-1].saved_s
        assert attempt.saved_s == stored
        return None if stored is None else stored - START_S

    assert report(attempt, 1, None) is None
    assert report(attempt, 20, 20) == 20
    attempt = store.jobs.list_attempts(job_id)[-1]
    assert report(attempt, 25, 20) == 20 and report(attempt, 26, None) == 20 and report(attempt, 27, 20) == 20
    assert report(attempt, 40, 40) == 60
    second = replace(attempt, number=2, saved_s=None)
    store.jobs.put_attempt(second)
    assert report(second, 21, 20) is None  # the newest one was damaged, so an older one was restored
    assert report(second, 40, 40) is None and report(second, 60, 60) == 90


SAVED = Progress(step=60, total=100, checkpoint_step=60)


@pytest.mark.parametrize(
    ("line", "known", "expected"),
    [
        (Progress(step=61), SAVED, Progress(step=61, total=100, checkpoint_step=60)),
        (Progress(step=60, busy_s=9.0), SAVED, Progress(step=60, total=100, checkpoint_step=60, busy_s=9.0)),
        (Progress(step=61, total=120), SAVED, Progress(step=61, total=120, checkpoint_step=60)),
        (Progress(step=80, checkpoint_step=40), SAVED, Progress(step=80, total=100, checkpoint_step=40)),
        (Progress(step=0), SAVED, Progress(step=0, total=100)),  # it starts over: the checkpoint was not found
        (Progress(step=61), Progress(step=60), Progress(step=61)),
        (Progress(step=61), None, Progress(step=61)),
    ],
)
def test_what_a_line_leaves_out_is_as_an_earlier_line_stated(
    line: Progress, known: Progress | None, expected: Progress
) -> None:
    assert complete_progress(line, known) == expected


def test_a_line_with_a_step_alone_does_not_lose_the_work_that_is_saved(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", clock=Hands())
    job_id = store.jobs.add("j", Task(goal=Goal(work_hours=10.0, deadline_hours=20.0))).id
    attempt = replace(ATTEMPT, job_id=job_id)
    store.jobs.put_attempt(attempt)
    for line in (SAVED, Progress(step=61)):
        job = store.jobs.get(job_id)
        assert job is not None
        record_progress(store, store.clock, job, attempt, line)
    job = store.jobs.get(job_id)
    assert job is not None and job.progress == Progress(step=61, total=100, checkpoint_step=60)
    rest = cut_to_rest(job, now_s=START_S, spent_usd=0.0).goal
    assert rest is not None and rest.work_hours == pytest.approx(4.0)
