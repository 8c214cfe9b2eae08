"""The longest path of a pipeline's choice, and plans that take exactly as long as they may."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest

from broker.optimizer.egress import EgressTable
from broker.pipelines.deadline import find_cheapest_in_time, find_longest_path
from broker.pipelines.problem import Problem, make_problem
from tests.pipelines.test_planner import Case, case, estimate
from tests.pipelines.test_totals import draw_dense


def make(each: Case) -> Problem:
    names = [task.name for task in each.tasks]
    edges = [(names.index(name), v, gib) for v, task in enumerate(each.tasks) for name, gib in task.needs.items()]
    egress = EgressTable.from_prices(each.egress)
    return make_problem([str(name) for name in names], each.plans, edges, egress, needs_time=True)


@pytest.mark.parametrize("seed", range(6))
def test_the_longest_path_leads_from_a_first_task_to_the_last_end(seed: int) -> None:
    problem = make(draw_dense(seed))
    tables = {(u, v): table for (u, v, _), table in zip(problem.edges, problem.edge_hours, strict=True)}
    for choice in itertools.islice(itertools.product(*(range(len(states)) for states in problem.states)), 20):
        path, hours = find_longest_path(problem, choice)
        assert hours == pytest.approx(problem.measure_hours(choice))
        assert not any(v == path[0] for _, v in tables), "it begins with a task that needs no other"
        own = sum(problem.states[v][choice[v]].hours for v in path)
        assert hours == pytest.approx(
            own + sum(tables[edge][choice[edge[0]]][choice[edge[1]]] for edge in pairwise(path))
        )


@pytest.mark.parametrize(
    "needs", [{"b": ("a",)}, {"b": ("a",), "c": ("a", "b")}, {"b": ("a",), "c": ("a",), "d": ("b", "c")}]
)
def test_a_plan_that_takes_exactly_as_long_as_it_may_is_on_time(needs: dict[str, tuple[str, ...]]) -> None:
    names = ["a", *needs]
    options = {name: [estimate("aws/a", 1.0, 3.0), estimate("aws/a", 9.0, 2.0, "fast")] for name in names}
    problem = make(case({name: dict.fromkeys(needs.get(name, ()), 0.0) for name in names}, options))
    everything = list(itertools.product((0, 1), repeat=len(names)))
    fastest = min(everything, key=problem.measure_hours)
    for limit in sorted({problem.measure_hours(choice) for choice in everything}):
        found = find_cheapest_in_time(problem, fastest, limit, work_max=1e7)
        timely = [choice for choice in everything if problem.measure_hours(choice) <= limit]
        assert found.is_optimal and found.value == pytest.approx(min(map(problem.add_cost, timely)))
