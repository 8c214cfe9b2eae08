"""`broker down` waits until files written to a mounted bucket are uploaded, and reports which ones."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.tiers import long

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")

# The records that a node has of a mount by rclone with one file that is not uploaded: see `agent_flush.py`.
WRITES = """\
resources: {infra: local}
run: |
  mkdir -p ~/.broker/mounts ~/cache/vfsMeta/s3
  echo '{"Size": 7000000, "Dirty": true}' > ~/cache/vfsMeta/s3/model.bin
  printf '{"url": "s3://bucket/out", "cache": "%s", "socket": ""}' "$HOME/cache" > ~/.broker/mounts/one.json
  sleep 600
"""
WAITS = "`dev` is terminated once 1 file (0.007 GB) for `s3://bucket/out` is uploaded"


def launch(shell: Shell) -> Path:
    """Launch cluster `dev`; return the record of its file that is not uploaded."""
    shell.run("launch", shell.write("writes.yaml", WRITES), "-c", "dev", "--detach-run")
    shell.wait_until(lambda: any(shell.folder.rglob(".broker/mounts/one.json")), "the task has written")
    (entry,) = shell.folder.rglob("vfsMeta/s3/model.bin")
    return entry


@long
def test_down_ends_the_run_and_waits_for_the_upload(shell: Shell) -> None:
    entry = launch(shell)
    down = shell.open("down", "dev", "--yes")
    assert down.stderr is not None
    assert any(WAITS in line for line in iter(down.stderr.readline, ""))
    assert [each["name"] for each in shell.read_json("status")["clusters"]] == ["dev"]
    shell.wait_until(lambda: not shell.find_processes("sleep 600"), "the program has ended")
    entry.write_text('{"Size": 7000000, "Dirty": false}')
    out, notes = down.communicate(timeout=300)
    assert down.returncode == 0 and "terminated cluster `dev`" in out, notes
    assert not shell.read_json("status")["clusters"]


def test_interrupted_wait_says_what_is_still_up_and_now_does_not_wait(shell: Shell) -> None:
    launch(shell)
    down = shell.open("down", "dev", "--yes")
    assert down.stderr is not None
    assert any(WAITS in line for line in iter(down.stderr.readline, ""))
    down.send_signal(signal.SIGINT)
    _, notes = down.communicate(timeout=300)
    assert down.returncode == 130 and "not confirmed as terminated: dev" in notes, notes
    assert [each["status"] for each in shell.read_json("status")["clusters"]] == ["UP"]
    assert "terminated cluster `dev`" in shell.run("down", "dev", "--now", "--yes").stdout
