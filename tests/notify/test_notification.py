"""From events to notifications, and where they go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.notify.notification import KINDS, NOTABLE, STATUSES, SinkKind, choose_sinks, make_notification
from broker.state.events import EventRow
from broker.types import (
    Attempt,
    EventKind,
    Job,
    JobStatus,
    NotificationKind,
    NotifySpec,
    Offer,
    Placement,
    Task,
)

JOB = Job(id=3, name="train", status=JobStatus.RUNNING, task=Task(), submitted_s=0.0, uid="k7wq2")
ROW = EventRow(id=7, time_s=1.5, kind=EventKind.RECOVERED, data={"step": 4}, job_id=3, cluster=None)
OFFER = Offer(cloud="aws", region="us-east-1", zone=None, instance_type="m5.large", vcpus=2, memory_gib=8.0)
PLACE = Placement(offer=OFFER, is_spot=True, node_count=1)
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


@pytest.mark.parametrize(
    ("event", "kind", "status"),
    [
        (EventKind.ATTEMPT, None, JobStatus.STARTING),
        (EventKind.ATTEMPT_IN_PLACE, None, JobStatus.STARTING),
        (EventKind.STARTED, None, JobStatus.RUNNING),
        (EventKind.ATTEMPT_LOST, NotificationKind.PREEMPTED, JobStatus.RECOVERING),
        (EventKind.LEASE_EXPIRED, NotificationKind.PREEMPTED, JobStatus.RECOVERING),
        (EventKind.SLOT_RETURNED, NotificationKind.PREEMPTED, JobStatus.PENDING),
        (EventKind.PROGRAM_RESTARTED, None, JobStatus.RECOVERING),
        (EventKind.STALL_RESTARTED, None, JobStatus.RECOVERING),
        (EventKind.GANG_RESTARTED, None, JobStatus.RECOVERING),
        (EventKind.GROUP_RESTARTED, None, JobStatus.RECOVERING),
        (EventKind.LATE, NotificationKind.DEADLINE, None),
        (EventKind.UNSEEN, NotificationKind.ATTENTION, None),
        (EventKind.LOGIN_NEEDED, NotificationKind.ATTENTION, None),
        (EventKind.ACCESS_NOT_RENEWED, NotificationKind.ATTENTION, None),
    ],
)
def test_event_is_reported_as_its_kind_and_with_the_status_it_leads_to(
    event: EventKind, kind: NotificationKind | None, status: JobStatus | None
) -> None:
    made = make_notification(replace(ROW, kind=event, data={}), JOB, lineage="l")
    assert (made.kind, made.status) == (kind, status)
    assert event in NOTABLE


def test_text_of_a_notification_has_no_control_characters() -> None:
    made = make_notification(end("FAILED", "exit \x1b[31m3"), replace(JOB, name="a\x07b"), lineage="l")
    assert not any(ord(each) < 32 or ord(each) == 127 for each in made.text)


def test_command_is_told_the_cluster_of_the_newest_attempt() -> None:
    attempts = tuple(
        Attempt(job_id=3, number=each, cluster=f"train-{each}", placement=PLACE, started_s=0.0) for each in (1, 2)
    )
    assert make_notification(ROW, replace(JOB, attempts=attempts), lineage="l").cluster == "train-2"
    assert make_notification(ROW, JOB, lineage="l").cluster == ""


def test_address_that_is_listed_twice_gets_one_mail() -> None:
    job = replace(JOB, task=Task(notify=NotifySpec(mail=("a@x.example", "b@x.example", "a@x.example"))))
    sinks = choose_sinks(make_notification(end("FAILED"), JOB, lineage="l"), job, NotifySpec())
    assert [each.target for each in sinks] == ["a@x.example", "b@x.example"]


def test_slack_of_a_task_replaces_that_of_the_settings_and_is_limited_on_a_server() -> None:
    made, default = make_notification(end("FAILED"), JOB, lineage="l"), NotifySpec(slack="https://hooks.example/ours")
    job = replace(JOB, task=Task(notify=NotifySpec(slack="https://hooks.example/own")))
    (own,) = choose_sinks(made, job, default, is_shared=True)
    assert (own.target, own.is_limited) == ("https://hooks.example/own", True)
    (ours,) = choose_sinks(made, JOB, default, is_shared=True)
    assert (ours.target, ours.is_limited) == ("https://hooks.example/ours", False), "the operator wrote it"


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
