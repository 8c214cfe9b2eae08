"""Mutation testing of the product: `python -m tests.mutation --count 300 --seed 1` plants small faults.

It draws mutants of `jobs`, `provision`, `state`, `runtime` and `agent`, runs each in a copy of the tree against the
fast tests and the simulation, and prints the detector of each and the survivors. With `--only` it draws from any folder
or file of `broker` and `trainers`; the fast tests of their rooms judge. It exits with 1 where fewer than 90 % are
detected. With `--resume` results are kept in a file, one JSON line each, and an interrupted run continues; a change
of the mutated file makes its results void, and `--retry` judges survivors again.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from random import Random

from tests.mutation import draw, report
from tests.mutation.judge import Judge, Verdict
from tests.mutation.limited import adopt_orphans
from tests.mutation.operators import Mutant
from tests.mutation.shadow import ROOT, make_shadow
from tests.mutation.survey import Survey, survey

Judged = tuple[Mutant, Verdict]
AT_ONCE = 3  # mutants that a process judges before it reports: an interrupted run loses no more


def main() -> int:
    options = parse_arguments()
    mutants = draw.draw(options.count, options.seed, draw.list_files(options.only or draw.ROOMS))
    if options.list:
        print(*(mutant.name for mutant in mutants), sep="\n")
        return 0
    for stale in draw.find_stale(draw.list_files()):
        print(f"not in the sources any more: {stale}", file=sys.stderr)
    adopt_orphans()
    results = Results(options.resume, is_retry=options.retry)
    judged = [(mutant, verdict) for mutant in mutants if (verdict := results.get(mutant))]
    left = [mutant for mutant in mutants if not results.get(mutant)]
    Random(options.seed).shuffle(left)  # an interrupted run has judged a fair sample
    left = left[: options.most]
    for mutant, verdict in judge_all(left, options.jobs):
        results.add(mutant, verdict)
        judged.append((mutant, verdict))
        outcome = f"{verdict.by} ({verdict.where})" if verdict.by else "SURVIVES"
        print(f"{len(judged):4}/{len(mutants)} {mutant.name}: {outcome}, {verdict.cpu_s:.1f} s", flush=True)
    judged.sort(key=lambda each: (each[0].file, each[0].start))
    print(*report.render(judged), sep="\n")
    for mutant, verdict in judged:
        if not verdict.by:
            print(f"\n{mutant.name}", *report.render_diff((ROOT / mutant.file).read_text(), mutant), sep="\n")
    return int(report.measure_percent(judged) < report.PERCENT_MIN)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--count", type=int, default=300, help="how many to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes at work")
    parser.add_argument("--only", action="append", help="a folder or file, such as broker/jobs or broker/jobs/monitor")
    parser.add_argument("--list", action="store_true", help="print what is drawn, and judge nothing")
    parser.add_argument("--resume", type=Path, help="keep results in this file, and go on from it")
    parser.add_argument("--retry", action="store_true", help="judge survivors of the file again")
    parser.add_argument("--most", type=int, help="judge no more than this many now")
    return parser.parse_args()


class Results:
    """One JSON line per mutant; void once its file has changed."""

    def __init__(self, path: Path | None, *, is_retry: bool) -> None:
        self._path = path
        self._found: dict[str, Verdict] = {}
        for line in path.read_text().splitlines() if path and path.exists() else ():
            row = json.loads(line)
            self._found[row["key"]] = Verdict(by=row["by"], where=row["where"], cpu_s=row["cpu_s"])
        if is_retry:
            self._found = {key: verdict for key, verdict in self._found.items() if verdict.by}

    def get(self, mutant: Mutant) -> Verdict | None:
        return self._found.get(self._make_key(mutant))

    def add(self, mutant: Mutant, verdict: Verdict) -> None:
        if self._path:
            row = {"key": self._make_key(mutant), "name": mutant.name, **vars(verdict)}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def _make_key(self, mutant: Mutant) -> str:
        return f"{mutant.file} {digest_file(mutant.file)} {mutant.start}-{mutant.end} {mutant.after}"


@functools.cache
def digest_file(file: str) -> str:
    return draw.digest((ROOT / file).read_text())


def judge_all(mutants: Sequence[Mutant], jobs: int) -> Iterator[Judged]:
    if not mutants:
        return
    found = survey({mutant.file for mutant in mutants})
    if jobs == 1:
        yield from judge_part(mutants, found)
        return
    with ProcessPoolExecutor(jobs, initializer=adopt_orphans) as pool:
        parts = [mutants[first : first + AT_ONCE] for first in range(0, len(mutants), AT_ONCE)]
        waiting = [pool.submit(judge_few, part, found) for part in parts]
        for done in as_completed(waiting):
            yield from done.result()


def judge_few(mutants: Sequence[Mutant], found: Survey) -> list[Judged]:
    return list(judge_part(mutants, found))


def judge_part(mutants: Sequence[Mutant], found: Survey) -> Iterator[Judged]:
    with make_shadow() as shadow:
        judge = Judge(shadow, found)
        for mutant in mutants:
            yield mutant, judge.judge(mutant)


if __name__ == "__main__":
    sys.exit(main())
