"""How long exact pipeline plans take: `python -m tests.bench.bench_dag [--quick]`. Not collected by pytest."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator

from broker.optimizer.dag import plan_pipeline
from broker.types import EgressPrice, Estimate, Offer, Placement, Plan, Task

CLOUDS = ("aws", "gcp", "azure", "oci", "nebius", "lambda")
PRICES = [
    EgressPrice(cloud=cloud, from_region="*", target=target, usd_per_gb=usd)
    for cloud, inside, outside in (
        ("aws", 0.02, 0.09), ("gcp", 0.02, 0.12), ("azure", 0.02, 0.087),
        ("oci", 0.0085, 0.0085), ("nebius", 0.0, 0.015), ("lambda", 0.0, 0.0),
    )
    for target, usd in (("internet", outside), ("same_cloud_other_region", inside), ("same_region", 0.0))
]  # fmt: skip


def make_pipeline(
    seed: int, count: int, candidates: int, parents: int, *, scale_gib: float
) -> tuple[list[Task], list[Plan]]:
    """Tasks of 1 to 10 hours at 2 to 40 USD/h; each needs up to `scale_gib` of each of 1 to `parents` earlier ones."""
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
    for scale in (10, 100, 300, 1000, 5000):
        yield f"sparse (1-3 parents), up to {scale} GiB", 100, 30, 3, scale
    if not is_quick:
        for scale in (10, 100, 300, 1000):
            yield f"denser (1-8 parents), up to {scale} GiB", 100, 30, 8, scale
        yield "large, sparse", 300, 30, 3, 200
        yield "wide choice", 100, 150, 3, 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    for name, count, candidates, parents, scale in list_cases(is_quick=arguments.quick):
        seconds, gaps, saved = list[float](), list[float](), list[float]()
        for seed in range(arguments.seeds):
            tasks, plans = make_pipeline(seed, count, candidates, parents, scale_gib=scale)
            began = time.perf_counter()
            result = plan_pipeline(tasks, plans, PRICES, steps_max=arguments.steps)
            seconds.append(time.perf_counter() - began)
            gaps.append((result.usd - result.lower_bound) / result.usd)
            saved.append(1 - result.usd / result.greedy_usd)
        seconds.sort()
        proven = sum(gap == 0 for gap in gaps)
        print(
            f"{name:<40} {count} x {candidates}: median {seconds[len(seconds) // 2]:.2f} s, worst {seconds[-1]:.2f} s,"
            f" proven {proven}/{len(gaps)}, worst gap {max(gaps):.3%}, saves {sum(saved) / len(saved):.1%} of greedy",
            flush=True,
        )


if __name__ == "__main__":
    main()
