"""The files of all jobs are on the server before this folder stops writing."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from broker.app.container import Context
from broker.app.moving import MoveDestination, read_moved
from broker.hosting.importing import MOVING, _send_and_fence
from broker.types import Task

MOVED = MoveDestination(url="http://127.0.0.1:1", word="w")


def test_files_of_a_job_that_is_submitted_while_others_are_sent_follow(tmp_path: Path) -> None:
    """For example by a schedule: its working directory would be missing when it is recovered on the server."""
    context = Context(tmp_path)
    context.store.jobs.add("first", Task(workdir="/here"))
    calls: list[list[str]] = []

    def send(tasks: Mapping[str, Task]) -> Mapping[str, Task]:
        assert read_moved(tmp_path) is None, "this folder may still write"
        calls.append(sorted(tasks))
        if len(calls) == 1:
            context.store.jobs.add("second", Task(workdir="/here"))
        return {key: replace(task, workdir="/there") for key, task in tasks.items()}

    _send_and_fence(context, MOVED, send)
    assert calls == [["1"], ["2"]]
    assert read_moved(tmp_path) == MOVED
    assert all(context.store.meta.get(f"{MOVING}{key}") for key in ("1", "2"))
    context.close()


def test_job_whose_transaction_began_before_the_fence_moves_too(tmp_path: Path) -> None:
    """It was committed after the state had been read, and was lost."""
    context = Context(tmp_path)
    context.store.jobs.list_live_ids()
    begun, calls = threading.Event(), list[list[str]]()

    def submit() -> None:
        other = Context(tmp_path)
        with other.store.transaction():
            other.store.jobs.add("late", Task(workdir="/here"))
            begun.set()
            while read_moved(tmp_path) is None:
                time.sleep(0.001)
        other.close()

    submitting = threading.Thread(target=submit)

    def send(tasks: Mapping[str, Task]) -> Mapping[str, Task]:
        calls.append(sorted(tasks))
        if len(calls) == 1:
            submitting.start()
            assert begun.wait(300)
        return tasks

    _send_and_fence(context, MOVED, send)
    submitting.join()
    assert calls == [[], ["1"]]
    context.close()


def test_fence_is_read_while_no_other_process_can_write(tmp_path: Path) -> None:
    """Otherwise a transaction could begin after the move has waited for the others."""
    context = Context(tmp_path)
    seen: list[str] = []

    def look() -> None:
        with closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None, timeout=0)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                seen.append(str(error))

    context.store.fence = look
    context.store.jobs.add("first", Task(run="true"))
    assert seen and set(seen) == {"database is locked"}
    context.close()
