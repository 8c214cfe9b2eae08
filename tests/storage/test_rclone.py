"""Real rclone with a slow object server: the agent reads its cache and its remote control.

Runs where rclone, FUSE and the permission to mount are available; `tests/agent/test_flush.py` covers the rest
everywhere.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from local_gang import Rig, make_task, wait_for

from broker.storage.mounts import MountStep, make_script
from broker.storage.node_mount import find_rclone_version
from broker.types import RunStatus
from tests.testbed.s3 import BUCKET, S3Server, Wire, serve_s3

# The first with version 2 of AWS's SDK, which reads AWS_ENDPOINT_URL; older ones would look for the bucket at AWS.
RCLONE_OLDEST = (1, 68)
pytestmark = pytest.mark.skipif(
    not (shutil.which("rclone") and shutil.which("fusermount3") and os.access("/dev/fuse", os.W_OK))
    or find_rclone_version() < RCLONE_OLDEST,
    reason="no rclone 1.68 or newer, or no FUSE to use",
)


@dataclass(kw_only=True)
class Gate(Wire):
    """Forwards listings and small files to the object server, but nothing large while it is closed."""

    is_open: threading.Event = field(default_factory=threading.Event)

    def _take_cut(self) -> bool:
        self.is_open.wait()
        return False


@pytest.fixture
def slow() -> Iterator[tuple[S3Server, Gate]]:
    with serve_s3() as server:
        gate = Gate(target=server.port)
        gate.open()
        gate.is_open.set()
        yield server, gate
        gate.is_open.set()
        gate.close()


@pytest.mark.parametrize("mode", ["MOUNT_CACHED", "MOUNT"])
def test_run_ends_when_rclone_has_uploaded_its_files(rig: Rig, slow: tuple[S3Server, Gate], mode: str) -> None:
    server, gate = slow
    folders = {str(Path(found).parent) for tool in ("rclone", "fusermount3") if (found := shutil.which(tool))}
    envs = {
        **server.variables,
        "RCLONE_S3_USE_UNSIGNED_PAYLOAD": "true",  # otherwise rclone requires TLS, which the fake lacks
        "RCLONE_S3_USE_DATA_INTEGRITY_PROTECTIONS": "false",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{gate.port}",
        "PATH": ":".join([*folders, str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
    }
    step = MountStep(target="~/out", url=f"s3://{BUCKET}/{mode}", mode=mode)
    wait = "until [ -e ~/go ]; do sleep 0.1; done\n"
    run = wait + "mkdir -p ~/out/deep && head -c 3000000 /dev/zero > ~/out/deep/a && echo one > ~/out/b"

    async def act() -> None:
        cluster = await rig.make_cluster()
        await rig.start(cluster, make_task(run, setup=make_script([step]), envs=envs))

        async def has(status: RunStatus, *, is_flushing: bool = False) -> bool:
            report = await rig.gang.poll(cluster, 1)
            assert not report.status.is_terminal, await rig.read_log(cluster)
            return report.status is status and bool(report.flush) is is_flushing

        await wait_for(lambda: has(RunStatus.RUNNING))
        gate.is_open.clear()
        (find_home(rig) / "go").touch()
        await wait_for(lambda: has(RunStatus.RUNNING, is_flushing=True))
        assert f"{mode}/deep/a" not in server.list_keys(mode)
        gate.is_open.set()
        report = await rig.finish(cluster)
        assert report.status is RunStatus.SUCCEEDED, await rig.read_log(cluster)
        assert server.list_keys(mode) == [f"{mode}/b", f"{mode}/deep/a"]

    try:
        asyncio.run(act())
    finally:
        for place in rig.root.rglob("out"):
            subprocess.run(["fusermount3", "-u", "-z", str(place)], check=False, capture_output=True)


def find_home(rig: Rig) -> Path:
    """Return the home folder of the only node."""
    return next(rig.root.rglob(".broker")).parent
