"""A torture run in small: real daemon, nodes and programs under the killer until each job has ended, and the checks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torture.bed import LocalBed
from tests.torture.history import History
from tests.torture.killer import Killer
from tests.torture.references import References
from tests.torture.report import render
from tests.torture.story import Story

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc"),
]
SEED = 20261122
KINDS = ("plain", "gang", "cancelled", "retried")
ACTS = (
    *(("daemon-kill", 3.0), ("daemon-stop", 1.0), ("runner-kill", 1.0), ("watcher-kill", 1.0), ("machine-kill", 1.0)),
    *(("node-kill", 1.0), ("program-kill", 1.0), ("preempt", 2.0), ("preempt-notice", 1.0), ("clock-jump", 1.0)),
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a short path: Unix sockets lie below it."""
    path = Path(tempfile.mkdtemp(prefix="torture-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_jobs_under_the_killer_end_once_and_leave_nothing(folder: Path) -> None:
    history = History(folder / "history.jsonl", seed=SEED, bed="local")
    bed = LocalBed(folder, history)
    try:
        bed.open()
        killer = Killer(bed, history, seed=SEED, every_s=4.0, acts=ACTS)
        story = Story(
            bed, history, seed=SEED, minutes=1.0, jobs_max=len(KINDS), killer=killer, kinds=KINDS, look_every_s=4.0
        )
        outcome = story.play(References(folder / "references"))
    finally:
        bed.close()
        history.close()
    assert not outcome.violations, f"{render(outcome)}\n{history.path.read_text()[-20_000:]}"
    assert outcome.attempts > len(KINDS), "something was done to them"
