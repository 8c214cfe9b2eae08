"""The files of all jobs are on the server before this folder stops writing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from broker.app.container import Context
from broker.app.moving import MovedTo, read_moved
from broker.hosting.importing import MOVING, _send_and_fence
from broker.types import Task

MOVED = MovedTo(url="http://127.0.0.1:1", word="w")


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
