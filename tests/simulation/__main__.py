"""`python -m tests.simulation --seeds 1000`: plays histories and says which one broke what, and how to replay it."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.runner import play_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    options = parser.parse_args()
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    begun_s, failing = time.perf_counter(), 0
    for seed in seeds:
        result = play_seed(seed, trace=options.trace)
        for line in result.trace:
            print(line)
        if result.failure:
            failing += 1
            print(f"seed {seed}: {result.failure}\n  python -m tests.simulation --seed {seed} --trace", flush=True)
    took_s = time.perf_counter() - begun_s
    print(f"{len(seeds)} seeds, {failing} failing, {len(seeds) / took_s:.1f} seeds/s")
    return int(failing > 0)


if __name__ == "__main__":
    sys.exit(main())
