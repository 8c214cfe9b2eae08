"""A store for each backend: tests that take `store` or `open_store` define the contract of every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.clock import Clock
from broker.state.store import Store
from tests.state.samples import Hands

OpenStore = Callable[[], Store]
BACKENDS: dict[str, Callable[[Path, Clock], Store]] = {
    "sqlite": lambda folder, clock: Store(folder / "home" / "state.db", clock=clock),
}


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture(params=BACKENDS)
def open_store(request: pytest.FixtureRequest, tmp_path: Path, clock: Hands) -> Iterator[OpenStore]:
    """Open the test's store again, as another broker process would."""
    opened: list[Store] = []

    def open_it() -> Store:
        opened.append(BACKENDS[request.param](tmp_path, clock))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    return open_store()
