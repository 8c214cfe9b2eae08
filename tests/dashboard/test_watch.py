"""`broker jobs watch`: a line per change in a pipe, and a view of 80 columns on a terminal."""

from __future__ import annotations

import json

import pytest

from broker.app.verbs.watching import Watcher
from broker.cli.jobs_watch import list_view
from broker.cli.main import main
from broker.types import JobStatus, Progress
from broker.types.outcomes import EventKind, make_event
from tests.dashboard.conftest import HOSTILE, Story


def test_only_what_changed_is_returned(story: Story) -> None:
    watcher = Watcher(story.context, None)
    changed, events = watcher.read_changes()
    assert [line.id for line in changed] == [1] and events == []  # the live job; earlier events are not reported
    assert watcher.read_changes() == ([], [])
    story.add_event(1, make_event(EventKind.NOTE, text="new"))
    story.add_event(2, make_event(EventKind.NOTE, text="of an ended job"))
    story.store.jobs.set_progress(1, Progress(step=32, total=100))
    changed, events = watcher.read_changes()
    assert [line.step for line in changed] == [32] and [event.message for event in events] == ["new"]
    story.store.jobs.set_status(1, JobStatus.SUCCEEDED)
    changed, _ = watcher.read_changes()
    assert [line.status for line in changed] == [JobStatus.SUCCEEDED] and watcher.is_over


def test_a_job_that_is_submitted_later_appears(story: Story) -> None:
    watcher = Watcher(story.context, None)
    watcher.read_changes()
    added = story.add_job("later")
    assert [line.id for line in watcher.read_changes()[0]] == [added]


def test_the_command_prints_lines_and_ends_with_the_job(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(("jobs", "watch", "3"))
    (line,) = capsys.readouterr().out.splitlines()
    assert "job 3 (done)  SUCCEEDED" in line
    with pytest.raises(SystemExit) as ended:
        main(("jobs", "watch", "2", "--json"))
    shown = capsys.readouterr()
    assert ended.value.code == 1 and "FAILED" in shown.err
    assert json.loads(shown.out)["job"]["status"] == "FAILED"


def test_the_view_fits_eighty_columns_and_has_no_control_characters(story: Story) -> None:
    watcher = Watcher(story.context, None)
    story.add_job(HOSTILE * 4)
    story.add_event(1, make_event(EventKind.NOTE, text=f"{HOSTILE}\nsecond line " * 9))
    _, events = watcher.read_changes()
    lines = list_view(list(watcher.lines.values()), events, now_s=story.now_s)
    assert len(events) == 1 and all(len(line) <= 80 and line.isprintable() for line in lines)
    assert list_view([], [], now_s=story.now_s) == ["No live jobs"]


def test_without_live_jobs_it_says_so_and_ends(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    story.store.jobs.set_status(1, JobStatus.SUCCEEDED)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(("jobs", "watch"))
    shown = capsys.readouterr()
    assert shown.out == "" and "no live jobs" in shown.err
