"""Compare the engines of `broker map`: `python -m tests.frameworks.map_engines [dask|ray|spark ...]`.

The same texts go through `embed.yaml` (two worker jobs), then through the template of each engine (one job of two
nodes), undisturbed. Then each engine runs again: a worker is killed with kill -9, its node is preempted, and then the
first node. All parts must be equal, byte for byte. docs/MAP.md and the decision page have the figures that it prints.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.cli.conftest import ROOT, Shell
from tests.frameworks.beds import prepare

FOLDER = ROOT / "task_templates/batch"
WAIT_S_MAX = 900.0  # far more than required, on a busy machine
POLL_S = 0.05
NOTICE_S = 15
WORDS_PER_ITEM = 60
# How a worker of each engine appears in a list of processes.
WORKERS = {
    "dask": r"dask worker tls:",
    "ray": r"^ray::.*(MapWorker|ShardMapper)",
    "spark": r"org\.apache\.spark\.executor\.CoarseGrainedExecutorBackend",
}


def main() -> int:
    """Return 0 if all results are equal. Raises AssertionError where they are not, or a run fails."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.frameworks.map_engines", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("engines", nargs="*", default=[*WORKERS], metavar="ENGINE")
    parser.add_argument("--items", type=int, default=6000)
    parser.add_argument("--venvs", type=Path, default=ROOT / "build/frameworks", help="folder that keeps environments")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="map-engines-"))
    try:
        for engine in options.engines:
            prepare(FOLDER / f"embed-{engine}.yaml", options.venvs.resolve(), folder / "python")
        texts = folder / "texts.jsonl"
        write_texts(texts, options.items)
        leases = run(folder / "leases", "embed.yaml", texts, options.venvs, "--workers", "2")
        show("lease workers", leases)
        for engine in options.engines:
            template = f"embed-{engine}.yaml"
            whole = run(folder / engine, template, texts, options.venvs)
            show(engine, whole)
            assert whole["parts"] == leases["parts"], f"{engine} has other results than the lease workers"
            lost = run(folder / f"{engine}-lost", template, texts, options.venvs, disturb=partial(disturb, engine))
            show(f"{engine}, 3 losses", lost)
            assert lost["parts"] == leases["parts"], f"{engine} has other results after losses"
            assert lost["events"] == ["kill", "second node", "first node"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"all {len(leases['parts'])} parts are equal, byte for byte")
    return 0


def write_texts(path: Path, items: int) -> None:
    draw = random.Random(18)
    with path.open("w") as file:
        for number in range(items):
            text = " ".join(f"w{draw.randrange(3000)}" for _ in range(WORDS_PER_ITEM))
            file.write(json.dumps({"id": number, "text": text}) + "\n")


def run(
    folder: Path,
    template: str,
    texts: Path,
    venvs: Path,
    *options: str,
    disturb: Callable[..., list[str]] | None = None,
) -> dict[str, Any]:
    """Run one map to its end; return its parts, and seconds since the command began."""
    folder.mkdir()
    shell = Shell(folder)
    begin_s = time.monotonic()
    command = shell.open(
        "map", str(FOLDER / template), "--workdir", str(FOLDER), "--infra", "local", "--input", str(texts),
        "--output", "out", "--shard-mib", "0.03", "--env", f"BROKER_VENVS={venvs.resolve()}",
        "--env", "OMP_NUM_THREADS=1",
        # Without SPT_NOENV Ray's process titles overwrite the environment, by which a process of a node is found.
        "--env", "SPT_NOENV=1", *options, "--yes", "--json",
    )  # fmt: skip
    try:
        wait(lambda: count_parts(folder) > 0, command, "the first part")
        first_s = time.monotonic() - begin_s
        events = disturb(shell, command) if disturb else []
        output, notes = command.communicate(timeout=WAIT_S_MAX)
        assert command.returncode == 0, f"{notes}\n{read_log(shell)}"
        result = json.loads(output)
        parts = {path.name: path.read_bytes() for path in sorted((folder / "out").glob("part-*.jsonl"))}
        return {
            "first_s": first_s, "all_s": time.monotonic() - begin_s, "parts": parts, "items": result["items"],
            "shards": result["shards"], "events": events,
        }  # fmt: skip
    finally:
        command.kill()
        shell.run("jobs", "cancel", "--all", code=None)
        shell.wait_until(shell.is_at_rest, "everything ended")
        for pid in shell.find_processes("broker daemon"):
            os.kill(pid, signal.SIGTERM)
        shell.wait_until(lambda: not shell.find_processes(), "no process is left")


def disturb(engine: str, shell: Shell, command: subprocess.Popen[str]) -> list[str]:
    """Kill a worker, then preempt the second node, then the first; each after further parts."""
    events = []
    wait(lambda: bool(find_workers(shell, engine)), command, "a worker on the second node")
    os.kill(find_workers(shell, engine)[0], signal.SIGKILL)
    events.append("kill")
    for node, name in ((1, "second node"), (0, "first node")):
        await_more(shell, command)
        shell.run("local", "preempt", "1", "--node", str(node), "--notice", str(NOTICE_S))
        events.append(name)
    return events


def find_workers(shell: Shell, engine: str) -> list[int]:
    """List the engine's workers on the second node."""
    found = []
    for pid, command in shell.find_processes().items():
        try:
            variables = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"SKYPILOT_NODE_RANK=1" in variables and re.search(WORKERS[engine], command):
            found.append(pid)
    return found


def await_more(shell: Shell, command: subprocess.Popen[str]) -> None:
    count = count_parts(shell.folder)
    wait(lambda: count_parts(shell.folder) > count + 2, command, "further parts")


def count_parts(folder: Path) -> int:
    return len(list((folder / "out").glob("part-*.jsonl")))


def wait(is_so: Callable[[], bool], command: subprocess.Popen[str], what: str) -> None:
    end_s = time.monotonic() + WAIT_S_MAX
    while not is_so():
        assert command.poll() is None, f"the command ended before {what}: {command.communicate()}"
        assert time.monotonic() < end_s, f"{what}: did not happen"
        time.sleep(POLL_S)


def read_log(shell: Shell) -> str:
    return "\n".join(shell.run("jobs", "logs", "1", "--no-follow", code=None).stdout.splitlines()[-40:])


def show(name: str, row: dict[str, Any]) -> None:
    rate = row["items"] / max(1e-9, row["all_s"] - row["first_s"])
    print(
        f"{name}: {row['items']} items, {row['shards']} shards, first part after {row['first_s']:.0f} s, "
        f"all after {row['all_s']:.0f} s, {rate:.0f} items/s in between",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
