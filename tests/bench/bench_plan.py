"""How long a plan takes: `python -m tests.bench.bench_plan`. Not collected by pytest.

Every figure is the least of several runs; times of whole processes are processor seconds of the process and also wall
seconds, as other work on the machine lengthens the latter. Bars are checked with `--check`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from broker.app.market import Market, find_cache
from broker.optimizer.planner import make_plan
from broker.task.loader import load_tasks_text

TASK = """
name: train
resources:
  accelerators: {A100-80GB:8, H100:8}
num_nodes: 2
goal: {work: {hours: 100, on: A100-80GB:8}, deadline: 6d}
checkpoint: {stall: 10s, restart: 6m, size: 80GB}
run: torchrun train.py
"""
ONE = "resources: {accelerators: A100:8, use_spot: true}\nrun: x"
SIX = """
resources:
  accelerators: {A100:8, A100-80GB:8, H100:8, V100:8, L4:1, T4:1}
goal: {work: {hours: 100, on: A100:8}, deadline: 10d}
run: x
"""
BARE_RATIO_MAX, PROCESS_S_MAX, MEMORY_MIB_MAX = 9.0, 0.20, 60.0
ONE_S_MAX, SIX_S_MAX = 0.005, 0.030


def measure(work: Callable[[], object], repeats: int) -> float:
    """Return the least wall seconds."""
    least = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - start)
    return least


def make_environment(folder: Path) -> dict[str, str]:
    """Return this environment with compiled modules kept in `folder`, as those of an installed broker are.

    Where PYTHONDONTWRITEBYTECODE is set, each start would compile all modules again, which takes longer than a plan.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(folder)}


def run_process(argv: Sequence[str], repeats: int, environment: Mapping[str, str]) -> tuple[float, float, float]:
    """Return the least wall and processor seconds and the largest resident MiB of whole processes."""
    walls, processors, memory = [], [], 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        with Path(os.devnull).open("w") as nowhere:
            pid = os.posix_spawn(
                argv[0], list(argv), environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, nowhere.fileno(), 1), (os.POSIX_SPAWN_DUP2, nowhere.fileno(), 2)],
            )  # fmt: skip
            _, status, used = os.wait4(pid, 0)
        assert status == 0, argv
        walls.append(time.perf_counter() - start)
        processors.append(used.ru_utime + used.ru_stime)
        memory = max(memory, used.ru_maxrss / 1024)
    return min(walls), min(processors), memory


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeats", type=int, default=15)
    arguments.add_argument("--check", action="store_true", help="fail where a bar is missed")
    given = arguments.parse_args()
    failures = list[str]()

    def show(name: str, figure: str, bar: str, is_met: bool) -> None:
        sys.stdout.write(f"{name:<44}{figure:>18}  {bar:<14}{'' if is_met else 'MISSED'}\n")
        if not is_met:
            failures.append(name)

    market = Market(find_cache())
    sys.stdout.write(f"{sum(market.book.count_offers().values()):,} offers\n")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.yaml"
        file.write_text(TASK)
        environment = make_environment(Path(folder) / "compiled")
        command = [sys.executable, "-m", "broker", "plan", str(file)]
        run_process(command, 1, environment)  # compiles
        bare = run_process([sys.executable, "-c", "pass"], given.repeats, environment)
        plan = run_process(command, given.repeats, environment)
    show("python -c pass, wall / processor", f"{bare[0] * 1e3:.0f} / {bare[1] * 1e3:.0f} ms", "", True)
    show(
        "broker plan, wall / processor",
        f"{plan[0] * 1e3:.0f} / {plan[1] * 1e3:.0f} ms",
        f"<= {PROCESS_S_MAX:.2f} s",
        plan[0] <= PROCESS_S_MAX,
    )
    ratio = plan[0] / bare[0]
    show("broker plan over python -c pass", f"{ratio:.1f} x", f"<= {BARE_RATIO_MAX:g} x", ratio <= BARE_RATIO_MAX)
    show("broker plan, largest memory", f"{plan[2]:.0f} MiB", f"<= {MEMORY_MIB_MAX:g} MiB", plan[2] <= MEMORY_MIB_MAX)

    figures, egress = market.book.read_figures(), market.book.read_egress()
    for name, text, limit in (("A100:8 spot", ONE, ONE_S_MAX), ("six GPU types, all places", SIX, SIX_S_MAX)):
        (task,) = load_tasks_text(text, "bench")
        offers = market.book.find_offers(task)
        asked = measure(lambda task=task: market.book.find_offers(task), given.repeats)  # type: ignore[misc]
        ranked = measure(
            lambda task=task, offers=offers: make_plan(  # type: ignore[misc]
                task, offers, prices_as_of="", figures=figures, egress=egress
            ),
            given.repeats,
        )
        show(f"{name}: query", f"{asked * 1e3:.2f} ms", f"{len(offers)} offers", True)
        total = asked + ranked
        show(f"{name}: query + rank", f"{total * 1e3:.2f} ms", f"<= {limit * 1e3:g} ms", total <= limit)
    if given.check and failures:
        sys.exit(f"missed: {', '.join(failures)}")


if __name__ == "__main__":
    main()
