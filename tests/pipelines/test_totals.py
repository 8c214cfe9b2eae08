"""A pipeline's plan adds up, step by step and edge by edge, and a search that stops early brackets the optimum."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import NoOfferError
from broker.optimizer.egress import EgressTable, price_transfer
from broker.pipelines import elimination, label_setting
from broker.pipelines.local_search import TimelyMoves
from broker.pipelines.ordering import name_tasks
from broker.pipelines.planner import plan_pipeline
from broker.pipelines.problem import make_problem
from broker.types import Estimate, Objective, PipelinePlan, Task
from tests.pipelines.test_branch_and_bound import draw_sums
from tests.pipelines.test_planner import (
    Case,
    case,
    draw_case,
    draw_tree,
    estimate,
    list_outcomes,
    near,
    price_choice,
    try_everything,
)
from tests.tiers import examples, spread

WORKS = (0.0, 1e3, 1e4, 1e8)


def plan(case: Case, **options: object) -> PipelinePlan:
    return plan_pipeline(case.tasks, case.plans, case.egress, **options)  # type: ignore[arg-type]


def measure_hours(case: Case, chosen: Mapping[str, Estimate]) -> float:
    """Return the end of the last task, from first principles; `draw_case` writes dependencies first."""
    table, ends = EgressTable.from_prices(case.egress), dict[str, float]()
    for task in case.tasks:
        name = task.name or ""
        offers = {each: chosen[each].placement.offer for each in (name, *task.needs)}
        moves = {each: price_transfer(offers[each], offers[name], gib, table).hours for each, gib in task.needs.items()}
        hours = chosen[name].expected_hours
        ends[name] = max((ends[each] + moves[each] for each in moves), default=0.0) + (1.0 if hours is None else hours)
    return max(ends.values())


@pytest.mark.parametrize("objective", ["cost", "time"])
@pytest.mark.parametrize("has_deadline", [False, True], ids=["no deadline", "deadline"])
def test_steps_and_transfers_add_up_to_the_plan(objective: Objective, has_deadline: bool) -> None:
    for seed in range(60):
        each = draw_case(seed, tasks_max=6)
        if seed % 2:  # what a task would choose alone need not be its cheapest: it may be the faster of two
            turned = [replace(own, estimates=(*own.estimates[1:], own.estimates[0])) for own in each.plans]
            each = replace(each, plans=tuple(turned))
        deadline = 1.1 * plan(each, objective="time").hours if has_deadline else None
        found = plan(each, objective=objective, deadline_hours=deadline)
        chosen = {step.name: step.estimate for step in found.steps}
        table = EgressTable.from_prices(each.egress)
        assert (found.objective, found.deadline_hours) == (objective, deadline)
        assert [step.name for step in found.steps] == [task.name for task in each.tasks]
        assert {(edge.source, edge.target, edge.gib) for edge in found.edges} == {
            (name, task.name, gib) for task in each.tasks for name, gib in task.needs.items()
        }
        for edge in found.edges:
            ends = (chosen[name].placement.offer for name in (edge.source, edge.target))
            assert edge.transfer == price_transfer(*ends, edge.gib, table), f"draw_case({seed})"
        for step, task_plan in zip(found.steps, each.plans, strict=True):
            assert any(step.estimate is option for option in task_plan.estimates)
            assert (step.usd, step.hours) == (step.estimate.expected_usd, step.estimate.expected_hours)
        assert found.usd == near(sum(step.usd for step in found.steps) + found.egress_usd)
        assert found.hours == near(measure_hours(each, chosen))
        greedy = {task.name or "": own.choice for task, own in zip(each.tasks, each.plans, strict=True)}
        assert found.greedy_usd == near(price_choice(each, greedy))
        assert found.greedy_hours == near(measure_hours(each, greedy))


def test_a_transfer_is_charged_by_the_cloud_that_the_data_leaves() -> None:
    """Prices differ by direction: a plan that confused the ends of an edge would pay more than it says."""
    options = {"a": [estimate("gcp/a", 1.0)], "b": [estimate("aws/a", 1.0)]}
    found = plan(case({"a": {}, "b": {"a": 10.0}}, options))
    ((source, target),) = [(edge.source, edge.target) for edge in found.edges]
    assert (source, target) == ("a", "b") and found.egress_usd == near(10 * 2**30 / 1e9 * 0.12)


def test_a_task_alone_in_a_pipeline_weighs_money_against_time_as_its_plan_does() -> None:
    slow, fast = estimate("aws/a", 10.0, 10.0), estimate("gcp/a", 12.0, 2.0)
    own = case({"a": {}}, {"a": [slow, fast]})
    for value, chosen in ((None, slow), (0.2, slow), (0.3, fast)):
        each = replace(own, plans=tuple(replace(plan, hour_value_usd=value) for plan in own.plans))
        found = plan(each)
        assert found.steps[0].estimate is chosen
        assert (found.usd, found.time_usd) == (
            chosen.expected_usd,
            near((value or 0.0) * (chosen.expected_hours or 0.0)),
        )
        assert found.lower_bound == near(found.usd + found.time_usd)
        sooner = plan(each, objective="time")
        assert sooner.steps[0].estimate is fast and sooner.time_usd == 0.0


def test_no_choice_is_better_once_the_hours_of_each_task_have_a_value() -> None:
    changed = 0
    for seed in range(60):
        each = draw_case(seed, tasks_max=4, options_max=3)
        draw = random.Random(seed)
        values = [draw.choice((None, 0.0, draw.uniform(0, 20))) for _ in each.plans]
        plans = [replace(own, hour_value_usd=value) for own, value in zip(each.plans, values, strict=True)]
        valued = replace(each, plans=tuple(plans))
        names = [task.name or "" for task in each.tasks]
        outcomes = list[tuple[float, float]]()  # USD and value of the time, and hours from first to last
        for picked in itertools.product(*(own.estimates for own in plans)):
            time_usd = sum(
                (value or 0.0) * (one.expected_hours or 0.0) for value, one in zip(values, picked, strict=True)
            )
            chosen = dict(zip(names, picked, strict=True))
            outcomes.append((price_choice(each, chosen) + time_usd, measure_hours(each, chosen)))
        soonest, best = min(hours for _, hours in outcomes), min(outcomes)
        for deadline in (None, soonest + 0.3 * (best[1] - soonest) + 1e-6):
            found = plan(valued, deadline_hours=deadline)
            least = min(cost for cost, hours in outcomes if deadline is None or hours <= deadline)
            assert found.is_optimal and found.usd + found.time_usd == near(least), f"draw_case({seed})"
            assert found.lower_bound == near(least)
        changed += plan(valued).usd > plan(each).usd + 1e-6
    assert changed >= 5, "time is worth money in some of them"


@pytest.mark.parametrize("block", spread(range(3), every=3))
def test_a_search_that_stops_early_brackets_the_cheapest_in_time(block: int) -> None:
    unproven = 0
    for seed in range(block * 12, block * 12 + 12):
        each = draw_dense(seed)
        outcomes = list_outcomes(each)
        soonest = min(hours for _, hours in outcomes)
        cheapest = min(outcomes)[1]
        deadline = soonest * (1 + 1e-9) + 0.4 * (cheapest - soonest)
        optimum = min(usd for usd, hours in outcomes if hours <= deadline)
        for work_max in WORKS:
            try:
                found = plan(each, deadline_hours=deadline, work_max=work_max)
            except NoOfferError as error:
                assert "the fastest found takes" in error.message, "a search that was cut short proves nothing"
                continue
            assert found.hours <= deadline * (1 + 1e-9)
            assert found.lower_bound - 1e-9 <= optimum <= found.usd + 1e-9, f"draw_dense({seed}), {work_max}"
            assert not found.is_optimal or found.usd == near(optimum)
            unproven += not found.is_optimal
            sooner = plan(each, objective="time", work_max=work_max)
            assert sooner.lower_bound - 1e-9 <= soonest <= sooner.hours + 1e-9
            assert not sooner.is_optimal or sooner.hours == near(soonest)
        assert found.is_optimal and sooner.is_optimal, "the last limit is ample"
    assert unproven > 0


def draw_dense(seed: int) -> Case:
    """Link most tasks with most others, each with a cheap slow option and an expensive fast one."""
    draw = random.Random(seed)
    names = [f"t{i}" for i in range(5)]
    needs = {
        name: {other: draw.uniform(0, 300) for other in names[:i] if draw.random() < 0.8}
        for i, name in enumerate(names)
    }
    options = {
        name: [
            estimate(draw.choice(("aws/a", "aws/b", "gcp/a")), draw.uniform(2, 4) / hours, hours, f"x{k}")
            for k, hours in enumerate(draw.uniform(0.3, 3) for _ in range(3))
        ]
        for name in names
    }
    return case(needs, options)


@pytest.mark.parametrize("work_max", [0.0, 500.0, 5e3])
def test_labels_beyond_the_limit_leave_a_tree_to_the_search(work_max: float) -> None:
    """The labels of a tree are counted, too; then the search takes over with its own limit."""
    for seed in range(8):
        each = draw_tree(seed, 6, 4)
        best = plan(each, objective="time")
        deadline = (best.hours + plan(each).hours) / 2
        exact = plan(each, deadline_hours=deadline)
        try:
            cut = plan(each, deadline_hours=deadline, work_max=work_max)
        except NoOfferError:
            continue  # the soonest plan was not found in time
        assert exact.is_optimal and cut.lower_bound - 1e-9 <= exact.usd <= cut.usd + 1e-9
        assert cut.hours <= deadline * (1 + 1e-9)


def test_a_forest_is_solved_tree_by_tree() -> None:
    """Two chains that never meet: each is as cheap as its own deadline allows."""
    options = {
        name: [estimate("aws/a", 2.0, 4.0), estimate("aws/a", 5.0, 2.0, "fast"), estimate("gcp/a", 9.0, 1.0, "faster")]
        for name in "abcd"
    }
    each = case({"a": {}, "b": {"a": 1.0}, "c": {}, "d": {"c": 400.0}}, options)
    outcomes = list_outcomes(each)
    for deadline in (2.5, 4.1, 5.0, 6.2, 8.5):
        found = plan(each, deadline_hours=deadline)
        assert found.is_optimal and found.usd == near(min(usd for usd, hours in outcomes if hours <= deadline))


@pytest.mark.parametrize("pair_work_max", [0, 30])
def test_a_task_too_large_to_eliminate_is_left_to_the_search(
    pair_work_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elimination, "PAIR_WORK_MAX", pair_work_max)
    for seed in range(120):
        each = draw_case(seed)
        found = plan(each)
        assert found.is_optimal and found.usd == near(try_everything(each)), f"draw_case({seed})"


def test_options_that_never_finish_are_skipped_even_if_a_task_alone_would_choose_one() -> None:
    """Spot that is preempted more often than it saves is expected to take forever."""
    never = estimate("aws/a", math.inf, math.inf, "spot")
    each = case({"a": {}, "b": {"a": 50.0}}, {"a": [estimate("gcp/a", 3.0, 2.0)], "b": [estimate("aws/b", 2.0, 2.0)]})
    first = replace(each.plans[1], estimates=(never, *each.plans[1].estimates))
    each = replace(each, plans=(each.plans[0], first))
    for options in ({}, {"objective": "time"}, {"deadline_hours": 9.0}):
        found = plan(each, **options)
        assert [step.hours for step in found.steps] == [2.0, 2.0] and found.is_optimal
        assert math.isfinite(found.greedy_usd) and math.isfinite(found.greedy_hours)


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "a-2", "a-2-2", "task-1", "task-2", "b"]), st.booleans()), max_size=8)
)
def test_every_task_has_its_own_name_and_unique_ones_stay(rows: Sequence[tuple[str, bool]]) -> None:
    own = [name or None for name, _ in rows]
    names = name_tasks([Task(name=name) for name in own])
    assert len(set(names)) == len(names) == len(own)
    written = [name or f"task-{place}" for place, name in enumerate(own, start=1)]
    for place, (name, given_name) in enumerate(zip(names, written, strict=True)):
        assert name == given_name or (given_name in written[:place] and name.startswith(f"{given_name}-"))


def test_a_repeated_name_does_not_take_the_name_that_another_task_was_given() -> None:
    assert name_tasks([Task(name=name) for name in ("a", "a", "a-2")]) == ("a", "a-2-2", "a-2")


def test_label_setting_refuses_a_graph_whose_paths_meet_twice() -> None:
    for count in range(1, 5):
        pairs = list(itertools.combinations(range(count), 2))
        for chosen in itertools.chain.from_iterable(
            itertools.combinations(pairs, size) for size in range(len(pairs) + 1)
        ):
            groups = [{v} for v in range(count)]
            for u, v in chosen:
                one, other = (next(group for group in groups if w in group) for w in (u, v))
                if one is not other:
                    groups = [group for group in groups if group not in (one, other)] + [one | other]
            # a forest of n tasks in k trees has n - k edges
            assert label_setting.is_forest(count, chosen) == (len(chosen) == count - len(groups))


@given(st.integers(0, 10**6))
@settings(max_examples=examples(60))
def test_no_move_of_one_task_lowers_an_improved_total(seed: int) -> None:
    """A search that is cut short returns its start, improved: it must be a local optimum and no worse."""
    sums = draw_sums(seed)
    start = [seed % 3] * 6
    choice, value = sums.improve(start, sums.add_up(start))
    assert start == [seed % 3] * 6 and value == near(sums.add_up(choice)) and value <= sums.add_up(start) + 1e-12
    for v, i in itertools.product(range(6), range(3)):
        assert sums.add_up([*choice[:v], i, *choice[v + 1 :]]) >= value - 1e-9


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_local_moves_keep_the_deadline_and_restore_it(share: float) -> None:
    repaired = 0
    for seed in range(25):
        each = draw_dense(seed)
        names = [task.name for task in each.tasks]
        edges = [(names.index(name), v, gib) for v, task in enumerate(each.tasks) for name, gib in task.needs.items()]
        egress = EgressTable.from_prices(each.egress)
        problem = make_problem([f"t{v}" for v in range(5)], each.plans, edges, egress, needs_time=True)
        everything = list(itertools.product(*(range(len(states)) for states in problem.states)))
        hours = [problem.measure_hours(choice) for choice in everything]
        limit = min(hours) * (1 + 1e-9) + share * (max(hours) - min(hours))
        moves = TimelyMoves(problem, limit)
        late = [choice for choice, taken in zip(everything, hours, strict=True) if taken > limit]
        for choice in late[:3]:
            assert moves.evaluate(choice) == math.inf and moves.improve(list(choice), math.inf) == (
                list(choice),
                math.inf,
            )
            found = moves.repair(choice)
            repaired += found is not None
            assert found is None or problem.measure_hours(found) <= limit
        timely = [choice for choice, taken in zip(everything, hours, strict=True) if taken <= limit]
        for choice in (timely[0], timely[-1]):
            assert moves.repair(choice) == list(choice)
            better, usd = moves.improve(list(choice), moves.evaluate(choice))
            assert problem.measure_hours(better) <= limit and usd == near(problem.add_usd(better))
            assert usd <= problem.add_usd(choice) + 1e-12
            for v, i in itertools.product(range(5), range(3)):
                other = [*better[:v], i, *better[v + 1 :]]
                if i < len(problem.states[v]) and problem.measure_hours(other) <= limit:
                    assert problem.add_usd(other) >= usd - 1e-9
    assert share == 1.0 or repaired > 10


def test_an_estimate_without_hours_or_without_a_total_counts_as_one_hour() -> None:
    whole = estimate("aws/a", 6.0, 3.0)
    for part in (replace(whole, expected_usd=None), replace(whole, expected_hours=None)):
        each = case({"a": {}}, {"a": [part]})
        found = plan(each)
        assert (found.usd, found.hours) == (2.0, 1.0)


points = st.integers(0, 4).map(float)


@given(st.lists(st.tuples(points, points, points), max_size=25), st.booleans())
def test_labels_are_kept_exactly_if_no_other_is_as_good_in_everything(
    figures: list[tuple[float, float, float]], is_flat: bool
) -> None:
    """Money, hours before and hours after; at a leaf there is nothing after."""
    labels = [(usd, head, 0.0 if is_flat else tail, usd, (0, 0, None, None)) for usd, head, tail in figures]
    kept = [label[:3] for label in label_setting._keep_unbeaten(list(labels))]
    best = {each[:3] for each in labels}
    front = {one for one in best if not any(o != one and all(map(operator.le, o, one)) for o in best)}
    assert sorted(kept) == sorted(front)
