"""Delivery to real servers on the loopback interface, and to commands."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from email import message_from_string, policy
from pathlib import Path
from typing import Any

import pytest

from broker.config import Config
from broker.errors import BrokerError, TransientError, UsageError
from broker.notify.notification import Notification, Sink, SinkKind
from broker.notify.sending import send, write_slack
from broker.notify.settings import NotifySettings, SmtpServer
from broker.types import EventKind, JobStatus, NotificationKind, Secret
from tests.notify.receivers import HttpReceiver, SmtpReceiver, run_receiver

NOTIFICATION = Notification(
    id="broker-abc", event_id=7, event=EventKind.ENDED, kind=NotificationKind.FAILED, time_s=1_800_000_000.0, job_id=3,
    job_name="train", stem="job-3-k7wq2", status=JobStatus.FAILED, text="job 3 (train): FAILED: a < b & c\nline 2",
    cluster="job-3-k7wq2-1",
)  # fmt: skip


@pytest.fixture
def http() -> Iterator[HttpReceiver]:
    with run_receiver(HttpReceiver()) as server:
        yield server


@pytest.fixture
def smtp() -> Iterator[SmtpReceiver]:
    with run_receiver(SmtpReceiver()) as server:
        yield server


def deliver(
    folder: Path,
    kind: SinkKind,
    target: str,
    settings: NotifySettings | None = None,
    notification: Notification = NOTIFICATION,
) -> None:
    sink = Sink(kind=kind, target=target)
    asyncio.run(send(Config(home=folder, owner="me"), settings or NotifySettings(), sink, notification))


def serve_mail(smtp: SmtpReceiver, **more: Any) -> NotifySettings:
    server = SmtpServer(host="127.0.0.1", port=smtp.port, sender="b@x.example", security="none")
    return NotifySettings(smtp=replace(server, **more))


def test_webhook_receives_the_event_with_its_id(tmp_path: Path, http: HttpReceiver) -> None:
    deliver(tmp_path, SinkKind.WEBHOOK, http.url)
    assert http.bodies == [
        {
            "id": "broker-abc", "kind": "failed", "event": "ended", "time": "2027-01-15T08:00:00+00:00",
            "job": {"id": 3, "name": "train", "status": "FAILED"}, "text": NOTIFICATION.text,
        }
    ]  # fmt: skip
    assert http.headers[0]["Broker-Event-Id"] == "broker-abc"


def test_slack_receives_its_own_json_from_a_url_in_a_variable(
    tmp_path: Path, http: HttpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_NOTIFY_SLACK", http.url)
    deliver(tmp_path, SinkKind.SLACK, "env:BROKER_NOTIFY_SLACK")
    assert http.bodies == [{"text": "job 3 (train): FAILED: a &lt; b &amp; c\nline 2"}] == [write_slack(NOTIFICATION)]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_delivery_is_repeated_later_after_any_other_answer(tmp_path: Path, http: HttpReceiver, status: int) -> None:
    http.status = status
    with pytest.raises(TransientError, match=f"status {status}"):
        deliver(tmp_path, SinkKind.WEBHOOK, http.url)
    assert len(http.bodies) == 1, "redirects are not followed"


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:{port}/CANARY", "file:///etc/CANARY", "https://CANARY:bad/", "http://[CANARY/"]
)
def test_errors_do_not_show_the_target(tmp_path: Path, target: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises((TransientError, UsageError)) as caught:
            deliver(tmp_path, SinkKind.WEBHOOK, target.format(port=closed.getsockname()[1]))
    assert "CANARY" not in repr(caught.value) + caught.value.message
    assert caught.value.__cause__ is None


def test_mail_has_the_id_and_a_subject_of_one_line(tmp_path: Path, smtp: SmtpReceiver) -> None:
    deliver(tmp_path, SinkKind.MAIL, "a@x.example", serve_mail(smtp))
    (mail,) = map(message_from_string, smtp.mails)
    assert mail["Message-ID"] == "<broker-abc@broker.invalid>"
    assert (mail["To"], mail["From"]) == ("a@x.example", "b@x.example")
    assert mail["Subject"] == "job 3 (train): FAILED: a < b & c"
    assert "line 2" in mail.get_payload()


def test_subject_of_a_mail_is_short_and_its_text_is_whole(tmp_path: Path, smtp: SmtpReceiver) -> None:
    notification = replace(NOTIFICATION, text="job 3: " + "x" * 300)
    deliver(tmp_path, SinkKind.MAIL, "a@x.example", serve_mail(smtp), notification)
    (mail,) = (message_from_string(each, policy=policy.default) for each in smtp.mails)
    assert len(mail["Subject"]) == 150 and "x" * 300 in str(mail.get_payload(decode=True))
    assert mail["Date"] == "Fri, 15 Jan 2027 08:00:00 +0000", "the time of the event, however late it is sent"


@pytest.mark.parametrize("password", ["secret", "env:BROKER_NOTIFY_SMTP"])
def test_mail_server_gets_the_user_and_the_password_itself(
    tmp_path: Path, smtp: SmtpReceiver, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    monkeypatch.setenv("BROKER_NOTIFY_SMTP", "secret")
    deliver(tmp_path, SinkKind.MAIL, "a@x.example", serve_mail(smtp, user="ada", password=Secret(value=password)))
    assert smtp.logins == [("ada", "secret")] and len(smtp.mails) == 1


@pytest.mark.parametrize("security", ["starttls", "tls"])
def test_neither_password_nor_mail_is_sent_without_the_encryption_that_was_set(
    tmp_path: Path, smtp: SmtpReceiver, security: str
) -> None:
    settings = serve_mail(smtp, user="ada", password=Secret(value="secret"), security=security)
    with pytest.raises(TransientError):
        deliver(tmp_path, SinkKind.MAIL, "a@x.example", settings)
    assert smtp.logins == [] and smtp.mails == []


def test_refused_mail_is_sent_again_later(tmp_path: Path, smtp: SmtpReceiver) -> None:
    smtp.refusal = "451 CANARY"
    with pytest.raises(TransientError, match=r"answered with code 451$"):
        deliver(tmp_path, SinkKind.MAIL, "a@x.example", serve_mail(smtp))
    assert smtp.mails == []


def test_mail_without_a_server_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no mail server"):
        deliver(tmp_path, SinkKind.MAIL, "a@x.example")


def test_command_gets_skypilots_variables_and_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_SECRET_KEY", "CANARY")
    monkeypatch.setenv("BROKER_NOTIFY_SLACK", "CANARY")
    deliver(tmp_path, SinkKind.COMMAND, f"env > {tmp_path}/seen; echo said; exit 3")
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    expected = {
        "BROKER_EVENT_ID": "broker-abc", "JOB_ID": "3", "JOB_STATUS": "FAILED", "TASK_NAME": "train",
        "SKYPILOT_TASK_ID": "job-3-k7wq2", "CLUSTER_NAME": "job-3-k7wq2-1",
    }  # fmt: skip
    assert expected.items() <= seen.items()
    assert "CANARY" not in json.dumps(seen)
    output = tmp_path / "logs" / "jobs" / "3.callback.log"
    assert output.read_text() == "said\n" and output.stat().st_mode & 0o77 == 0


def test_output_of_a_jobs_callbacks_is_appended_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.notify.sending.OUTPUT_BYTES_MAX", 8)
    output = tmp_path / "logs" / "jobs" / "3.callback.log"
    for said, kept in (("one", "one\n"), ("two", "one\ntwo\n"), ("three", "one\ntwo\nthree\n"), ("four", "four\n")):
        deliver(tmp_path, SinkKind.COMMAND, f"echo {said}")
        assert output.read_text() == kept


def test_text_with_a_nul_character_does_not_keep_a_command_from_running(tmp_path: Path) -> None:
    command = f'printf %s "$BROKER_EVENT_TEXT" > {tmp_path}/seen'
    deliver(tmp_path, SinkKind.COMMAND, command, notification=replace(NOTIFICATION, text="a\0b"))
    assert (tmp_path / "seen").read_text() == "ab"


def test_command_that_hangs_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.notify.sending.COMMAND_S_MAX", 0.5)
    held = tmp_path / "held"  # its end of file comes when every process that can write to it is gone
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    deliver(tmp_path, SinkKind.COMMAND, f"exec 9> {held}; sleep 1000 & sleep 1000")
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_delivery_is_repeated_after_an_unexpected_error_whose_text_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise RuntimeError("CANARY")

    monkeypatch.setattr("urllib.request.build_opener", fail)
    with pytest.raises(BrokerError, match=r"^not delivered: RuntimeError$"):
        deliver(tmp_path, SinkKind.WEBHOOK, "https://x.example/")


def test_two_sinks_with_the_same_target_are_one() -> None:
    one = Sink(kind=SinkKind.MAIL, target="a@x.example")
    assert one.key == replace(one).key != replace(one, kind=SinkKind.WEBHOOK).key
