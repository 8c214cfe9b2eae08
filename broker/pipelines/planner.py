"""Plan tasks with data between them: choose the placements that make the whole pipeline cheapest or fastest.

The result is proven optimal, or states the maximum gap to the optimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from broker.errors import NoOfferError
from broker.optimizer.egress import EgressTable, price_transfer
from broker.pipelines.branch_and_bound import SearchResult
from broker.pipelines.costs import find_cheapest
from broker.pipelines.deadline import find_cheapest_in_time
from broker.pipelines.ordering import find_needs, name_tasks, order_indexes, order_tasks
from broker.pipelines.problem import Problem, make_problem
from broker.pipelines.schedule import find_soonest
from broker.types import EgressPrice, Objective, PipelineEdge, PipelinePlan, PipelineStep, Plan, Task

__all__ = ["order_tasks", "plan_pipeline"]

WORK_MAX = 1e8  # additions before the search gives up on a proof; about 10 s


def plan_pipeline(
    tasks: Sequence[Task],
    plans: Sequence[Plan],
    egress: Iterable[EgressPrice],
    *,
    objective: Objective = "cost",
    deadline_hours: float | None = None,
    work_max: float = WORK_MAX,
) -> PipelinePlan:
    """Choose one of `plans[i].estimates` for every `tasks[i]`. Pure.

    "cost" minimizes USD and the value of each task's hours, as its plan does, within `deadline_hours` from first start
    to last end if given; "time" minimizes hours, then USD among the choices that take no longer. Expected hours count,
    not worst cases. A task without work counts as one hour, which has no value. A task with an order of preference
    keeps its plan's choice.

    Raises UsageError for invalid needs, NoOfferError if a task cannot finish anywhere, or not all of them by the
    deadline.
    """
    assert len(tasks) == len(plans), "one plan per task"
    order = order_indexes(tasks)
    place = {task: i for i, task in enumerate(order)}
    all_names = name_tasks(tasks)
    names = [all_names[i] for i in order]
    needs = find_needs(tasks)
    edges = [(place[j], place[i], gib) for i in order for j, gib in sorted(needs[i].items())]
    table = EgressTable.from_prices(egress)
    problem = make_problem(
        names, [plans[i] for i in order], edges, table,
        needs_time=objective == "time" or deadline_hours is not None, values_time=objective == "cost",
    )  # fmt: skip
    solution = _solve(problem, objective, deadline_hours, work_max)
    return PipelinePlan(
        objective=objective,
        steps=tuple(_list_steps(names, problem, solution.choice)),
        edges=tuple(_list_edges(names, problem, solution.choice, table)),
        usd=problem.add_usd(solution.choice),
        hours=problem.measure_hours(solution.choice),
        lower_bound=solution.lower_bound,
        is_optimal=solution.is_optimal,
        greedy_usd=problem.add_usd(problem.greedy),
        greedy_hours=problem.measure_hours(problem.greedy),
        deadline_hours=deadline_hours,
        time_usd=problem.add_time_usd(solution.choice),
    )


def _solve(problem: Problem, objective: Objective, deadline_hours: float | None, work_max: float) -> SearchResult:
    if objective == "cost" and deadline_hours is None:
        return find_cheapest(problem, work_max=work_max)
    soonest = find_soonest(problem, work_max=work_max)
    if deadline_hours is not None and soonest.value > deadline_hours:
        fastest = f"the fastest{'' if soonest.is_optimal else ' found'} takes {soonest.value:.1f} h"
        raise NoOfferError(
            f"no combination of placements meets the deadline of {deadline_hours:g} h: {fastest}",
            hints=["extend the deadline, or allow faster machines"],
        )
    if objective == "time":
        cheapest = find_cheapest_in_time(problem, soonest.choice, soonest.value, work_max=work_max)
        is_optimal = soonest.is_optimal and cheapest.is_optimal
        return replace(cheapest, value=soonest.value, lower_bound=soonest.lower_bound, is_optimal=is_optimal)
    assert deadline_hours is not None
    cheapest = find_cheapest(problem, work_max=work_max)
    if problem.measure_hours(cheapest.choice) <= deadline_hours:
        return cheapest
    return find_cheapest_in_time(problem, soonest.choice, deadline_hours, work_max=work_max)


def _list_steps(names: Sequence[str], problem: Problem, choice: Sequence[int]) -> Iterable[PipelineStep]:
    for name, states, i in zip(names, problem.states, choice, strict=True):
        state = states[i]
        is_assumed = state.estimate.expected_hours is None
        yield PipelineStep(name=name, estimate=state.estimate, usd=state.usd, hours=state.hours, is_assumed=is_assumed)


def _list_edges(
    names: Sequence[str], problem: Problem, choice: Sequence[int], table: EgressTable
) -> Iterable[PipelineEdge]:
    for u, v, gib in problem.edges:
        source, target = (problem.states[w][choice[w]].estimate.placement.offer for w in (u, v))
        yield PipelineEdge(
            source=names[u], target=names[v], gib=gib, transfer=price_transfer(source, target, gib, table)
        )
