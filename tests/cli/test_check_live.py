"""`broker check CLOUD --live`, rehearsed on the local cloud with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Shell

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")


def test_every_step_of_a_nodes_life_is_rehearsed_and_nothing_is_left(shell: Shell) -> None:
    bucket = shell.folder / "bucket"
    bucket.mkdir()
    shown = shell.run("check", "local", "--live", "--bucket", f"file://{bucket}").stdout
    for line in ("ok      bucket:", "ok      create:", "ok      run: Linux", "ok      stop:", "ok      terminate:"):
        assert line in shown
    assert "ok      leaks: nothing remains" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert shell.read_json("status")["clusters"] == []
    assert list(bucket.rglob("from-here")) == []


def test_unsupported_trial_is_refused_before_money_is_spent(shell: Shell) -> None:
    assert "--spend" in shell.run("check", "local", "--live", "--spend", "0.001", code=2).stderr
    assert "`broker check aws`" in shell.run("check", "aws", "--live", code=2).stderr
    assert "`--live` requires a cloud" in shell.run("check", "--live", code=2).stderr
    assert "not supported for local" in shell.run("check", "local", "--live", "--record", "tape.jsonl", code=2).stderr
    assert not (shell.folder / "tape.jsonl").exists()
    assert shell.read_json("status")["clusters"] == []
