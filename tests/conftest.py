"""Property tests draw the same examples in every run, so that a red run is about the change; `--hypothesis-profile
explore` draws fresh ones."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.trainers.strategies.conftest import Worlds

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")
# A fifth of a simulation's time was the collector's, which looked for cycles after every 700 new objects.
gc.set_threshold(20_000, 50, 50)
# The files that take longest by CPU time, the longest first (see `pytest_collection_modifyitems`).
LONGEST = (
    "tests/simulation/test_scenes.py",
    "tests/jobs/test_second_ring.py",
    "tests/trainers/strategies/test_worlds.py",
)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """A process that has imported torch and forks ranks from itself, one for all tests of this worker."""
    from tests.trainers.strategies.conftest import Worlds

    worlds = Worlds()
    yield worlds
    assert worlds.process.stdin is not None
    worlds.process.stdin.close()
    assert worlds.process.wait(timeout=60) == 0


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """The node's agent makes its files private for its whole process, which in some tests is pytest itself."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first in both halves: `--dist worksteal` gives a half to each of two workers.

    A worker that is done takes over what lies at the end of the other's half, so only short tests may lie there.
    """
    longest: dict[str, list[pytest.Item]] = {name: [] for name in LONGEST}
    others: list[pytest.Item] = []
    for item in items:
        longest.get(item.nodeid.partition("::")[0], others).append(item)
    files = list(longest.values())
    first = [item for file in files[::2] for item in file]
    second = [item for file in files[1::2] for item in file]
    split = max(0, len(items) // 2 - len(first))
    items[:] = [*first, *others[:split], *second, *others[split:]]


def pytest_collection_finish() -> None:
    """What is collected stays to the end: no full collection has to look at it again."""
    gc.freeze()
