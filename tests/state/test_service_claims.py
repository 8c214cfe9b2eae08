"""Services that exist when their claims are added get a number each, on both backends."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.state import database
from broker.state.postgres import PostgresDatabase
from broker.state.postgres_store import PostgresStore
from broker.state.schema import MIGRATIONS
from broker.state.store import Store
from broker.types import Task
from tests.state.conftest import postgres
from tests.state.postgres_server import Server
from tests.state.samples import Hands

__all__ = ["postgres"]
BEFORE = next(index for index, steps in enumerate(MIGRATIONS) if "ADD COLUMN claim" in str(steps))
SERVICE = (
    "INSERT INTO services (name, uid, version, host, port, mode, wanted, drawn, created_s, down_requested, failure) "
    "VALUES ('{name}', 'u', 1, '127.0.0.1', 1, 'rolling', 1, 0, 1.0, 0, '')"
)
NUMBERED = {-1: "chat", -2: "embed"}


def test_services_of_a_state_file_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.db"
    with monkeypatch.context() as patch:
        patch.setattr(database, "MIGRATIONS", MIGRATIONS[:BEFORE])
        Store(path, clock=SystemClock()).close()
    with closing(sqlite3.connect(path)) as connection:
        for name in ("embed", "chat"):
            connection.execute(SERVICE.format(name=name))
        connection.commit()
    store = Store(path, clock=SystemClock())
    assert store.services.list_claims() == NUMBERED
    store.services.add("rank", Task(), host="127.0.0.1", port=2, wanted=1)
    assert store.services.list_claims() == {**NUMBERED, -3: "rank"}
    store.close()


def test_services_of_a_database_are_numbered(postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = postgres.make_url()
    with monkeypatch.context() as patch:
        for name in ("broker.state.postgres.MIGRATIONS", "broker.state.postgres_schema.MIGRATIONS"):
            patch.setattr(name, MIGRATIONS[:BEFORE])
        old = PostgresDatabase(url, home=tmp_path, clock=Hands())
        for name in ("embed", "chat"):
            old.write(SERVICE.format(name=name))
        old.close()
    store = PostgresStore(url, home=tmp_path, clock=Hands())
    assert store.services.list_claims() == NUMBERED
    store.close()
