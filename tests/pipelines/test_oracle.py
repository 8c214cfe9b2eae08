"""Pipelines too large for exhaustive search, compared with an independent solver (HiGHS, if installed)."""

from __future__ import annotations

import random

import pytest

from broker.optimizer.egress import EgressTable, price_transfer
from broker.pipelines.planner import plan_pipeline
from broker.types import EgressPrice, Plan, Task
from tests.bench.bench_dag import CLOUDS, make_pipeline

highspy = pytest.importorskip("highspy", reason="the extra `solver` is not installed")


def solve_with_highs(tasks: list[Task], plans: list[Plan], egress: list[EgressPrice]) -> float:
    """Solve an integer program: one binary per candidate; a share for each pair along an edge, whose sums equal its
    ends'."""
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("mip_rel_gap", 0.0)
    table = EgressTable.from_prices(egress)
    picks = [[model.addBinary(obj=each.expected_usd) for each in plan.estimates] for plan in plans]
    for each in picks:
        model.addConstr(sum(each[1:], start=1 * each[0]) == 1)
    number = {task.name: i for i, task in enumerate(tasks)}
    for v, task in enumerate(tasks):
        for name, gib in task.needs.items():
            u = number[name]
            shares = [
                [
                    model.addVariable(
                        lb=0.0,
                        obj=price_transfer(source.placement.offer, target.placement.offer, gib, table).usd,
                    )
                    for target in plans[v].estimates
                ]
                for source in plans[u].estimates
            ]
            for i, row in enumerate(shares):
                model.addConstr(sum(row[1:], start=1 * row[0]) == picks[u][i])
            for j, column in enumerate(zip(*shares, strict=True)):
                model.addConstr(sum(column[1:], start=1 * column[0]) == picks[v][j])
    model.minimize()
    value: float = model.getInfo().objective_function_value
    return value


@pytest.mark.parametrize("seed", range(8))
def test_an_external_solver_finds_no_cheaper_choice(seed: int) -> None:
    draw = random.Random(seed)
    egress = [
        EgressPrice(cloud=cloud, from_region="*", target=target, usd_per_gb=draw.uniform(*span))
        for cloud in CLOUDS
        for target, span in (("internet", (0.05, 0.12)), ("same_cloud_other_region", (0.01, 0.05)))
    ]
    tasks, plans = make_pipeline(seed, 20, 8, 4, scale_gib=draw.choice((50, 200, 800)))
    solved = plan_pipeline(tasks, plans, egress)
    assert solved.is_optimal
    assert solved.usd == pytest.approx(solve_with_highs(tasks, plans, egress), rel=1e-6)
