"""From events to notifications, and where they go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.notify.notification import KINDS, NOTABLE, STATUSES, SinkKind, choose_sinks, make_notification
from broker.state.events import EventRow
from broker.types import EventKind, Job, JobStatus, NotificationKind, NotifySpec, Task

JOB = Job(id=3, name="train", status=JobStatus.RUNNING, task=Task(), submitted_s=0.0, uid="k7wq2")
ROW = EventRow(id=7, time_s=1.5, kind=EventKind.RECOVERED, data={"step": 4}, job_id=3, cluster=None)
HOOK = NotifySpec(webhook="https://x.example/h")


def end(status: str, failure: str = "") -> EventRow:
    return replace(ROW, kind=EventKind.ENDED, data={"status": status, "failure": failure})


def test_text_names_the_job_and_the_event() -> None:
    made = make_notification(end("FAILED", "the program exited with code 3"), JOB, lineage="l")
    assert made.text == "job 3 (train): FAILED: the program exited with code 3"
    assert (made.kind, made.status) == (NotificationKind.FAILED, JobStatus.FAILED)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("SUCCEEDED", NotificationKind.ENDED),
        ("CANCELLED", NotificationKind.ENDED),
        ("FAILED", NotificationKind.FAILED),
        ("FAILED_SETUP", NotificationKind.FAILED),
        ("FAILED_NO_RESOURCE", NotificationKind.FAILED),
    ],
)
def test_end_is_a_failure_by_its_status(status: str, kind: NotificationKind) -> None:
    assert make_notification(end(status), JOB, lineage="l").kind is kind


def test_damaged_status_is_still_reported() -> None:
    made = make_notification(end("WHAT"), JOB, lineage="l")
    assert (made.kind, made.status) == (NotificationKind.ENDED, None)


def test_id_is_stable_and_unique_to_its_event() -> None:
    made = make_notification(ROW, JOB, lineage="l")
    assert made.id == make_notification(ROW, replace(JOB, status=JobStatus.SUCCEEDED), lineage="l").id
    others = [replace(ROW, id=8), replace(ROW, time_s=2.0), replace(ROW, kind=EventKind.LATE, data={})]
    ids = [make_notification(each, JOB, lineage="l").id for each in others]
    ids.append(make_notification(ROW, JOB, lineage="m").id)
    ids.append(make_notification(ROW, replace(JOB, uid="other"), lineage="l").id)
    assert len({made.id, *ids}) == 6


def test_task_overrides_the_settings_field_by_field() -> None:
    made = make_notification(end("FAILED"), JOB, lineage="l")
    job = replace(JOB, task=Task(notify=NotifySpec(mail=("a@x.example", "b@x.example"))))
    sinks = choose_sinks(made, job, HOOK)
    assert [(each.kind, each.target) for each in sinks] == [
        (SinkKind.WEBHOOK, "https://x.example/h"), (SinkKind.MAIL, "a@x.example"), (SinkKind.MAIL, "b@x.example"),
    ]  # fmt: skip
    own = replace(JOB, task=Task(notify=NotifySpec(webhook="https://own.example/")))
    assert [each.target for each in choose_sinks(made, own, HOOK)] == ["https://own.example/"]
    silent = replace(JOB, task=Task(notify=NotifySpec(on=())))
    assert choose_sinks(made, silent, HOOK) == []


def test_command_runs_on_status_changes_whatever_notify_says() -> None:
    job = replace(JOB, task=Task(notify=NotifySpec(on=()), event_callback="say"))
    started = make_notification(replace(ROW, kind=EventKind.STARTED, data={}), job, lineage="l")
    assert [each.kind for each in choose_sinks(started, job, HOOK)] == [SinkKind.COMMAND]
    recovered = make_notification(ROW, job, lineage="l")
    assert choose_sinks(recovered, job, HOOK) == [], "it is already running"


@given(st.sampled_from(sorted(NOTABLE)), st.sets(st.sampled_from(list(NotificationKind))))
def test_only_wanted_kinds_are_sent(event: EventKind, on: set[NotificationKind]) -> None:
    made = make_notification(replace(ROW, kind=event, data={"status": "FAILED", "failure": ""}), JOB, lineage="l")
    sinks = choose_sinks(made, JOB, replace(HOOK, on=tuple(on)))
    assert bool(sinks) == (made.kind in on or (made.kind is NotificationKind.FAILED and NotificationKind.ENDED in on))


def test_repr_and_key_of_a_sink_do_not_show_its_target() -> None:
    (sink,) = choose_sinks(
        make_notification(end("FAILED"), JOB, lineage="l"), JOB, NotifySpec(slack="https://s/SECRET")
    )
    assert "SECRET" not in f"{sink!r} {sink} {sink.key}"


def test_every_kind_of_notification_has_an_event() -> None:
    assert {*KINDS.values(), NotificationKind.FAILED} == set(NotificationKind)
    assert set(STATUSES.values()) | {JobStatus.PENDING, JobStatus.CANCELLING} == {
        each for each in JobStatus if not each.is_terminal
    }
