"""How long exact pipeline plans take: `python -m tests.bench.bench_dag [--quick] [--deadline]`. No test."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from broker.pipelines.planner import plan_pipeline
from broker.types import EgressPrice, Estimate, Offer, PipelinePlan, Placement, Plan, Task

CLOUDS = ("aws", "gcp", "azure", "oci", "nebius", "lambda")
REGIONS = 30
Case = tuple[list[Task], list[Plan]]


def make_prices(seed: int) -> list[EgressPrice]:
    """Make prices that differ by region, none of them zero: the hardest kind found so far."""
    draw = random.Random(seed)
    prices = list[EgressPrice]()
    for cloud in CLOUDS:
        usual = draw.uniform(0.05, 0.12)
        for k in range(REGIONS):
            outside = usual * draw.uniform(0.8, 1.5)
            inside = outside * draw.uniform(0.2, 0.6)
            for target, usd in (("internet", outside), ("same_cloud_other_region", inside), ("same_region", 0.0)):
                prices.append(EgressPrice(cloud=cloud, from_region=f"region-{k}", target=target, usd_per_gb=usd))
    return prices


def make_pipeline(
    seed: int, count: int, candidates: int, parents: int, *, scale_gib: float
) -> tuple[list[Task], list[Plan]]:
    """Make tasks of 1-10 hours at 2-40 USD/h; each needs up to `scale_gib` of each of 1 to `parents` earlier ones."""
    draw = random.Random(seed)
    tasks = list[Task]()
    for i in range(count):
        chosen = draw.sample(range(i), min(i, draw.randint(1, parents)))
        tasks.append(Task(name=f"t{i}", needs={f"t{j}": draw.uniform(0, scale_gib) for j in chosen}))
    return tasks, [_make_plan(task, draw, candidates) for task in tasks]


def _make_plan(task: Task, draw: random.Random, candidates: int) -> Plan:
    hours = draw.uniform(1, 10)
    price = draw.uniform(2, 40)
    estimates = list[Estimate]()
    for k in range(candidates):
        speed = draw.uniform(0.8, 1.25)
        usd_hour = price * draw.uniform(1.0, 1.6) / speed
        offer = Offer(
            cloud=CLOUDS[k % len(CLOUDS)], region=f"region-{k // len(CLOUDS)}", zone=None, instance_type="x",
            vcpus=8, memory_gib=32, ondemand_usd_hour=usd_hour,
        )  # fmt: skip
        placement = Placement(offer=offer, is_spot=False, node_count=1)
        estimates.append(
            Estimate(placement=placement, expected_hours=hours * speed, expected_usd=hours * speed * usd_hour)
        )
    estimates.sort(key=lambda each: each.expected_usd or 0.0)
    return Plan(task=task, estimates=tuple(estimates), rejections=(), prices_as_of="2026-01-01", reason="")


def list_cases(*, is_quick: bool) -> Iterator[tuple[str, int, int, int, float]]:
    for scale in (30, 200, 1000):
        yield "1-3 parents", 100, 30, 3, scale
    if not is_quick:
        for scale in (30, 200, 1000):
            yield "1-8 parents", 100, 30, 8, scale
        yield "1-20 parents", 100, 30, 20, 200
        yield "1-3 parents", 300, 30, 3, 200
        yield "1-3 parents", 100, 150, 3, 200
        yield "chain", 100, 150, 1, 200


def measure(name: str, kind: str, solve: Callable[[int], PipelinePlan], seeds: int) -> None:
    seconds, gaps, saved = list[float](), list[float](), list[float]()
    for seed in range(seeds):
        began = time.process_time()
        result = solve(seed)
        seconds.append(time.process_time() - began)
        gaps.append(0.0 if result.is_optimal else (result.usd - result.lower_bound) / result.usd)
        saved.append(1 - result.usd / result.greedy_usd)
    seconds.sort()
    print(
        f"{name:<42}{kind:<9} median {seconds[len(seconds) // 2]:6.2f} s  worst {seconds[-1]:6.2f} s"
        f"  proven {sum(gap == 0 for gap in gaps)}/{seeds}  worst gap {max(gaps):.3%}"
        f"  saves {sum(saved) / len(saved):.1%} of greedy",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--deadline", action="store_true", help="also the least cost in 92 %% of greedy's hours")
    arguments = parser.parse_args()
    for name, count, candidates, parents, scale in list_cases(is_quick=arguments.quick):
        cases = [make_pipeline(seed, count, candidates, parents, scale_gib=scale) for seed in range(arguments.seeds)]
        if name == "chain":
            cases = [(chain_up(tasks, scale), plans) for tasks, plans in cases]
        prices = [make_prices(seed) for seed in range(arguments.seeds)]
        title = f"{count} tasks x {candidates}, {name}, {scale:g} GiB"

        def solve(seed: int, cases: list[Case] = cases, prices: list[list[EgressPrice]] = prices) -> PipelinePlan:
            return plan_pipeline(*cases[seed], prices[seed])

        def solve_in_time(
            seed: int, cases: list[Case] = cases, prices: list[list[EgressPrice]] = prices
        ) -> PipelinePlan:
            greedy_hours = plan_pipeline(*cases[seed], prices[seed], work_max=0).greedy_hours
            return plan_pipeline(*cases[seed], prices[seed], deadline_hours=0.92 * greedy_hours)

        measure(title, "cost", solve, arguments.seeds)
        if arguments.deadline:
            measure(title, "deadline", solve_in_time, arguments.seeds)


def chain_up(tasks: list[Task], gib: float) -> list[Task]:
    return [
        replace(task, needs={tasks[i - 1].name or "": gib * (i % 7) / 7} if i else {}) for i, task in enumerate(tasks)
    ]


if __name__ == "__main__":
    main()
