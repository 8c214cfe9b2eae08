"""After a power cut a silence is observed again, but its end is not: a gang would be given up too soon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from broker.jobs.monitor import SILENCE_EVERY_S
from broker.jobs.progress import record_silence
from broker.types import Task
from tests.state.samples import ATTEMPT
from tests.state.test_durability import FULL, NORMAL, Recording


def test_the_end_of_a_silence_is_on_the_disk_at_once(tmp_path: Path) -> None:
    store = Recording(tmp_path / "state.db")
    attempt = replace(ATTEMPT, job_id=store.jobs.add("j", Task()).id)
    store.jobs.put_attempt(attempt)
    store.commits.clear()
    attempt = record_silence(store, attempt, 2 * SILENCE_EVERY_S)
    assert store.commits == [NORMAL] and store.jobs.list_attempts(attempt.job_id) == [attempt]
    attempt = record_silence(store, attempt, 0.0)
    assert store.commits == [NORMAL, FULL] and attempt.silent_s == 0.0
    assert record_silence(store, attempt, 0.0) == attempt and len(store.commits) == 2
