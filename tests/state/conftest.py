"""A store for each backend: tests that take `store` or `open_store` define the contract of every backend.

Tests of the file itself take `sqlite_store` or `open_sqlite`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.state.store import Store
from tests.state.postgres_server import Server, find_reason_to_skip, run_server
from tests.state.samples import Hands

OpenStore = Callable[[], Store]


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    if reason := find_reason_to_skip():
        pytest.skip(reason)
    with run_server() as server:
        yield server


@pytest.fixture
def open_sqlite(tmp_path: Path, clock: Hands) -> Iterator[OpenStore]:
    """Open the test's store again, as another broker process would."""
    opened: list[Store] = []

    def open_it() -> Store:
        opened.append(Store(tmp_path / "home" / "state.db", clock=clock))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def open_postgres(postgres: Server, tmp_path: Path, clock: Hands) -> Iterator[OpenStore]:
    from broker.state.postgres_store import PostgresStore

    opened: list[Store] = []
    url = postgres.make_url()
    (tmp_path / "home").mkdir(exist_ok=True)

    def open_it() -> Store:
        opened.append(PostgresStore(url, home=tmp_path / "home", clock=clock))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture(params=["sqlite", "postgres"])
def open_store(request: pytest.FixtureRequest) -> OpenStore:
    opener: OpenStore = request.getfixturevalue(f"open_{request.param}")
    return opener


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    return open_store()


@pytest.fixture
def sqlite_store(open_sqlite: OpenStore) -> Store:
    return open_sqlite()
