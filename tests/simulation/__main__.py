"""`python -m tests.simulation --seeds 1000`: play histories, report which invariant each broke and how to replay it."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.coverage import find_empty, fold, render
from tests.simulation.group_scenes import ALL_SCENES, LONG_SCENES
from tests.simulation.mutants.table import GROUP_MUTANTS, MUTANTS, Mutant, hunt
from tests.simulation.runner import Result, play_group, play_scene, play_seed

PROGRESS = 500  # seeds between two lines of progress


def main() -> int:
    scenes = {scene.name: scene for scene in (*ALL_SCENES, *LONG_SCENES)}
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--jobs", type=int, default=1, help="processes at work")
    parser.add_argument("--scene", choices=list(scenes), help="this one in place of seeds")
    parser.add_argument("--kill-at", type=int, help="number of the effect of a scene at which to kill")
    parser.add_argument("--stop-at", type=int, help="as `--kill-at`, but stopped for a while")
    parser.add_argument("--coverage", action="store_true", help="count which fault hit a job in which state")
    parser.add_argument("--mutants", action="store_true", help="plant known bugs, and say what catches each")
    parser.add_argument("--groups", action="store_true", help="play job groups; with `--mutants`: their bugs")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    options = parser.parse_args()
    if options.mutants:
        return show_mutants(GROUP_MUTANTS if options.groups else (*MUTANTS, *GROUP_MUTANTS))
    if options.scene:
        return show(
            play_scene(scenes[options.scene], kill_at=options.kill_at, stop_at=options.stop_at, trace=options.trace)
        )
    if options.seed is not None:
        return show((play_group if options.groups else play_seed)(options.seed, trace=options.trace))
    cells: Counter[tuple[str, str]] = Counter()
    seeds = range(options.first, options.first + options.seeds)
    code = play_seeds(seeds, options.jobs, cells, play=play_group if options.groups else play_seed)
    if options.coverage:
        empty = find_empty(cells)
        print(*render(cells), f"{len(empty)} cells are empty that can be hit", sep="\n")
        code = code or int(bool(empty))
    return code


def show(result: Result) -> int:
    for line in result.trace:
        print(line)
    end = result.failure or "no failure"
    print(f"{result.virtual_s:.0f} s, {result.points} effects, {result.kills.total()} kills: {end}")
    return int(bool(result.failure))


def show_mutants(mutants: Sequence[Mutant]) -> int:
    print(f"{'planted bug':38} {'caught by':54} {'':4} with the collector off")
    missed = 0
    for mutant in mutants:
        catches = [hunt(mutant)]
        if not mutant.needs_collector:
            catches.append(hunt(mutant, is_collector_off=True))
        missed += catches.count(None)
        cells = [f"{each.where:54} {each.letter:4}" if each else f"{'NOTHING':59}" for each in catches]
        print(f"{mutant.name:38} {' '.join(cells)}", flush=True)
    print(f"{len(mutants)} planted bugs, {missed} not caught")
    return int(missed > 0)


def play_seeds(seeds: range, jobs: int, cells: Counter[tuple[str, str]], *, play: Callable[[int], Result]) -> int:
    begun_s, failing, unowned_s, hours = time.perf_counter(), 0, 0.0, 0.0
    for played, result in enumerate(play_all(seeds, jobs, play), 1):
        cells.update(fold(result.cells))
        unowned_s += result.unowned_s
        hours += result.virtual_s / 3600
        if result.failure:
            failing += 1
            groups = " --groups" if play is play_group else ""
            print(f"seed {result.seed}: {result.failure}")
            print(f"  python -m tests.simulation{groups} --seed {result.seed} --trace")
            sys.stdout.flush()
        if played % PROGRESS == 0:
            print(f"{played} of {len(seeds)} seeds, {failing} failing", file=sys.stderr, flush=True)
    took_s = time.perf_counter() - begun_s
    print(f"{len(seeds)} seeds, {failing} failing; {hours:.0f} simulated hours, {len(seeds) / took_s:.1f} seeds/s")
    print(f"{unowned_s / len(seeds):.1f} s per seed that one of our nodes ran without a record")
    return int(failing > 0)


def play_all(seeds: Iterable[int], jobs: int, play: Callable[[int], Result]) -> Iterator[Result]:
    if jobs == 1:
        yield from map(play, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(play, seeds, chunksize=10)


if __name__ == "__main__":
    sys.exit(main())
