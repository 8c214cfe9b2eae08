"""The tutorial's task and commands, in its order, on the local cloud."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.docs.pages import ROOT, list_block_commands, list_blocks

PAGE = ROOT / "docs/TUTORIAL.md"
WAIT_S_MAX = 900


class Reader(Shell):
    """A reader who types what the page says, and waits patiently."""

    def type(self, *words: str) -> str:
        process = self.open(*words)
        try:
            output, errors = process.communicate(timeout=WAIT_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 0, f"{words}\n{output}{errors}"
        return output

    def has_counted(self) -> bool:
        return any((job["progress"] or {}).get("step", 0) > 1 for job in self.read_json("jobs", "queue"))


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.run("jobs", "cancel", "--all", code=None)
    reader.wait_until(lambda: not reader.read_json("status")["live_jobs"], "all jobs have ended")
    reader.run("down", "--all", "--yes")
    if reader.find_processes("broker daemon"):
        reader.kill_daemon()


@pytest.mark.long
def test_reader_sees_the_job_resume_where_it_was(reader: Reader) -> None:
    blocks = list(list_blocks(PAGE))
    (task,) = [block.text for block in blocks if block.language == "yaml"]
    reader.write("count.yaml", task)
    shown: dict[str, str] = {}
    for command in (each for block in blocks if block.language == "sh" for each in list_block_commands(block)):
        if command.words[0] == "rehearse":  # `make run`, which tests/cli/test_rehearse.py covers
            continue
        if command.words[:2] == ("local", "preempt"):
            reader.wait_until(reader.has_counted, "the job has begun to count")
        shown[" ".join(command.words)] = reader.type(*command.words)
    lines = re.findall(r"attempt (\d+): step (\d+)", shown["jobs logs count"])
    before, after = ([int(step) for attempt, step in lines if attempt == number] for number in "12")
    assert before == list(range(1, len(before) + 1))
    # The last lines of a lost machine may be lost with it; their steps are not.
    assert after == list(range(after[0], 31)) and len(before) <= after[0] > 1, "it resumed where it was"
    assert not reader.read_json("status")["clusters"] and "job-1" not in shown["status"]
