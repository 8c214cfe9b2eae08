"""Nobody waits for others: neither for files that are unpacked, nor for clients that follow something."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import socket
import tarfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from broker.app.verbs.watching import watch_jobs
from broker.server.files import SYNCED_MAX, FileStore
from broker.server.running import RunningVerb
from broker.types import JobStatus, Task
from tests.server.conftest import Hosted


def pack(count: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in range(count):
            entry = tarfile.TarInfo(f"code/{number}.py")
            entry.size = 2
            archive.addfile(entry, io.BytesIO(b"{}"))
    return out.getvalue()


async def receive(store: FileStore, content: bytes) -> str:
    async def read() -> AsyncIterator[bytes]:
        yield content

    digest = hashlib.sha256(content).hexdigest()
    await store.receive(digest, read(), name="n")
    return digest


def test_others_are_answered_while_files_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their connections have a blank line every five seconds, without which they are taken for broken."""
    begun, answered = threading.Event(), threading.Event()
    unpack = FileStore._unpack

    def unpack_slowly(self: FileStore, archive: Path, digest: str, name: str) -> None:
        begun.set()
        assert answered.wait(60), "nothing else ran"
        unpack(self, archive, digest, name)

    monkeypatch.setattr(FileStore, "_unpack", unpack_slowly)
    store = FileStore(tmp_path)

    async def answer() -> None:
        await asyncio.to_thread(begun.wait)
        answered.set()

    async def work() -> str:
        digest, _ = await asyncio.gather(receive(store, pack(1)), answer())
        return digest

    assert store.has(asyncio.run(work()))


@pytest.mark.parametrize("count", [2, SYNCED_MAX + 1])
def test_files_are_on_the_disk_before_their_name_vouches_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """After a power cut, a job would run with empty files, because files with a known digest are never sent again."""
    flushed: set[tuple[int, int]] = set()
    unflushed: list[Path] = []
    fsync, rename = os.fsync, Path.rename

    def record(descriptor: int) -> None:
        found = os.fstat(descriptor)
        flushed.add((found.st_dev, found.st_ino))
        fsync(descriptor)

    def record_all() -> None:
        flushed.update((found.st_dev, found.st_ino) for found in (path.stat() for path in tmp_path.rglob("*")))

    def check(source: Path, target: Path) -> Path:
        for path in (source, *source.rglob("*")):
            found = path.stat()
            unflushed.extend([] if (found.st_dev, found.st_ino) in flushed else [path])
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "sync", record_all)
    monkeypatch.setattr(Path, "rename", check)
    store = FileStore(tmp_path)
    assert store.has(asyncio.run(receive(store, pack(count)))) and unflushed == []


def test_clients_that_follow_something_keep_no_other_from_acting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.server.http.THREADS_MAX", 1)
    hosted = Hosted(tmp_path)
    job = hosted.context.store.jobs.add("train", Task(run="true"))
    follows = threading.Event()
    following = threading.Thread(
        target=lambda: hosted.open("viewer").call(watch_jobs, job=None, on_change=lambda changes: follows.set())
    )
    following.start()
    try:
        assert follows.wait(60)
        status, answer = hosted.ask("/v1/cancel_jobs", {"names": [str(job.id)]}, token=hosted.tokens["admin"])
        assert status == 200, answer
        assert hosted.context.store.jobs.is_cancel_requested(job.id)
    finally:
        hosted.context.store.jobs.set_status(job.id, JobStatus.CANCELLED)
        following.join()
        hosted.stop()


def test_client_that_follows_without_a_stream_and_leaves_keeps_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent to it before the end, so no write fails, and the job would be followed to its end."""
    monkeypatch.setattr("broker.server.http.BEAT_S", 0.05)
    begun, ended = threading.Event(), threading.Event()
    run = RunningVerb.run

    def run_watched(self: RunningVerb) -> None:
        begun.set()
        run(self)
        ended.set()

    monkeypatch.setattr(RunningVerb, "run", run_watched)
    hosted = Hosted(tmp_path)
    job = hosted.context.store.jobs.add("train", Task(run="true"))
    try:
        with socket.create_connection(("127.0.0.1", urlsplit(hosted.listening.url).port or 0)) as client:
            headers = f"Host: x\r\nAuthorization: Bearer {hosted.tokens['viewer']}\r\nContent-Length: 13\r\n"
            client.sendall(f'POST /v1/watch_jobs HTTP/1.1\r\n{headers}\r\n{{"job": null}}'.encode())
            assert begun.wait(60)
        has_ended = ended.wait(60)
    finally:
        hosted.context.store.jobs.set_status(job.id, JobStatus.CANCELLED)
        hosted.stop()
    assert has_ended


def test_answer_in_one_object_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.server.answers.MESSAGE_MAX", 20)
    hosted = Hosted(tmp_path)
    hosted.context.store.jobs.add("train", Task(run="true"))
    try:
        status, answer = hosted.ask("/v1/watch_jobs", {"job": None}, token=hosted.tokens["viewer"])
    finally:
        hosted.stop()
    assert status == 400 and "application/x-ndjson" in answer["error"]["hints"][0]
