"""The search on costs without structure, where the bound alone proves nothing and branching is required."""

from __future__ import annotations

import itertools
import random

import pytest

from broker.pipelines.bounds import CostField
from broker.pipelines.branch_and_bound import SearchResult, search
from broker.pipelines.costs import CostTotals

PAIRS = list(itertools.combinations(range(6), 2))


def draw_sums(seed: int) -> CostTotals:
    draw = random.Random(seed)
    unary = [[draw.random() for _ in range(3)] for _ in range(6)]
    return CostTotals(unary, PAIRS, [[[draw.random() for _ in range(3)] for _ in range(3)] for _ in PAIRS])


def solve(sums: CostTotals, *, work_max: float = 1e7) -> SearchResult:
    field = CostField(sums.unary, PAIRS, sums.tables)
    # without local moves the incumbent stays bad for long, and much must be proven
    return search(
        field, [0] * 6, evaluate=sums.add_up, improve=lambda choice, value: (choice, value), work_max=work_max
    )


def try_everything(sums: CostTotals) -> float:
    return min(sums.add_up(choice) for choice in itertools.product(range(3), repeat=6))


@pytest.mark.parametrize("block", range(4))
def test_branch_and_bound_equals_brute_force(block: int) -> None:
    steps = 0
    for seed in range(block * 30, block * 30 + 30):
        sums = draw_sums(seed)
        found = solve(sums)
        steps += found.steps
        assert found.is_optimal
        assert found.value == found.lower_bound == pytest.approx(try_everything(sums)), f"draw_sums({seed})"
        assert found.value == pytest.approx(sums.add_up(found.choice))
    assert steps > 3 * 30, "the cases are too easy to prove anything about branching"


def test_an_interrupted_search_always_brackets_the_optimum() -> None:
    unproven = 0
    for seed in range(30):
        sums = draw_sums(seed)
        best = try_everything(sums)
        for work_max in (0, 5e3, 2e4, 1e5):
            found = solve(sums, work_max=work_max)
            assert found.lower_bound - 1e-9 <= best <= found.value + 1e-9
            assert not found.is_optimal or found.value == pytest.approx(best)
            unproven += not found.is_optimal
    assert unproven > 30
