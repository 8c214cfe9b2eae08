"""Schedules move to a server with their secrets, which its own key encrypts from then on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from broker.app.backups import pack_state
from broker.hosting.importing import _empty, _seal_again
from broker.state.schedules import name_secrets
from broker.state.secret_rows import KNOWN_KEY, SecretBox, load_key
from broker.state.store import Store
from broker.task.codec import encode_task
from broker.types import ScheduleSpec, Secret, Task
from tests.state.samples import START_S, Hands


def test_copy_for_the_server_has_its_paths_and_its_key(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", clock=Hands())
    task = Task(name="j", run="true", workdir="/home/me", secrets={"TOKEN": Secret(value="hunter2")})
    made = store.schedules.add("j", task, ScheduleSpec(cron="0 2 * * *"), next_s=START_S)
    moved = Task(name="j", run="true", workdir="/srv/uploads/1", secrets={"TOKEN": Secret(value="")})
    store.meta.put("moving/schedule/j", encode_task(moved))
    theirs = SecretBox(bytes(32))
    store.close()
    with closing(sqlite3.connect(tmp_path / "state.db")) as connection:
        _empty(connection)
        _seal_again(connection, SecretBox(load_key(tmp_path)), theirs)
        connection.commit()
        (row,) = connection.execute("SELECT task, secrets FROM schedules").fetchall()
        (known,) = connection.execute("SELECT value FROM meta WHERE key = ?", (KNOWN_KEY,)).fetchall()
    assert "/srv/uploads/1" in row[0] and "/home/me" not in row[0]
    assert theirs.open(name_secrets("j", made.uid), row[1]) == {"TOKEN": "hunter2"}
    assert known == (theirs.fingerprint,)


def test_key_travels_where_the_server_has_none(tmp_path: Path) -> None:
    Store(tmp_path / "state.db", clock=Hands()).close()
    load_key(tmp_path)
    assert b"secret.key" in pack_state(tmp_path, folders=("secret.key",))
    assert b"secret.key" not in pack_state(tmp_path)
