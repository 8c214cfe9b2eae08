"""Plays of the histories and scenes that FILE names, up to the first failure: `python -m tests.mutation.plays FILE`.

A play is `seed 12`, `group 3`, `scene plain` or `kill 30 plain`. With `--reach LOG` each is played alone; the functions
that it enters are read from LOG and reported in one JSON line per play.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.mutation.reach import Reader
from tests.simulation.group_scenes import ALL_SCENES
from tests.simulation.runner import Result, play_group, play_scene, play_seed

SEEDS = 40
GROUPS = 12  # job groups: several jobs and longer plays


def list_plays() -> list[str]:
    seeds = [*(f"seed {seed}" for seed in range(SEEDS)), *(f"group {seed}" for seed in range(GROUPS))]
    return [*(f"scene {scene.name}" for scene in ALL_SCENES), *seeds]


def play(name: str) -> Result:
    kind, _, rest = name.partition(" ")
    if kind == "seed":
        return play_seed(int(rest))
    if kind == "group":
        return play_group(int(rest))
    number, _, scene = rest.partition(" ") if kind == "kill" else ("", "", rest)
    found = next(each for each in ALL_SCENES if each.name == scene)
    return play_scene(found, kill_at=int(number) if number else None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.plays")
    parser.add_argument("file", type=Path, help="a play a line")
    parser.add_argument("--reach", type=Path, help="the log that the recorder writes")
    options = parser.parse_args()
    reader = Reader(options.reach) if options.reach else None
    for name in options.file.read_text().splitlines():
        if reader:
            reader.begin()
        begun_s = time.process_time()
        result = play(name)
        if reader:
            took_s = time.process_time() - begun_s
            line = {"name": name, "cpu_s": took_s, "functions": reader.read(), "effects": result.points}
            print(json.dumps(line), flush=True)
        if result.failure:
            print(f"DETECTED {name}: {result.failure}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
