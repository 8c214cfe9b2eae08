"""`broker map` on real nodes: workers that are preempted, a command that runs again."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT, Shell
from tests.tiers import long

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's /proc")

TASK = """\
name: square
resources: {infra: local, use_spot: true}
workdir: program
run: exec python -m trainers.map_worker square.py
"""
PROGRAM = """\
def process(items):
    return [{"id": each["id"], "square": each["id"] ** 2} for each in items]
"""
ITEMS = 400
RUN_S_MAX = 900  # far more than required


def write_input(shell: Shell, program: str = PROGRAM) -> str:
    for name in ("program", "in"):
        (shell.folder / name).mkdir()
    (shell.folder / "program/square.py").write_text(program)
    for file in range(2):
        lines = (json.dumps({"id": number}) for number in range(file, ITEMS, 2))
        (shell.folder / f"in/{file}.jsonl").write_text("\n".join(lines))  # the last line has no newline
    return shell.write("square.yaml", TASK)


def read_results(folder: Path) -> list[dict[str, int]]:
    return [json.loads(line) for part in sorted(folder.glob("part-*.jsonl")) for line in part.read_text().splitlines()]


def run_long(shell: Shell, *arguments: str) -> dict[str, Any]:
    """Run a command that waits for jobs, which takes long on a busy machine."""
    running = shell.open(*arguments, "--json")
    output, notes = running.communicate(timeout=RUN_S_MAX)
    assert running.returncode == 0, notes
    found: dict[str, Any] = json.loads(output)
    return found


def test_a_map_writes_every_result_once_and_the_same_command_shows_it_again(shell: Shell) -> None:
    task = write_input(shell)
    command = ("map", task, "--input", "in", "--output", "out", "--workers", "2", "--shard-mib", "0.001", "--yes")
    result = run_long(shell, *command)
    results = read_results(shell.folder / "out")
    assert sorted(each["id"] for each in results) == list(range(ITEMS))
    assert all(each["square"] == each["id"] ** 2 for each in results)
    assert result["items"] == ITEMS and result["shards_done"] == result["shards"] > 4
    assert len(result["jobs"]) == 2 and result["usd_per_million_items"] > 0
    manifest = json.loads((shell.folder / "out/_map/manifest.json").read_text())
    assert [part["part"] for part in manifest["parts"]] == [f"part-{n:05d}.jsonl" for n in range(result["shards"])]
    again = shell.read_json(*command)  # nothing is left, so nothing starts
    assert again["jobs"] == result["jobs"] and again["items"] == ITEMS
    other = shell.run("map", task, "--input", "in/0.jsonl", "--output", "out", "--yes", code=2)
    assert "another input" in other.stderr


@long
def test_an_interrupted_map_continues_and_is_cancelled_by_its_name(shell: Shell) -> None:
    task = write_input(shell, "import threading\n\ndef process(items):\n    threading.Event().wait()\n")
    command = ("map", task, "--input", "in", "--output", "out", "--workers", "1", "--yes")
    running = shell.open(*command)
    shell.wait_until(lambda: shell.database.exists() and bool(shell.list_live_jobs()), "the worker is submitted")
    running.send_signal(signal.SIGINT)
    _, notes = running.communicate(timeout=RUN_S_MAX)
    assert running.returncode == 130 and "Traceback" not in notes
    state = shell.read_json(*command, "-d")
    assert state["shards_done"] == 0 and state["jobs"] == [1] and state["manifest"] is None
    (job,) = shell.read_json("jobs", "queue")
    assert job["name"] == f"{state['name']}-1"
    shell.run("jobs", "cancel", state["name"])
    shell.wait_until(lambda: not shell.list_live_jobs(), "the worker is cancelled")


def test_paths_of_this_machine_are_refused_where_nodes_could_not_read_them(shell: Shell) -> None:
    write_input(shell)
    done = shell.run(
        "map", "python -m trainers.map_worker x.py", "--input", "in", "--output", "out", "--infra", "nowhere", code=2
    )
    assert "nowhere" in done.stderr
    assert not (shell.folder / "out").exists()


@pytest.mark.long
def test_the_template_embeds_texts_with_a_transformer(shell: Shell) -> None:
    texts = [{"id": number, "text": f"text number {number}"} for number in range(300)]
    (shell.folder / "texts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts))
    folder = ROOT / "task_templates/batch"
    result = run_long(
        shell, "map", str(folder / "embed.yaml"), "--workdir", str(folder), "--infra", "local",
        "--input", "texts.jsonl", "--output", "out", "--workers", "1", "--shard-mib", "0.004", "--yes",
    )  # fmt: skip
    assert result["items"] == 300
    parts = sorted((shell.folder / "out").glob("part-*.jsonl"))
    results = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert [each["id"] for each in results] == list(range(300))
    assert all(len(each["embedding"]) == 32 for each in results)
