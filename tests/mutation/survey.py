"""The functions and time of each fast test and each play, recorded once and kept while the test files are unchanged."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation.draw import ROOMS, digest
from tests.mutation.limited import run_limited
from tests.mutation.operators import Mutant
from tests.mutation.plays import list_plays
from tests.mutation.shadow import ROOT, Shadow, make_shadow

CACHE = ROOT / "build" / "mutation" / "reach.json"
FOLDERS = ("tests/jobs", "tests/provision", "tests/state")
RUNTIME = ("tests/runtime", "tests/agent")  # real processes: run for mutants of these rooms only
SLOW = ("tests/jobs/test_daemon_kills.py",)  # kills real daemons, a dozen seconds a test
FAST_S = 5.0  # a slower test is not one of the fast ones
RECORD_CPU_S_MAX = 1800.0
NODE = "broker/clouds/local_machine.py "  # entered by tests that start nodes, which are not children of the test
NODES_S = 1.0  # the processor time of such nodes, which no record includes
TRAINERS = "tests/trainers/"
TORCH_S = 20.0  # of the process from which worlds of ranks are forked; the first test that uses it pays for it


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A test or a play: the functions it enters, its time, and the number of effects it may be killed at."""

    name: str
    cpu_s: float
    functions: frozenset[str]
    effects: int = 0

    def enters(self, mutant: Mutant) -> bool:
        """Return whether it may reach the mutant.

        A default, a field or a constant belongs to no function: any test that enters the file may read it.
        """
        wanted = f"{mutant.file} {mutant.function}"
        return wanted in self.functions

    def enters_file(self, mutant: Mutant) -> bool:
        return any(each.startswith(f"{mutant.file} ") for each in self.functions)


@dataclass(frozen=True, kw_only=True)
class Survey:
    tests: Sequence[Reached]
    plays: Sequence[Reached]


def mirror(file: str) -> str:
    """Return the folder of tests that mirrors the folder of this file, such as `tests/spot`."""
    folder = ROOT / "tests" / Path(file.removeprefix("broker/")).parent
    while not folder.is_dir():
        folder = folder.parent
    return str(folder.relative_to(ROOT))


def list_folders(files: Iterable[str]) -> list[str]:
    """List the folders whose tests may detect mutants of these files.

    The default rooms work together, and each is surveyed by the tests of all; any other room by its own tests.
    """
    rooms = {mirror(file): file.startswith(tuple(f"{room}/" for room in ROOMS)) for file in files}
    is_runtime = any(name.startswith(RUNTIME) for name in rooms)
    defaults = (*FOLDERS, *(RUNTIME if is_runtime else ())) if any(rooms.values()) else ()
    return [*defaults, *sorted(name for name, is_default in rooms.items() if not is_default)]


def survey(files: Iterable[str]) -> Survey:
    """Return tests that may detect mutants of these files, cached; record those whose test file is new or changed."""
    folders = list_folders(files)
    has_plays = FOLDERS[0] in folders  # the simulation is of the default rooms
    cache: dict[str, Any] = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    paths = [path for folder in folders for path in sorted((ROOT / folder).glob("test_*.py"))]
    modules = [name for name in (str(path.relative_to(ROOT)) for path in paths) if name not in SLOW]
    digests = {module: digest((ROOT / module).read_text()) for module in modules}
    simulation = digest("".join(path.read_text() for path in sorted((ROOT / "tests/simulation").rglob("*.py"))))
    simulation = digest(simulation + "\n".join(list_plays()))
    new = [module for module in modules if cache.get(module, {}).get("digest") != digests[module]]
    is_played = not has_plays or cache.get("plays", {}).get("digest") == simulation
    if new or not is_played:
        with make_shadow() as shadow:
            log = shadow.record_reach()
            for module in new:
                cache[module] = {"digest": digests[module], "lines": _record_tests(shadow, log, module)}
                _save(cache)
            if not is_played:
                cache["plays"] = {"digest": simulation, "lines": _record_plays(shadow, log)}
                _save(cache)
    tests = [read_line(line) for module in modules for line in cache[module]["lines"]]
    plays = [read_line(line) for line in cache["plays"]["lines"]] if has_plays else []
    return Survey(
        tests=sorted(filter(is_fast, tests), key=lambda each: each.cpu_s),
        plays=sorted(plays, key=lambda each: each.cpu_s),
    )


def is_fast(test: Reached) -> bool:
    return test.cpu_s <= FAST_S + (TORCH_S if test.name.startswith(TRAINERS) else NODES_S)


def _save(cache: dict[str, Any]) -> None:
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    aside = CACHE.with_suffix(".new")
    aside.write_text(json.dumps(cache))
    aside.replace(CACHE)


def read_line(line: dict[str, Any]) -> Reached:
    nodes_s = NODES_S if any(each.startswith(NODE) for each in line["functions"]) else 0.0
    return Reached(
        name=line["name"],
        cpu_s=line["cpu_s"] + nodes_s,
        functions=frozenset(line["functions"]),
        effects=line.get("effects", 0),
    )


def _record_tests(shadow: Shadow, log: Path, module: str) -> list[dict[str, Any]]:
    print(f"recording {module}", file=sys.stderr, flush=True)
    found = shadow.folder / "reached.jsonl"
    found.unlink(missing_ok=True)
    plugin = ["-p", "tests.mutation.reach", "--reach-log", str(log), "--reach-to", str(found)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, module]
    _run(shadow, command)
    return [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []


def _record_plays(shadow: Shadow, log: Path) -> list[dict[str, Any]]:
    print("recording plays", file=sys.stderr, flush=True)
    names = shadow.folder / "plays.txt"
    names.write_text("\n".join(list_plays()))
    output = _run(shadow, [sys.executable, "-m", "tests.mutation.plays", str(names), "--reach", str(log)])
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if len(lines) < len(list_plays()):
        raise RuntimeError(f"the simulation fails without a mutant, after {len(lines)} plays")
    return lines


def _run(shadow: Shadow, command: Sequence[str]) -> str:
    ended = run_limited(
        command,
        cwd=shadow.folder,
        environment=shadow.make_environment(),
        output=shadow.folder / "output.txt",
        cpu_s_max=RECORD_CPU_S_MAX,
    )
    if ended.returncode not in (0, 5):
        print(f"fails without a mutant, so it detects none:\n{ended.output[-1000:]}", file=sys.stderr, flush=True)
    return ended.output
