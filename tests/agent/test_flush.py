"""A run ends when its output to mounted buckets is uploaded: not before, and always in the end."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import importlib
import json
import os
import signal
import socketserver
import sys
import threading
from pathlib import Path

import pytest
from local_gang import Rig, make_task, processes_of, wait_for

from broker.agent import agent
from broker.runtime.reports import GangReport
from broker.storage.mounts import MountStep, make_script
from broker.types import Cluster, NodeEnd, RunStatus, Task
from tests.tiers import long, spread

files, agent_flush = agent.files, importlib.import_module("agent_flush")
Flush, Pending, list_pending = agent_flush.Flush, agent_flush.Pending, agent_flush.list_pending
FAKE = Path(__file__).parent.parent / "runtime" / "fake_rclone.py"
MOUNT = MountStep(target="~/out", url="s3://bucket/out", mode="MOUNT_CACHED")


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return one mount with two files in its cache, the first of them not uploaded."""
    monkeypatch.setattr(files, "STATE", tmp_path)
    (tmp_path / "mounts").mkdir()
    about = {"url": "s3://bucket/out", "cache": str(tmp_path / "cache"), "socket": ""}
    files.write_json(tmp_path / "mounts" / "one.json", about)
    set_entry(tmp_path, "a", dirty=True, size=7)
    set_entry(tmp_path, "b", dirty=False, size=9)
    return tmp_path


def set_entry(folder: Path, name: str, *, dirty: bool, size: int) -> None:
    file = folder / "cache" / "vfsMeta" / "s3{x}" / "bucket" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"Size": size, "Dirty": dirty, "Fingerprint": ""}))


def test_files_that_are_not_uploaded_are_counted_and_unknown_ones_count_as_such(mounts: Path) -> None:
    assert list_pending() == [Pending("s3://bucket/out", 1, 7)]
    (mounts / "cache/vfsMeta/s3{x}/bucket/c").write_text('{"Size": 1')  # torn, or of another version of rclone
    (mounts / "cache/vfsMeta/s3{x}/bucket/d").write_text("{}")
    assert list_pending() == [Pending("s3://bucket/out", 3, 7)]


def test_lost_read_only_mount_is_restored_as_read_only(mounts: Path) -> None:
    about = {"url": "s3://b", "target": "/d", "mode": "MOUNT", "cache": "", "socket": "", "access": "read-only"}
    files.write_json(mounts / "mounts" / "two.json", about)
    assert agent_flush.make_retry_script().endswith("node_mount.py MOUNT s3://b /d read-only")


def test_wait_lasts_while_uploads_progress_and_for_the_hold_time_after(
    mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, sent = 0.0, agent_flush.UploadStatistics(0, 3)
    monkeypatch.setattr(agent_flush, "read_sent", lambda: sent)
    flush = Flush(hold_s=100.0, now_s=lambda: now_s)
    for _ in range(50):  # one file for over an hour
        now_s, sent = now_s + 99.0, sent._replace(size_bytes=sent.size_bytes + 1)
        assert flush.poll() == "waiting"
    set_entry(mounts, "b", dirty=True, size=1_500_000_000)
    now_s += 99.0
    assert flush.poll() == "waiting"
    now_s += 99.0
    assert flush.poll() == "waiting"
    sent = agent_flush.UploadStatistics(sent.size_bytes + 9, 4)  # sent once more after an error: nothing has arrived
    now_s += 1.0
    assert flush.poll() == "failed"
    assert "2 files (1.500 GB) for `s3://bucket/out`" in flush.describe_failure()
    for name in "ab":
        set_entry(mounts, name, dirty=False, size=9)
    assert flush.poll() == "clean"


def test_node_without_mounts_has_nothing_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "STATE", tmp_path)
    assert Flush().poll() == "clean" and not agent_flush.has_mounts() and agent_flush.read_sent() == (0, 0)


@pytest.mark.parametrize(
    ("text", "hold_s"),
    [("60", 60.0), ("0", 0.0), ("-1", agent_flush.HOLD_S), ("nan", agent_flush.HOLD_S), ("x", agent_flush.HOLD_S)],
)
def test_valid_hold_time_of_the_task_replaces_the_default(text: str, hold_s: float) -> None:
    assert (
        agent_flush.read_hold_s({"BROKER_FLUSH_HOLD_S": text}) == hold_s
        and agent_flush.read_hold_s({}) == agent_flush.HOLD_S
    )


def test_sent_bytes_are_read_from_rclones_socket(tmp_path: Path) -> None:
    types: list[str | None] = []

    class Control(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/core/stats"
            types.append(self.headers["Content-Type"])
            self.rfile.read(int(self.headers["Content-Length"]))  # or the client may write to a closed socket
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"bytes": 12345, "errors": 2}')

        def address_string(self) -> str:
            return "a socket has none"

        def log_message(self, *arguments: object) -> None:
            pass

    path = str(tmp_path / "rc.sock")
    server = socketserver.UnixStreamServer(path, Control)  # type: ignore[arg-type]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert agent_flush.read_upload_statistics(path) == (12345, 2)
        assert types == ["application/json"], "rclone reads a body of another type as a form"
    finally:
        server.shutdown()
        server.server_close()
    assert agent_flush.read_upload_statistics(path) == agent_flush.read_upload_statistics("") == (0, 0)


def make_writing_task(tmp_path: Path, run: str, num_nodes: int = 1, **envs: str) -> Task:
    tool = tmp_path / "bin" / "rclone"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    tool.chmod(0o755)
    envs = {"PATH": f"{tool.parent}:/usr/bin:/bin", **envs}
    return make_task(run, setup=make_script([MOUNT]), num_nodes=num_nodes, envs=envs)


def home_of(rig: Rig, rank: int = 0) -> Path:
    """Return the home of a node of the only cluster."""
    found = sorted(path for path in rig.root.rglob("fake_mounts"))
    return found[rank].parent


async def wait_for_flush(rig: Rig, cluster: Cluster) -> GangReport:
    async def look() -> GangReport | None:
        report = await rig.gang.poll(cluster, 1)
        assert not report.status.is_terminal, report
        return report if report.flush else None

    report: GangReport = await wait_for(look)
    return report


@pytest.mark.parametrize(
    ("cause", "status", "reason"),
    spread(
        [
            ("", RunStatus.SUCCEEDED, ""),
            ("cancel", RunStatus.CANCELLED, ""),
            ("notice", RunStatus.FAILED, NodeEnd.PREEMPTED),
        ],
        every=2,
    ),
)
def test_run_ends_when_its_files_have_arrived(
    rig: Rig, tmp_path: Path, cause: str, status: RunStatus, reason: str
) -> None:
    task = make_writing_task(tmp_path, "rclone put ~/out a one" + ("; sleep 600" if cause else ""))

    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, task)
        if cause:
            await wait_for(lambda: any(rig.root.rglob("vfsMeta/s3/a")))
        if cause == "cancel":
            await rig.gang.cancel(cluster, 1)
        elif cause == "notice":
            await rig.cloud.preempt_nodes([cluster.nodes[0].id], notice_s=600)
        report = await wait_for_flush(rig, cluster)
        assert report.status is RunStatus.RUNNING and "are not in `s3://bucket/out` yet" in report.flush
        assert "kept until they are, or until nothing has arrived for 30 min" in report.flush
        (home_of(rig) / "gate").touch()
        report = await rig.finish(cluster)
        assert report.status is status and not report.flush
        assert not reason or report.reason == reason
        assert (home_of(rig) / "fake_bucket/a").read_text() == "one"
        assert "broker: written files have arrived" in await rig.read_log(cluster)

    asyncio.run(act())


def test_run_whose_files_do_not_arrive_fails_with_a_reason(rig: Rig, tmp_path: Path) -> None:
    task = make_writing_task(tmp_path, "rclone put ~/out a one", BROKER_FLUSH_HOLD_S="0.5")

    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, task)
        report = await rig.finish(cluster)
        assert (report.status, report.returncode) == (RunStatus.FAILED, 74)
        assert report.flush.startswith("written files did not arrive: 1 files (0.000 GB) for `s3://bucket/out`")
        assert report.flush in await rig.read_log(cluster)
        assert report.unflushed == report.flush and report.failed_rank is None
        assert report.reason == f"the program succeeded, but on rank 0 {report.flush}"
        (cache,) = (home_of(rig) / ".broker/mounts").glob("*/vfs")
        assert f"are in `{cache.parent}` on the node" in report.unflushed

    asyncio.run(act())


@pytest.mark.long
def test_a_programs_own_exit_code_does_not_mean_that_files_did_not_arrive(rig: Rig, tmp_path: Path) -> None:
    task = make_writing_task(tmp_path, "rclone put ~/out a one; exit 74", BROKER_FLUSH_HOLD_S="0.5")

    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, task)
        report = await rig.finish(cluster)
        assert (report.status, report.returncode, report.unflushed) == (RunStatus.FAILED, 74, "")
        assert report.failed_rank == 0

    asyncio.run(act())


@long
def test_a_mount_whose_rclone_was_killed_is_restored_and_uploads_its_cache(rig: Rig, tmp_path: Path) -> None:
    task = make_writing_task(tmp_path, "rclone put ~/out a one; touch ~/wrote", BROKER_FLUSH_HOLD_S="600")

    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, task)
        await wait_for_flush(rig, cluster)
        for pid in processes_of(cluster.nodes[0]):
            with contextlib.suppress(OSError):  # it may have ended
                if "serve" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    os.kill(pid, signal.SIGKILL)
        (home_of(rig) / "gate").touch()
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED
        assert (home_of(rig) / "fake_bucket/a").read_text() == "one"

    asyncio.run(act())


def test_rank_whose_files_arrived_waits_for_one_that_still_uploads(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = 'if [ "$SKYPILOT_NODE_RANK" = 0 ]; then rclone put ~/out a one; fi'
    task = make_writing_task(tmp_path, run, num_nodes=2)

    async def act() -> None:
        cluster = await rig.make_cluster(2)
        await rig.start(cluster, task)
        await wait_for_flush(rig, cluster)
        for rank in range(2):
            (home_of(rig, rank) / "gate").touch()
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED

        async def are_all_over() -> bool:
            return set((await rig.gang.poll(cluster, 1)).statuses) == {RunStatus.SUCCEEDED}

        await wait_for(are_all_over)

    asyncio.run(act())
