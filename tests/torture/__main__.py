"""Real processes under a seeded killer: `python -m tests.torture --minutes 60 --seed 1`.

The seed draws the jobs and the acts. Real processes are not deterministic: the same seed gives the same draws, not the
same moments, so a failure is replayed at best. All evidence is kept when a promise is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.testbed.world import INSIDE, find_obstacle
from tests.torture.bed import LocalBed
from tests.torture.history import History
from tests.torture.killer import ACTS, Acts, Killer
from tests.torture.references import References
from tests.torture.report import render
from tests.torture.story import Story


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, help="draws jobs and acts (default: by chance)")
    parser.add_argument("--jobs", type=int, help="number of submissions (default: as many as the time allows)")
    parser.add_argument("--bed", choices=("local", "testbed", "both"), default="local")
    parser.add_argument("--every", type=float, default=6.0, help="mean seconds between two acts")
    parser.add_argument("--kinds", default="", help="kinds of the first submissions, with commas")
    parser.add_argument("--acts", default="", help="only acts of these kinds, with commas")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a run without violations too")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.randrange(1_000_000)
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background, a shell lets its commands ignore the first
        signal.signal(number, lambda *_: sys.exit(130))
    beds = choose_beds(options.bed)
    if "testbed" in beds and INSIDE not in os.environ:
        return play_in_world(options, arguments, beds)
    return play(options, beds[0])


def play_in_world(options: argparse.Namespace, arguments: Sequence[str], beds: Sequence[str]) -> int:
    """Run the test-bed in a process and network of its own, which all in it die with; run the local bed in parallel."""
    command = [sys.executable, "-m", "tests.torture", *arguments, "--bed", "testbed", "--seed", str(options.seed)]
    world = subprocess.Popen([sys.executable, "-m", "tests.testbed.world", *command])
    try:
        code = play(options, "local") if "local" in beds else 0
        return world.wait() or code
    finally:
        world.terminate()
        world.wait()


def choose_beds(wanted: str) -> Sequence[str]:
    """Return the beds; `both` is the local one alone where no sealed network can be made, which is reported."""
    if wanted == "local":
        return ["local"]
    if INSIDE in os.environ:
        return ["testbed"]
    if obstacle := find_obstacle():
        if wanted == "testbed":
            sys.exit(f"error: {obstacle}")
        print(f"the test-bed is left out: {obstacle}", flush=True)
        return ["local"]
    return ["local", "testbed"] if wanted == "both" else ["testbed"]


def play(options: argparse.Namespace, name: str) -> int:
    """Play one bed's run to its end; return 1 where a promise was broken."""
    folder = Path(tempfile.mkdtemp(prefix=f"torture-{name}-", dir="/tmp"))
    print(f"{name}: seed {options.seed}, everything is below {folder}", flush=True)
    history = History(folder / "history.jsonl", seed=options.seed, bed=name)
    with contextlib.ExitStack() as stack:
        stack.callback(history.close)
        bed, killer = make_bed(stack, folder, history, options, name)
        kinds = [kind for kind in options.kinds.split(",") if kind]
        story = Story(
            bed, history, seed=options.seed, minutes=options.minutes, jobs_max=options.jobs, killer=killer, kinds=kinds
        )
        outcome = story.play(References(folder / "references"))
    print(render(outcome))
    if outcome.violations or options.keep:
        again = f"python -m tests.torture --bed {name} --seed {options.seed} --minutes {options.minutes:g}"
        print(f"evidence is in {folder}; the same draws again: {again} --every {options.every:g}", flush=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return int(bool(outcome.violations))


def make_bed(
    stack: contextlib.ExitStack, folder: Path, history: History, options: argparse.Namespace, name: str
) -> tuple[LocalBed, Killer]:
    if name == "local":
        bed = LocalBed(folder, history)
        stack.callback(bed.close)
        bed.open()
        return bed, Killer(bed, history, seed=options.seed, every_s=options.every, acts=choose_acts(ACTS, options.acts))
    from tests.testbed.metadata import MetadataServer
    from tests.testbed.world import build
    from tests.torture.hosts import ACTS as HOSTS_ACTS
    from tests.torture.hosts import HostsBed, HostsKiller

    build()
    metadata = MetadataServer()
    stack.callback(metadata.close)
    hosts = HostsBed(folder, history, metadata)
    stack.callback(hosts.close)
    hosts.open()
    acts = choose_acts(HOSTS_ACTS, options.acts)
    return hosts, HostsKiller(hosts, history, seed=options.seed, every_s=options.every, acts=acts)


def choose_acts(acts: Acts, wanted: str) -> Acts:
    """Return the requested acts, each as likely against the others as usual; all where none is named."""
    names = {name for name in wanted.split(",") if name}
    if unknown := sorted(names - {kind for kind, _ in acts}):
        sys.exit(f"error: no acts of this bed: {', '.join(unknown)}; there are {', '.join(kind for kind, _ in acts)}")
    return tuple(each for each in acts if not names or each[0] in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
