"""Interruptions of the Python API: Ctrl-C and an early end of a loop wait for no output and for no response."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import broker
from broker.aio import running
from broker.aio.running import list_remote_lines, make_sync, make_sync_iterator
from broker.app.clusters import LogChunk
from broker.app.container import Context

LIMIT_S = 20.0  # only a failing test waits this long


async def _press_ctrl_c_and_wait(ends: list[str]) -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)  # wakes a thread that waits for a lock, unlike `interrupt_main`
    try:
        await asyncio.wait_for(asyncio.Event().wait(), LIMIT_S)
    except asyncio.CancelledError:
        ends.append("cancelled")
        raise
    except TimeoutError:
        ends.append("waited to its end")


def test_ctrl_c_in_a_notebook_cancels_the_call() -> None:
    ends: list[str] = []

    async def run_cell() -> None:
        make_sync(_press_ctrl_c_and_wait)(ends)

    loop = asyncio.new_event_loop()  # as in a notebook: `asyncio.run` would catch Ctrl-C for its own task
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(run_cell())
    loop.close()
    assert ends == ["cancelled"]


def test_ctrl_c_ends_a_loop_that_waits_for_a_line() -> None:
    ends: list[str] = []

    async def list_lines() -> AsyncIterator[str]:
        yield "first"
        await _press_ctrl_c_and_wait(ends)

    lines = make_sync_iterator(list_lines)()
    assert next(lines) == "first"
    with pytest.raises(KeyboardInterrupt):
        next(lines)
    assert ends == ["cancelled"]


def test_loop_over_a_servers_lines_may_end_before_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, refused = threading.Event(), threading.Event()

    class Session:
        def call(self, verb: object, *, on_chunk: Callable[[LogChunk], None]) -> None:
            on_chunk(LogChunk(lines=("first",), offset=6))
            release.wait(LIMIT_S)
            try:
                on_chunk(LogChunk(lines=("second",), offset=13))
            except asyncio.CancelledError:
                refused.set()
                raise

    def follow(context: Context, *, on_chunk: Callable[[LogChunk], None]) -> None: ...

    monkeypatch.setattr(running, "find_login", lambda home: tmp_path)
    monkeypatch.setattr("broker.client.remote.RemoteSession.open", lambda path, on_note: Session())
    for _ in (lines := make_sync_iterator(lambda: list_remote_lines(tmp_path, follow))()):
        break
    lines.close()  # type: ignore[attr-defined]
    assert not release.is_set() and not refused.is_set(), "the loop ended while the server was silent"
    release.set()
    assert refused.wait(LIMIT_S), "the thread stops at the next lines"


def test_help_shows_that_logs_are_an_ordinary_iterator() -> None:
    for each in (broker.logs, broker.jobs.logs):
        assert inspect.signature(each).return_annotation == "Iterator[str]"
