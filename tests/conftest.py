"""Property tests draw the same examples in every run, so that a failure comes from the change; `--hypothesis-profile
explore` draws fresh ones."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.trainers.strategies.conftest import Worlds

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("explore", deadline=None, max_examples=100)
settings.load_profile("repeatable")
os.environ["BROKER_OFFLINE"] = "1"  # commands run by tests do not update prices in the background
# The suite may run on a cloud's machine, which has a login of its own.
os.environ.update(AWS_EC2_METADATA_DISABLED="true", NO_GCE_CHECK="true")
# Tests start thousands of Python processes. Without cached bytecode each compiles our modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Garbage collection took a fifth of a simulation's time: it looked for cycles after every 700 new objects.
gc.set_threshold(20_000, 50, 50)
# Files with the longest tests, longest first (see `pytest_collection_modifyitems`).
LONGEST = (
    "tests/torture/test_smoke.py",
    "tests/cli/test_server.py",
    "tests/cli/test_templates.py",
    "tests/hosting/test_local.py",
    "tests/trainers/test_elastic.py",
    "tests/trainers/test_peer_checkpoint.py",
    "tests/trainers/test_lm.py",
    "tests/hosting/test_import.py",
    "tests/cli/test_setup_cache.py",
    "tests/trainers/strategies/test_worlds.py",
    "tests/trainers/strategies/test_kills.py",
    "tests/provision/test_accounts.py",
    "tests/trainers/test_compile_cache.py",
    "tests/docs/test_contributing.py",
    "tests/cli/test_life.py",
    "tests/cli/test_managed.py",
    "tests/cli/test_groups.py",
    "tests/cli/test_serve.py",
    "tests/serve/test_survival.py",
    "tests/cli/test_rehearse_service.py",
    "tests/simulation/test_groups.py",
    "tests/simulation/test_histories.py",
    "tests/simulation/test_mutants.py",
    "tests/simulation/test_sharing.py",
    "tests/simulation/test_scenes.py",
    "tests/simulation/test_schedules.py",
    "tests/jobs/test_daemon_kills.py",
    "tests/trainers/test_training.py",
    "tests/trainers/test_restore.py",
    "tests/trainers/test_entry_points.py",
    "tests/agent/test_allreduce.py",
    "tests/cli/test_elastic.py",
    "tests/cli/test_schedules.py",
    "tests/cli/test_rehearse.py",
    "tests/jobs/test_node_replacement.py",
    "tests/trainers/test_hugging_face.py",
    "tests/test_house.py",
    "tests/runtime/test_gang.py",
    "tests/runtime/test_container.py",
    "tests/cli/test_updater.py",
)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """A process that has imported torch and forks ranks from itself, one for all tests of this worker."""
    from tests.trainers.strategies.conftest import Worlds

    worlds = Worlds()
    yield worlds
    assert worlds.process.stdin is not None
    worlds.process.stdin.close()
    assert worlds.process.wait(timeout=300) == 0


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Restore the umask: the node agent sets its own for the whole process, which in some tests is pytest itself."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files first on every worker: `--dist worksteal` gives each an equal share of the items.

    An idle worker steals from the end of another's share, so only short tests may be there.
    """
    worker_count = getattr(config, "workerinput", {}).get("workercount", 1)
    longest: dict[str, list[pytest.Item]] = {name: [] for name in LONGEST}
    others: list[pytest.Item] = []
    for item in items:
        longest.get(item.nodeid.partition("::")[0], others).append(item)
    files = list(longest.values())
    share = -(-len(items) // worker_count)
    items.clear()
    for worker in range(worker_count):
        first = [item for file in files[worker::worker_count] for item in file]
        room = max(0, share - len(first))
        items += [*first, *others[:room]]
        del others[:room]
    items += others


def pytest_collection() -> None:
    """Collecting makes much and drops little: garbage collections meanwhile cost a sixth of its time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Collected tests live to the end, so exclude them from later full garbage collections."""
    gc.freeze()
    gc.enable()
