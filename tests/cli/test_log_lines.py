"""The daemon's log as text or as JSON lines, as `config.toml` says."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from broker.cli.balancer import balancer
from broker.cli.log_lines import JsonLines, start_log
from broker.cli.updater import updater
from broker.config import has_json_logs, load_config
from broker.errors import UsageError
from broker.serve.files import Routing, ServiceFolder, write_file
from broker.types import ReadinessProbe


def run_daemon(home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "broker", "daemon", "--idle", "0"],
        env={**os.environ, "BROKER_HOME": str(home)}, capture_output=True, text=True,
    )  # fmt: skip


def test_the_daemon_logs_one_object_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('log_format = "json"\n')
    done = run_daemon(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert any(each["level"] == "info" and each["logger"] == "broker.jobs.daemon" for each in lines)
    assert all(set(each) >= {"time", "level", "logger", "message"} for each in lines)


def test_the_daemon_logs_text_by_default(tmp_path: Path) -> None:
    done = run_daemon(tmp_path)
    assert done.returncode == 0 and " INFO " in done.stderr and not done.stderr.startswith("{")


def test_a_record_names_its_job_and_keeps_its_trace_on_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.getLogger("broker.test").makeRecord(
            "broker.test", logging.WARNING, "f", 1, "job %s: %s", (7, "late\nhere"), sys.exc_info(),
            extra={"about": {"job": 7}},
        )  # fmt: skip
    line = JsonLines().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert (found["job"], found["level"], found["message"]) == (7, "warning", "job 7: late\nhere")
    assert "ValueError: two" in found["error"] and found["time"].endswith("Z")


@pytest.mark.parametrize(("text", "form"), [('log_format = "json"', JsonLines), ("", logging.Formatter)])
def test_a_server_logs_warnings_in_the_same_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, form: type
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(logging, "basicConfig", given.update)
    (tmp_path / "config.toml").write_text(text)
    start_log(load_config(tmp_path), level=logging.WARNING)
    assert given["level"] == logging.WARNING and type(given["handlers"][0].formatter) is form


@pytest.mark.parametrize("text", ['log_format = "xml"', "log_format = true"])
def test_another_format_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(UsageError, match="`log_format` must be"):
        has_json_logs(load_config(tmp_path))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the log was configured with."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(logging, "basicConfig", found.update)
    return found


@pytest.mark.parametrize(("is_json", "form"), [(True, JsonLines), (False, logging.Formatter)])
def test_a_balancer_logs_as_its_controller_says(
    tmp_path: Path, given: dict[str, Any], is_json: bool, form: type
) -> None:
    folder, probe = ServiceFolder(path=tmp_path), ReadinessProbe(path="/health")
    routing = Routing(generation=1, host="127.0.0.1", port=0, probe=probe, is_stopped=True, has_json_logs=is_json)
    write_file(folder.routing, routing)
    balancer(tmp_path)
    assert type(given["handlers"][0].formatter) is form


@pytest.mark.parametrize(
    ("text", "form"), [('log_format = "json"', JsonLines), ('log_format = "xml"', logging.Formatter)]
)
def test_updates_of_prices_log_in_the_same_format_and_outlive_a_typo(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, text: str, form: type
) -> None:
    (tmp_path / "config.toml").write_text(text)
    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    updated: list[object] = []
    monkeypatch.setattr("broker.cli.updater.update_due_clouds", lambda context, on_result: updated.append(context))
    for name in ("signal.alarm", "os.nice"):  # of the process, which other tests use after this one
        monkeypatch.setattr(f"broker.cli.updater.{name}", lambda value: None)
    updater()
    assert updated and type(given["handlers"][0].formatter) is form
