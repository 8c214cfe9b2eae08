"""Real processes under a seeded killer: `python -m tests.torture --minutes 60 --seed 1`.

The seed draws the jobs and the acts. Real processes are not deterministic: the same seed gives the same draws, not the
same moments, so a failure is replayed at best. All evidence is kept when a promise is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.torture.bed import LocalBed
from tests.torture.history import History
from tests.torture.killer import Killer
from tests.torture.references import References
from tests.torture.report import render
from tests.torture.story import Outcome, Story


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, help="draws jobs and acts (default: by chance)")
    parser.add_argument("--jobs", type=int, help="number of submissions (default: as many as the time allows)")
    parser.add_argument("--bed", choices=("local", "testbed", "both"), default="local")
    parser.add_argument("--every", type=float, default=6.0, help="mean seconds between two acts")
    parser.add_argument("--kinds", default="", help="kinds of the first submissions, with commas")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a run without violations too")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.randrange(1_000_000)
    outcomes = [play_local(options)]
    for outcome in outcomes:
        print(render(outcome))
    return int(any(outcome.violations for outcome in outcomes))


def play_local(options: argparse.Namespace) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir="/tmp"))
    print(f"seed {options.seed}, everything is below {folder}", flush=True)
    history = History(folder / "history.jsonl", seed=options.seed, bed="local")
    bed = LocalBed(folder, history)
    with contextlib.ExitStack() as stack:
        stack.callback(history.close)
        stack.callback(bed.close)
        bed.open()
        killer = Killer(bed, history, seed=options.seed, every_s=options.every)
        kinds = [kind for kind in options.kinds.split(",") if kind]
        story = Story(
            bed, history, seed=options.seed, minutes=options.minutes, jobs_max=options.jobs, killer=killer, kinds=kinds
        )
        outcome = story.play(References(folder / "references"))
    if outcome.violations or options.keep:
        again = f"python -m tests.torture --bed local --seed {options.seed} --minutes {options.minutes:g}"
        print(f"\nevidence is in {folder}; the same draws again: {again} --every {options.every:g}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
