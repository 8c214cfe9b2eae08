"""A job with `notify` and `event_callback`: the whole way from its task file to a receiver, through a real daemon."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contents import read_all
from tests.notify.receivers import HttpReceiver, run_receiver

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
TASK = """\
name: t
resources: {infra: local}
run: exit 7
notify: {on: [failed], slack: env:BROKER_NOTIFY_TEAM}
event_callback: echo "$JOB_ID $JOB_STATUS" >> seen.txt
"""


def test_failed_job_is_reported_to_every_destination(shell: Any) -> None:
    with run_receiver(HttpReceiver()) as webhook, run_receiver(HttpReceiver()) as slack:
        shell.home.mkdir()
        (shell.home / "config.toml").write_text(f'[notify]\nwebhook = "{webhook.url}"\n')
        shell.environment["BROKER_NOTIFY_TEAM"] = f"{slack.url}/CANARY"
        shell.run("jobs", "launch", shell.write("t.yaml", TASK), code=None)
        shell.wait_until(lambda: webhook.bodies and slack.bodies, "both are notified")
        seen = shell.home / "seen.txt"
        shell.wait_until(lambda: seen.exists() and "FAILED" in seen.read_text(), "the callback has run")
        shell.wait_for_termination()  # the files of a node vanish while it ends
    (body,) = webhook.bodies
    assert (body["kind"], body["job"]) == ("failed", {"id": 1, "name": "t", "status": "FAILED"})
    assert body["text"].startswith("job 1 (t): FAILED: ")
    assert slack.bodies[0]["text"] == body["text"]
    assert seen.read_text().splitlines() == ["1 STARTING", "1 RUNNING", "1 FAILED"]
    kept = dict(read_all(shell.home))
    assert kept and all(b"CANARY" not in content for content in kept.values())


def test_mail_without_a_server_is_refused_before_anything_starts(shell: Any) -> None:
    task = TASK.replace("slack: env:BROKER_NOTIFY_TEAM", "mail: a@x.example")
    done = shell.run("jobs", "launch", shell.write("t.yaml", task), code=2)
    assert "notifications by mail require a mail server" in done.stderr
    assert "hint: add `[notify.smtp]`" in done.stderr
    assert not (Path(shell.home) / "logs" / "jobs").exists()
