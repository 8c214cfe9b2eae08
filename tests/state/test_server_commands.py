"""`broker state` where the state is in PostgreSQL: a folder moves there, and a second folder joins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.config import load_config
from broker.state.store import Store
from broker.types import JobStatus, Task
from tests.cli.conftest import Shell
from tests.state.postgres_server import Server

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_a_folder_moves_to_a_database_and_another_joins(shell: Shell, postgres: Server) -> None:
    owner = load_config(shell.home).owner
    store = Store(shell.home / "state.db", clock=SystemClock(), owner=owner)
    store.jobs.set_status(store.jobs.add("moved", Task(name="moved")).id, JobStatus.SUCCEEDED)
    store.close()
    assert "exported" in shell.run("state", "export", "all.jsonl").stdout
    (shell.home / "config.toml").write_text(f'state = "{postgres.make_url()}"\n')
    assert "imported" in shell.run("state", "import", "all.jsonl").stdout
    assert [job["name"] for job in shell.read_json("jobs", "queue", "--all")] == ["moved"]
    found = json.loads(shell.run("state", "info", "--json").stdout)
    assert found["installation"] == owner and found["url"].startswith("postgresql://broker@")
    refused = shell.run("state", "backup", code=4)
    assert "broker state export" in refused.stderr

    settings = (shell.home / "config.toml").read_text()
    second = Shell(shell.folder / "second")
    load_config(second.home)
    (second.home / "config.toml").write_text(settings)
    assert "belongs to installation" in second.run("jobs", "queue", code=4).stderr
    second.run("state", "restore", "--owner")
    assert (second.home / "owner").read_text().strip() == owner
    assert second.run("state", "check").stdout == "the state is intact\n"
