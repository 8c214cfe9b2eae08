"""`notify` and `event_callback` in a task file."""

from __future__ import annotations

import pytest

from broker.errors import TaskError
from broker.task.codec import decode_task, encode_task
from broker.task.loader import load_tasks_text
from broker.types import NotificationKind, NotifySpec, Task


def load(text: str) -> Task:
    (task,) = load_tasks_text(f"run: x\n{text}", "task.yaml")
    return task


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("notify: {on: failed}", NotifySpec(on=(NotificationKind.FAILED,))),
        (
            "notify: {on: [preempted, recovered], slack: 'env:BROKER_NOTIFY_TEAM'}",
            NotifySpec(on=(NotificationKind.PREEMPTED, NotificationKind.RECOVERED), slack="env:BROKER_NOTIFY_TEAM"),
        ),
        ("notify: {on: []}", NotifySpec(on=())),
        ("notify: {webhook: 'https://x.example/h', mail: a@x.example}",
         NotifySpec(webhook="https://x.example/h", mail=("a@x.example",))),
        ("notify: {mail: [a@x.example, b@x.example]}", NotifySpec(mail=("a@x.example", "b@x.example"))),
        ("event_callback: echo $JOB_STATUS", None),
    ],
)  # fmt: skip
def test_notify_is_read_and_kept(text: str, expected: NotifySpec | None) -> None:
    task = load(text)
    assert task.notify == expected
    assert task.event_callback == ("echo $JOB_STATUS" if expected is None else None)
    assert task.notices == ()
    assert decode_task(encode_task(task), {}).notify == expected


@pytest.mark.parametrize(
    "text",
    [
        "notify: {on: CANARY}",
        "notify: {webhook: 'http://x.example/CANARY'}",
        "notify: {webhook: 'https://user:CANARY@x.example/'}",
        "notify: {slack: 'https://hooks.slack.example/CANARY'}",
        "notify: {slack: 'env:AWS_SECRET_ACCESS_KEY'}",
        "notify: {mail: CANARY}",
        "notify: {sms: CANARY}",
        "notify: failed",
    ],
)
def test_invalid_notify_is_a_fault_that_does_not_show_urls(text: str) -> None:
    with pytest.raises(TaskError) as caught:
        load(text)
    (issue,) = caught.value.issues
    assert (issue.file, issue.line) == ("task.yaml", 2)
    if "http" in text:
        assert "CANARY" not in repr(issue.message) + repr(issue.hint)
        assert not issue.source_line
