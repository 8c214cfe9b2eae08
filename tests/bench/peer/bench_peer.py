"""Against SkyPilot on the same prices: `make bench-peer`, or

    python -m tests.bench.peer.bench_peer --peer .venv-peer/bin/python

The book is exported as SkyPilot catalog files into a temporary home; SkyPilot's optimizer reads them there with every
cloud taken as enabled, and broker plans from the same files, imported. Of every random task the price per hour of both
choices is compared, and how long each took, warm in one process and as a whole process.

Where cores are asked for, SkyPilot keeps to a few x86 families of each cloud and broker takes the cheapest machine of
all, so that a lower price there partly reflects a different choice of machines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker.app.market import Market, find_cache
from broker.catalog.importing import import_catalog
from broker.errors import BrokerError
from broker.task.loader import load_tasks_text
from tests.bench.peer.export import NAMES, export_book

SKY_SIDE = Path(__file__).parent / "sky_side.py"
GPUS = (
    ("A100", (1, 2, 4, 8)), ("A100-80GB", (1, 2, 4, 8)), ("H100", (1, 8)), ("L4", (1, 2, 4, 8)), ("A10G", (1, 4, 8)),
    ("H200", (8,)), ("A10", (1, 2)), ("L40S", (1, 4, 8)), ("RTX6000-Ada", (1, 2)), ("B200", (8,)),
)  # fmt: skip
TOLERANCE = 1e-6


def draw_task(draw: random.Random) -> dict[str, Any]:
    """Draw a task of a common size: accelerators three times out of four, otherwise cores and memory."""
    resources: dict[str, Any] = {}
    if draw.random() < 0.75:
        chosen = draw.sample(GPUS, draw.choice((1, 1, 1, 2, 3)))
        wanted = {name: draw.choice(counts) for name, counts in chosen}
        resources["accelerators"] = wanted if len(wanted) > 1 else "{}:{}".format(*next(iter(wanted.items())))
        if draw.random() < 0.2:
            resources["cpus"] = f"{draw.choice((4, 8, 16))}+"
    else:
        cpus = draw.choice((2, 4, 8, 16, 32, 64))
        resources |= {"cpus": f"{cpus}+", "memory": f"{cpus * draw.choice((1, 2, 4))}+"}
    if draw.random() < 0.5:
        resources["use_spot"] = True
    if draw.random() < 0.7:
        return {"resources": resources, "run": "x"}
    # SkyPilot doesn't join machines of RunPod and Verda into a cluster; the price book doesn't know that.
    resources["cloud"] = draw.choice(("aws", "azure", "gcp"))
    return {"num_nodes": draw.choice((1, 2, 4)), "resources": resources, "run": "x"}


def run_sky(python: Path, home: Path, tasks: Sequence[dict[str, Any]]) -> tuple[float, list[dict[str, Any]], float]:
    """Return the seconds of the import, a result per task, and the seconds of the whole process."""
    given, found = home / "tasks.json", home / "results.json"
    given.write_text(json.dumps(tasks))
    start = time.perf_counter()
    ended = subprocess.run(
        [python, SKY_SIDE, ",".join(NAMES), given, found],
        env={**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    if ended.returncode:
        sys.exit(f"SkyPilot's side failed:\n{ended.stderr[-2000:]}")
    imported, *results = json.loads(found.read_text())
    return imported, results, seconds


def run_broker(market: Market, tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    results = []
    for each in tasks:
        start = time.perf_counter()
        try:
            (task,) = load_tasks_text(json.dumps(each), "bench")
            best = market.rank(market.resolve(task)).choice
            found: dict[str, Any] = {"usd": best.placement.usd_hour, "what": str(best.placement.offer)}
        except BrokerError as error:
            found = {"error": error.message}
        results.append({**found, "seconds": time.perf_counter() - start})
    return results


def time_broker_process(cache: Path, task: dict[str, Any], folder: Path) -> float:
    file = folder / "task.yaml"
    file.write_text(json.dumps(task))
    start = time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent)}
    subprocess.run(
        [sys.executable, "-m", "broker", "plan", str(file)], env=environment, check=True, capture_output=True
    )
    return time.perf_counter() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--peer", type=Path, default=Path(".venv-peer/bin/python"))
    arguments.add_argument("--tasks", type=int, default=200)
    arguments.add_argument("--verbose", action="store_true", help="both choices of every task")
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    draw = random.Random(given.seed)
    tasks = [draw_task(draw) for _ in range(given.tasks)]
    with tempfile.TemporaryDirectory() as folder:
        home, cache = Path(folder) / "home", Path(folder) / "cache" / "broker"
        shipped = Market(find_cache()).book
        catalogs = home / ".sky/catalogs/v8"
        count = export_book(shipped, catalogs)
        report = import_catalog(cache, shipped, catalogs, now_s=time.time(), is_alone=True)
        say(f"{count:,} offers exported, {sum(report.offers.values()):,} read back, {len(report.faults)} faults")
        imported, theirs, _ = run_sky(given.peer, home, tasks)
        ours = run_broker(Market(cache), tasks)
        first = next(i for i, (own, its) in enumerate(zip(ours, theirs, strict=True)) if "usd" in own and "usd" in its)
        sky_s = min(run_sky(given.peer, home, tasks[first : first + 1])[2] for _ in range(3))
        broker_s = min(time_broker_process(cache, tasks[first], Path(folder)) for _ in range(3))
    sys.exit(
        compare(
            tasks,
            ours,
            theirs,
            imported_s=imported,
            sky_s=sky_s,
            broker_s=broker_s,
            is_verbose=given.verbose,
        )
    )


def compare(
    tasks: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]],
    *, imported_s: float, sky_s: float, broker_s: float, is_verbose: bool,
) -> int:  # fmt: skip
    """Print the table; return 1 if broker costs more for any task, or finds nothing where SkyPilot does."""
    dearer, both, only_ours, neither = list[int](), 0, 0, 0
    cheaper = dict[str, list[float]](accelerators=[], cores=[])
    for i, (own, its) in enumerate(zip(ours, theirs, strict=True)):
        if "usd" in its and ("usd" not in own or own["usd"] > its["usd"] + TOLERANCE):
            dearer.append(i)
        elif "usd" in own and "usd" in its:
            both += 1
            if own["usd"] < its["usd"] - TOLERANCE:
                kind = "accelerators" if "accelerators" in tasks[i]["resources"] else "cores"
                cheaper[kind].append(1 - own["usd"] / its["usd"])
        elif "usd" in own:
            only_ours += 1
        else:
            neither += 1
    say(f"{len(tasks)} tasks: both plan {both + len(dearer)}, only broker {only_ours}, neither {neither}")
    count = sum(map(len, cheaper.values()))
    say(f"broker dearer {len(dearer)}, equal {both - count}, cheaper {count}")
    for kind, shares in cheaper.items():
        if shares:
            say(f"  of tasks that ask for {kind}: {len(shares)} cheaper, by {statistics.median(shares):.0%} (median)")
    for i, (own, its) in enumerate(zip(ours, theirs, strict=True)):
        if is_verbose:
            say(f"{json.dumps(tasks[i])}\n  broker  {own}\n  sky     {its}")
    for i in dearer:
        say(f"DEARER {json.dumps(tasks[i])}\n  broker  {ours[i]}\n  sky     {theirs[i]}")
    warm = [each["seconds"] for each in theirs[1:] if "usd" in each]
    own_warm = [each["seconds"] for each in ours[1:] if "usd" in each]
    say(f"{'':<34}{'SkyPilot':>10}{'broker':>10}{'ratio':>8}")
    for name, its_s, own_s in (
        ("one task, warm, median (ms)", statistics.median(warm), statistics.median(own_warm)),
        ("one task, whole process (ms)", sky_s, broker_s),
    ):
        say(f"{name:<34}{its_s * 1e3:>10.1f}{own_s * 1e3:>10.1f}{its_s / own_s:>7.0f}x")
    say(f"(of SkyPilot's process {imported_s * 1e3:.0f} ms are its import; what its API server adds is not counted)")
    return 1 if dearer else 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
