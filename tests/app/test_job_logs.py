"""A job's log is read a part at a time, and every line once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.app import jobs
from broker.app.container import Context
from broker.app.verbs.jobs import follow_log
from broker.types import JobStatus, Task

TEXT = "one\nthree\n" + "x" * 20 + "\n\nlast\nmore"
PARTS = ["one", "three", "x" * 8, "x" * 8, "x" * 4, "", "last"]


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setattr(jobs, "LOG_BYTES_MAX", 8)
    context = Context(tmp_path)
    context.store.jobs.add("j", Task(run="true"))
    path = context.config.logs / "jobs" / "1.log"
    path.parent.mkdir(parents=True)
    path.write_text(TEXT)
    yield context
    context.close()


def test_log_is_read_in_parts_and_from_any_of_them_on(context: Context) -> None:
    chunks = list(jobs.read_chunks(context, 1))
    assert [line for chunk in chunks for line in chunk.lines] == PARTS
    assert len(chunks) > 4 and all(sum(map(len, each.lines)) <= 8 for each in chunks)
    for at, chunk in enumerate(chunks):  # a connection that broke off continues there
        rest = list(jobs.read_chunks(context, 1, offset=chunk.offset))
        assert rest == chunks[at + 1 :]
    assert jobs.read_log_end(context, 1, bytes_max=1000) == (PARTS, False)


@pytest.mark.parametrize("is_following", [True, False])
def test_followers_of_a_log_get_all_of_its_parts(context: Context, is_following: bool) -> None:
    context.store.jobs.set_status(1, JobStatus.SUCCEEDED)
    seen: list[str] = []
    follow_log(context, job="1", on_chunk=lambda chunk: seen.extend(chunk.lines), is_following=is_following)
    assert seen == PARTS


def test_lines_of_a_job_that_ends_while_its_log_is_read_are_not_missed(context: Context) -> None:
    """Its status is read before its log, so that an ended job has written all of it."""

    async def follow() -> list[str]:
        seen: list[str] = []
        async for chunk in jobs.follow_chunks(context, 1):
            if not seen:
                path = context.config.logs / "jobs" / "1.log"
                path.write_text(TEXT + "\n")
                context.store.jobs.set_status(1, JobStatus.SUCCEEDED)
            seen += chunk.lines
        return seen

    context.ensure_daemon = lambda: None  # type: ignore[method-assign]
    assert asyncio.run(follow()) == [*PARTS, "more"]
