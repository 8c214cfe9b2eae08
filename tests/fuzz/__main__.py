"""`python -m tests.fuzz TARGET --minutes 10 --seed N`: fuzz until a crash or the end of the time.

With atheris installed inputs are guided by coverage, else they are mutations of seeds. A crash leaves its input in
`.fuzz/` and prints the command that replays it: `python -m tests.fuzz TARGET --input FILE`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.fuzz.engine import keep_input, make_inputs, try_input
from tests.fuzz.registry import TARGETS, Target, load_target

FOLDER = Path(".fuzz")
RSS_MIB_MAX = 4096


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--input", type=Path, help="replay one input")
    parser.add_argument("--engine", choices=("atheris", "mutation"), help="atheris where it is installed")
    chosen = parser.parse_args()
    engine = chosen.engine or ("atheris" if importlib.util.find_spec("atheris") else "mutation")
    if chosen.target == "all":
        return run_all(chosen.minutes, chosen.seed, engine)
    if chosen.input:
        target, _ = load_target(chosen.target)
        try_input(target, chosen.input.read_bytes())
        print("no crash")
        return 0
    if engine == "atheris":
        return run_atheris(chosen.target, chosen.minutes, chosen.seed)
    return run_mutations(chosen.target, chosen.minutes, chosen.seed)


def run_all(minutes: float, seed: int, engine: str) -> int:
    """Run every target in its own process, even if an earlier one finds a fault."""
    import subprocess

    failed = []
    for name in TARGETS:
        command = [sys.executable, "-m", "tests.fuzz", name, "--minutes", str(minutes), "--seed", str(seed)]
        if subprocess.run([*command, "--engine", engine], check=False).returncode:
            failed.append(name)
    print(f"crashes in: {', '.join(failed)}" if failed else f"no crash in {len(TARGETS)} targets")
    return int(bool(failed))


def run_mutations(name: str, minutes: float, seed: int) -> int:
    target, seeds = load_target(name)
    start_s = time.monotonic()
    count = 0
    for data in make_inputs(seeds, seed):
        if time.monotonic() - start_s >= minutes * 60:
            break
        count += 1
        try:
            try_input(target, data)
        except Exception:
            traceback.print_exc()
            report_crash(name, data)
            return 1
    wall_s = time.monotonic() - start_s
    print(f"{name}: {count:,} inputs in {wall_s:.0f} s, {count / wall_s:.0f} a second, no crash (mutation)")
    return 0


def report_crash(name: str, data: bytes) -> None:
    path = keep_input(name, data, FOLDER)
    print(f"{name}: crash; replay it with: python -m tests.fuzz {name} --input {path}", flush=True)


def run_atheris(name: str, minutes: float, seed: int) -> int:
    """Run atheris. libFuzzer ends the process itself: its results are printed at the end of its own report."""
    import atheris

    with atheris.instrument_imports(include=["broker", "trainers", "agent"]):
        target, seeds = load_target(name)
    corpus = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    for data in seeds:
        keep_input("seed", data, corpus)

    def run(target: Target, data: bytes) -> None:
        try:
            target(data)
        except Exception:
            report_crash(name, data)
            raise

    limits = [f"-max_total_time={max(1, int(minutes * 60))}", f"-rss_limit_mb={RSS_MIB_MAX}", "-timeout=600"]
    quiet = ["-print_final_stats=1", "-verbosity=0", f"-artifact_prefix={FOLDER.resolve()}/"]
    FOLDER.mkdir(exist_ok=True)
    atheris.Setup(
        [sys.argv[0], *limits, *quiet, f"-seed={seed}", "-max_len=8192", str(corpus)], lambda data: run(target, data)
    )
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
