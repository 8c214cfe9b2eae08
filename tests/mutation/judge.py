"""Judgement of a mutant by the fast tests and the simulation: the quickest that enter its function first."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.mutation.limited import Ended, run_limited
from tests.mutation.operators import Mutant
from tests.mutation.readers import find_readers
from tests.mutation.shadow import Shadow
from tests.mutation.survey import RUNTIME, TORCH_S, TRAINERS, Reached, Survey, mirror

QUICK_PLAYS_S = 1.0  # of the quickest plays and tests: most mutants are detected here
QUICK_TESTS_S = 2.0
TESTS_S = 60.0
PLAYS_S = 5.0
KILLS = 16  # plays with a kill at an effect, over all scenes that enter the function
START_S = 10.0  # to start Python and import what tests need, on a slow day
SLOWDOWN = 4.0  # a mutant may take this much longer than its tests did
SURE_S = 0.5  # a test that takes longer runs real processes: its failure is confirmed by another run


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A verdict.

    `by`: `test`, `simulation`, `limit`; empty where the mutant survives. `where`: the test or play, and its message.
    """

    by: str
    where: str
    cpu_s: float


class Judge:
    def __init__(self, shadow: Shadow, survey: Survey) -> None:
        self._shadow = shadow
        self._survey = survey

    def judge(self, mutant: Mutant) -> Verdict:
        cpu_s = 0.0
        with self._shadow.planted(mutant):
            for stage in self._list_stages(mutant):
                by, where, took_s = stage()
                cpu_s += took_s
                if by:
                    return Verdict(by=by, where=where, cpu_s=cpu_s)
        return Verdict(by="", where="", cpu_s=cpu_s)

    def _list_stages(self, mutant: Mutant) -> Iterator[Callable[[], tuple[str, str, float]]]:
        tests = choose(self._survey.tests, mutant, TESTS_S)
        quick = take(tests, QUICK_TESTS_S)
        plays = choose(self._survey.plays, mutant, PLAYS_S)
        yield lambda: self._run_plays([(play.name, play.cpu_s) for play in take(plays, QUICK_PLAYS_S)])
        yield lambda: self._run_tests(quick)
        yield lambda: self._run_plays([(play.name, play.cpu_s) for play in plays[len(take(plays, QUICK_PLAYS_S)) :]])
        yield lambda: self._run_tests(tests[len(quick) :])
        entering = [each for each in self._survey.plays if each.enters(mutant)]
        yield lambda: self._run_plays(draw_kills(entering, mutant))

    def _run_tests(self, tests: Sequence[Reached]) -> tuple[str, str, float]:
        if not tests:
            return "", "", 0.0
        ended = self._run_pytest([each.name for each in tests], sum(each.cpu_s for each in tests))
        by, where = read_pytest(ended)
        suspect = next((each for each in tests if by == "test" and each.name in where), None)
        if suspect and suspect.cpu_s <= SURE_S:
            suspect = None
        if by == "limit":
            suspect = find_unfinished(tests, ended.output)
        if suspect is None:
            return by, where, ended.cpu_s
        again = self._run_pytest([suspect.name], suspect.cpu_s)
        by, where = read_pytest(again)
        if by:
            return by, f"{where} {suspect.name}" if by == "limit" else where, ended.cpu_s + again.cpu_s
        print(f"not confirmed: {suspect.name}", file=sys.stderr, flush=True)
        by, where, took_s = self._run_tests(tests[tests.index(suspect) + 1 :])
        return by, where, ended.cpu_s + again.cpu_s + took_s

    def _run_pytest(self, names: Sequence[str], took_s: float) -> Ended:
        file = self._write("tests.txt", names)
        command = [sys.executable, "-m", "pytest", "-x", "-vv", "--tb=line", "-p", "no:cacheprovider", f"@{file}"]
        is_trained = any(name.startswith(TRAINERS) for name in names)
        return self._run(command, took_s + (TORCH_S if is_trained else 0.0))

    def _run_plays(self, plays: Sequence[tuple[str, float]]) -> tuple[str, str, float]:
        if not plays:
            return "", "", 0.0
        file = self._write("plays.txt", [name for name, _ in plays])
        ended = self._run([sys.executable, "-m", "tests.mutation.plays", str(file)], sum(took for _, took in plays))
        if ended.returncode is None:
            return "limit", "simulation", ended.cpu_s
        detected = next((line for line in ended.output.splitlines() if line.startswith("DETECTED ")), "")
        last = ended.output.strip().rpartition("\n")[2]
        is_detected = ended.returncode != 0
        return (
            "simulation" if is_detected else "",
            (detected.removeprefix("DETECTED ") or last)[:200] if is_detected else "",
            ended.cpu_s,
        )

    def _write(self, name: str, lines: Sequence[str]) -> Path:
        path = self._shadow.folder / name
        path.write_text("\n".join(lines))
        return path

    def _run(self, command: Sequence[str], took_s: float) -> Ended:
        return run_limited(
            command,
            cwd=self._shadow.folder,
            environment=self._shadow.make_environment(),
            output=self._shadow.folder / "output.txt",
            cpu_s_max=START_S + SLOWDOWN * took_s,
        )


def choose(survey: Sequence[Reached], mutant: Mutant, cpu_s_max: float) -> list[Reached]:
    """Choose the tests and plays that enter the mutant's function, or read its constant: its module's own tests
    first, then those of its room.

    Hundreds of tests open a store, and enter the functions that do; those of the room say more about them. Where
    nothing enters a function, choose the tests that enter its file; else those of its room.
    """
    readers = find_readers(mutant)
    stem = Path(mutant.file).stem
    entering = [each for each in survey if (each.functions & readers if readers else each.enters(mutant))]
    if readers:  # a constant's own test may compare it, and enter nothing
        entering += [each for each in survey if f"/test_{stem}.py::" in each.name and each not in entering]
    entering = entering or [each for each in survey if each.enters_file(mutant)]
    folder = mirror(mutant.file)
    folders = tuple(f"{each}/" for each in (RUNTIME if folder.startswith(RUNTIME) else (folder,)))
    entering = entering or [each for each in survey if each.name.startswith(folders)]
    entering.sort(key=lambda each: (f"/test_{stem}.py::" not in each.name, not each.name.startswith(folders)))
    return take(entering, cpu_s_max)


def take(found: Sequence[Reached], cpu_s_max: float) -> list[Reached]:
    """Take the first of these within this total time, and at least one."""
    taken: list[Reached] = []
    total_s = 0.0
    for each in found:
        total_s += each.cpu_s
        if taken and total_s > cpu_s_max:
            break
        taken.append(each)
    return taken


def draw_kills(plays: Sequence[Reached], mutant: Mutant) -> list[tuple[str, float]]:
    """Draw kills in scenes that enter the function, at effects that the mutant's own seed draws."""
    random = Random(" ".join(mutant.identity))
    points = [
        (f"kill {place} {play.name.removeprefix('scene ')}", play.cpu_s)
        for play in plays
        if play.name.startswith("scene ")
        for place in range(1, play.effects + 1)
    ]
    return random.sample(points, min(KILLS, len(points)))


def find_unfinished(tests: Sequence[Reached], output: str) -> Reached | None:
    """Find the test that was under way when a limit ended them all.

    The processor time of processes it left running is in no record, so only a run of its own shows whether the mutant
    or their sum was too much.
    """
    return next((each for each in reversed(tests) if f"{each.name} " in output.rpartition("\n")[2]), None)


def read_pytest(ended: Ended) -> tuple[str, str]:
    """Return the detecting test and its place. Exit codes of pytest: 1 failed, 2 to 4 did not come to a test."""
    if ended.returncode is None:
        return "limit", "tests"
    if ended.returncode in (0, 5):
        return "", ""
    if "ERROR: not found" in ended.output or "ERROR: file or directory not found" in ended.output:
        raise RuntimeError(f"the recorded tests no longer exist; remove `build/mutation`\n{ended.output[-500:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (.+)$", ended.output, re.MULTILINE)
    last = ended.output.strip().rpartition("\n")[2]
    return "test", (failed[1] if failed else f"pytest exits with {ended.returncode}: {last}")[:300]
