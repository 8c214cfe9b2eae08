"""A service on a real PostgreSQL with two controller processes: one drives it, and the other takes over from it."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.config import load_config
from broker.state.postgres_store import PostgresStore
from tests.cli.conftest import Shell
from tests.serve.live_service import LiveService
from tests.signals import signal_all
from tests.state.conftest import postgres
from tests.state.postgres_server import Server

__all__ = ["postgres"]
pytestmark = [
    pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc"),
    pytest.mark.long,
]


@pytest.fixture
def shell(tmp_path: Path, postgres: Server) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    shell.environment["BROKER_STATE"] = postgres.make_url()
    yield shell
    signal_all(shell.find_processes())


@pytest.fixture
def store(shell: Shell) -> Iterator[PostgresStore]:
    config = load_config(shell.home)
    url = shell.environment["BROKER_STATE"]
    store = PostgresStore(url, home=config.home, clock=SystemClock(), owner=config.owner)
    yield store
    store.close()


def find_holder(store: PostgresStore) -> tuple[int, int]:
    """Return the process that drives the service, 0 for none, and the epoch of its claim."""
    row = store.row("SELECT holder, epoch FROM claims WHERE job_id < 0 AND holder <> ''")
    return (0, 0) if row is None else (int(re.split("/", row["holder"])[1]), row["epoch"])


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=300) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_a_service_continues_when_its_controller_is_killed(shell: Shell, store: PostgresStore) -> None:
    service = LiveService(shell, replicas=1)
    shell.run("serve", "up", service._write(1), "-y", "--wait")
    (shown,) = json.loads(shell.run("serve", "status", "--json").stdout)
    url = f"http://{shown['endpoint']}"
    shell.wait_until(lambda: is_healthy(url), "it answers")
    second = shell.open("daemon")
    shell.wait_until(lambda: store.claims.measure_load().controller_count == 2, "two controllers have a lease")
    (replica,) = store.services.list_replicas("web")

    victim, epoch = find_holder(store)
    assert victim and epoch
    os.kill(victim, signal.SIGKILL)
    assert is_healthy(url), "the balancer outlives its controller"
    shell.wait_until(lambda: find_holder(store)[0] not in (0, victim), "another controller takes over")
    assert find_holder(store)[1] > epoch, "in a new epoch"

    store.services.set_wanted("web", 1)
    shell.run("serve", "update", "web", service._write(2), "-y")
    shell.wait_until(
        lambda: (
            [each.version for each in store.services.list_replicas("web") if each.ready_s] == [2]
            and len(store.services.list_replicas("web")) == 1
        ),
        "it is updated by the new controller",
    )
    assert is_healthy(url)
    (updated,) = store.services.list_replicas("web")
    assert updated.number == replica.number + 1, "one replica for each version"

    shell.run("serve", "down", "--all", "-y")
    shell.wait_until(lambda: store.services.get("web") is None, "it is down")
    shell.wait_until(lambda: not store.jobs.list_unfinished_ids(), "its replicas have ended")
    shell.wait_until(lambda: not shell.find_processes("broker balancer"), "no balancer is left")
    second.kill()
    second.communicate()
