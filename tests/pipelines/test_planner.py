"""Small pipelines checked by hand, larger ones by exhaustive search."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import NoOfferError, UsageError
from broker.optimizer.egress import ASSUMED_USD_PER_GB, GB_PER_GIB, EgressTable, price_transfer
from broker.pipelines.label_setting import is_forest
from broker.pipelines.planner import order_tasks, plan_pipeline
from broker.types import EgressPrice, Estimate, Offer, PipelinePlan, Placement, Plan, Task
from tests.tiers import examples, spread

INTERNET, OTHER, SAME = "internet", "same_cloud_other_region", "same_region"


def price(cloud: str, target: str, usd_per_gb: float, region: str = "*") -> EgressPrice:
    return EgressPrice(cloud=cloud, from_region=region, target=target, usd_per_gb=usd_per_gb)


PRICES = (
    price("aws", INTERNET, 0.09), price("aws", OTHER, 0.02), price("aws", SAME, 0.01),
    price("aws", INTERNET, 0.15, "far"), price("gcp", INTERNET, 0.12), price("gcp", OTHER, 0.05),
)  # fmt: skip


def estimate(place: str, usd: float, hours: float | None = 1.0, instance_type: str = "x") -> Estimate:
    """`place` is "cloud/region". Hours None: no work is given, and `usd` is the price per hour."""
    cloud, region = place.split("/")
    offer = Offer(
        cloud=cloud, region=region, zone=None, instance_type=instance_type, vcpus=8, memory_gib=32,
        ondemand_usd_hour=usd / (hours or 1.0),
    )  # fmt: skip
    placement = Placement(offer=offer, is_spot=False, node_count=1)
    return Estimate(placement=placement, expected_hours=hours, expected_usd=None if hours is None else usd)


def make_plan(task: Task, estimates: Sequence[Estimate]) -> Plan:
    ranked = tuple(sorted(estimates, key=lambda each: each.placement.usd_hour * (each.expected_hours or 1)))
    return Plan(task=task, estimates=ranked, rejections=(), prices_as_of="2026-01-01", reason="")


@dataclass(frozen=True, kw_only=True)
class Case:
    tasks: tuple[Task, ...]
    plans: tuple[Plan, ...]
    egress: tuple[EgressPrice, ...]

    def solve(self) -> PipelinePlan:
        return plan_pipeline(self.tasks, self.plans, self.egress)


def case(needs: Mapping[str, Mapping[str, float]], options: Mapping[str, Sequence[Estimate]]) -> Case:
    tasks = tuple(Task(name=name, needs=each) for name, each in needs.items())
    plans = tuple(make_plan(task, options[task.name or ""]) for task in tasks)
    return Case(tasks=tasks, plans=plans, egress=PRICES)


PLACES = ("aws/a", "aws/b", "aws/far", "gcp/a", "gcp/b", "vast/a")


def draw_case(seed: int, *, tasks_max: int = 6, options_max: int = 4) -> Case:
    """Draw a random pipeline, dense or sparse, with free, cheap and expensive data, from one seed."""
    draw = random.Random(seed)
    count = draw.randint(1, tasks_max)
    density, scale = draw.random(), draw.choice((0.0, 1.0, 20.0, 100.0, 1000.0))
    names = [f"t{i}" for i in range(count)]
    tasks = list[Task]()
    for i, name in enumerate(names):
        needs = {other: draw.choice((0.0, draw.uniform(0, scale))) for other in names[:i] if draw.random() < density}
        tasks.append(Task(name=name, needs=needs))
    plans = list[Plan]()
    for task in tasks:
        usd, hours = draw.uniform(0.1, 20), draw.uniform(0.1, 5)
        options = [
            estimate(draw.choice(PLACES), usd * draw.uniform(1, 3), hours * draw.uniform(0.5, 2), f"x{k}")
            for k in range(draw.randint(1, options_max))
        ]
        plans.append(make_plan(task, options))
    rows = [
        price(cloud, target, draw.choice((0.0, draw.uniform(0, 0.2))), region)
        for cloud in ("aws", "gcp")
        for region in ("*", "far")
        for target in (INTERNET, OTHER, SAME)
        if draw.random() < 0.8
    ]
    return Case(tasks=tuple(tasks), plans=tuple(plans), egress=tuple(rows))


def price_choice(case: Case, chosen: Mapping[str, Estimate]) -> float:
    """Return the USD of a complete choice, from first principles."""
    table = EgressTable.from_prices(case.egress)
    total = sum(each.placement.usd_hour if each.expected_usd is None else each.expected_usd for each in chosen.values())
    for task in case.tasks:
        for name, gib in task.needs.items():
            ends = chosen[name].placement.offer, chosen[task.name or ""].placement.offer
            total += price_transfer(*ends, gib, table).usd
    return total


def try_everything(case: Case) -> float:
    """Return the minimum USD by exhaustive search; only the prices of pairs are precomputed."""
    table = EgressTable.from_prices(case.egress)
    place = {task.name: i for i, task in enumerate(case.tasks)}
    options = [[each.placement.offer for each in plan.estimates] for plan in case.plans]
    usd = [[each.placement.usd_hour * (each.expected_hours or 1) for each in plan.estimates] for plan in case.plans]
    pairs = [
        (u, v, [[price_transfer(source, target, gib, table).usd for target in options[v]] for source in options[u]])
        for v, task in enumerate(case.tasks)
        for u, gib in ((place[name], gib) for name, gib in task.needs.items())
    ]
    return min(
        sum(map(list.__getitem__, usd, picked)) + sum(rows[picked[u]][picked[v]] for u, v, rows in pairs)
        for picked in itertools.product(*(range(len(each)) for each in options))
    )


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("block", spread(range(8), every=3))
def test_no_possible_choice_is_cheaper(block: int) -> None:
    for seed in range(block * 400, block * 400 + 400):
        each = draw_case(seed)
        solved = each.solve()
        assert solved.is_optimal
        assert solved.lower_bound == solved.usd
        assert solved.usd == near(try_everything(each)), f"draw_case({seed})"
        assert solved.usd == near(price_choice(each, {step.name: step.estimate for step in solved.steps}))
        assert solved.usd <= solved.greedy_usd + 1e-9, f"draw_case({seed})"


def test_the_search_finds_the_same_as_brute_force() -> None:
    """Every task is linked with every other: nothing can be eliminated beyond the last three."""
    for seed in range(40):
        draw = random.Random(seed)
        names = [f"t{i}" for i in range(6)]
        needs = {name: {other: draw.uniform(5, 60) for other in names[:i]} for i, name in enumerate(names)}
        options = {name: [estimate(place, draw.uniform(1, 20)) for place in PLACES[:5]] for name in names}
        each = case(needs, options)
        solved = each.solve()
        assert solved.is_optimal
        assert solved.usd == near(try_everything(each)), f"seed {seed}"


def list_outcomes(case: Case) -> list[tuple[float, float]]:
    """List (USD, hours) of all choices, one by one."""
    table = EgressTable.from_prices(case.egress)
    outcomes = list[tuple[float, float]]()
    for picked in itertools.product(*(plan.estimates for plan in case.plans)):
        chosen = {task.name or "": each for task, each in zip(case.tasks, picked, strict=True)}
        ends = dict[str, float]()
        for task in case.tasks:  # draw_case writes dependencies first
            name = task.name or ""
            starts = [
                ends[other]
                + price_transfer(chosen[other].placement.offer, chosen[name].placement.offer, gib, table).hours
                for other, gib in task.needs.items()
            ]
            ends[name] = max(starts, default=0.0) + (chosen[name].expected_hours or 1.0)
        outcomes.append((price_choice(case, chosen), max(ends.values())))
    return outcomes


@pytest.mark.parametrize("block", range(4))
def test_no_possible_choice_is_cheaper_within_the_deadline_or_faster(block: int) -> None:
    for seed in range(block * 75, block * 75 + 75):
        each = draw_case(seed, tasks_max=5)
        outcomes = list_outcomes(each)
        soonest = min(hours for _, hours in outcomes)
        greedy = each.solve()
        sooner = plan_pipeline(each.tasks, each.plans, each.egress, objective="time")
        assert sooner.is_optimal
        assert sooner.hours == near(soonest), f"draw_case({seed}, tasks_max=5)"
        in_time = [usd for usd, hours in outcomes if hours <= soonest * (1 + 1e-9)]
        assert sooner.usd == near(min(in_time)), f"draw_case({seed}, tasks_max=5)"
        for share in (0.0, 0.3, 0.7, 1.0):
            deadline = soonest * (1 + 1e-9) + share * (greedy.hours - soonest)
            planned = plan_pipeline(each.tasks, each.plans, each.egress, deadline_hours=deadline)
            in_time = [usd for usd, hours in outcomes if hours <= deadline]
            assert planned.is_optimal
            assert planned.usd == near(min(in_time)), f"draw_case({seed}, tasks_max=5) within {share}"
            assert planned.hours <= deadline * (1 + 1e-9)


def draw_tree(seed: int, count: int, options: int) -> Case:
    """Link every task with one earlier task, in either direction: paths never meet twice."""
    draw = random.Random(seed)
    needs: dict[str, dict[str, float]] = {f"t{i}": {} for i in range(count)}
    for i in range(1, count):
        first, then = draw.sample((f"t{i}", f"t{draw.randrange(max(0, i - 3), i)}"), 2)
        needs[then][first] = draw.uniform(0, 200)
    tasks = tuple(Task(name=name, needs=each) for name, each in needs.items())
    plans = tuple(
        make_plan(
            task,
            [
                estimate(draw.choice(PLACES), 3 / hours * draw.uniform(0.8, 1.3), hours, f"x{k}")
                for k, hours in enumerate(draw.uniform(0.5, 3) for _ in range(options))
            ],
        )
        for task in tasks
    )
    return Case(tasks=tasks, plans=plans, egress=PRICES)


@pytest.mark.parametrize("seed", range(12))
def test_trees_are_solved_alike_by_labels_and_by_search(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    each = draw_tree(seed, 9, 4)
    soonest = plan_pipeline(each.tasks, each.plans, each.egress, objective="time")
    deadline = (soonest.hours + each.solve().hours) / 2
    calls = list[int]()

    def count(size: int, edges: Sequence[tuple[int, int]]) -> bool:
        calls.append(size)
        return is_forest(size, edges)

    monkeypatch.setattr("broker.pipelines.deadline.is_forest", count)
    labels = plan_pipeline(each.tasks, each.plans, each.egress, deadline_hours=deadline)
    monkeypatch.setattr("broker.pipelines.deadline.is_forest", lambda size, edges: False)
    search = plan_pipeline(each.tasks, each.plans, each.egress, deadline_hours=deadline)
    assert labels.is_optimal
    assert search.is_optimal
    assert labels.usd == near(search.usd)
    assert max(labels.hours, search.hours) <= deadline * (1 + 1e-9)
    assert is_forest(9, [(0, 1), (2, 1), (1, 3)])
    assert not is_forest(3, [(0, 1), (1, 2), (0, 2)])


@pytest.mark.parametrize("seed", range(6))
def test_a_long_chain_meets_its_deadline_at_the_least_cost(seed: int) -> None:
    """Compared with the plain dynamic program over all (USD, hours) pairs, without pruning."""
    draw = random.Random(seed)
    names = [f"t{i}" for i in range(12)]
    gib = {name: draw.uniform(0, 100) for name in names}
    needs = {name: {names[i - 1]: gib[name]} if i else {} for i, name in enumerate(names)}
    options = {
        name: [
            estimate(draw.choice(PLACES[:3]), 3 / hours * draw.uniform(0.8, 1.3), hours, f"x{k}")
            for k, hours in enumerate(draw.uniform(0.5, 3) for _ in range(5))
        ]
        for name in names
    }
    each = case(needs, options)
    table = EgressTable.from_prices(each.egress)
    front: dict[int, list[tuple[float, float]]] = {}
    for i, name in enumerate(names):
        following = dict[int, list[tuple[float, float]]]()
        for k, option in enumerate(options[name]):
            own = option.expected_usd or 0.0, option.expected_hours or 0.0
            pairs = [own] if i == 0 else []
            for j, earlier in front.items():
                source = options[names[i - 1]][j].placement.offer
                move = price_transfer(source, option.placement.offer, gib[name], table)
                pairs += [(usd + move.usd + own[0], hours + move.hours + own[1]) for usd, hours in earlier]
            following[k] = list[tuple[float, float]]()
            for pair in sorted(pairs):
                if not following[k] or pair[1] < following[k][-1][1]:
                    following[k].append(pair)
        front = following
    outcomes = [pair for pairs in front.values() for pair in pairs]
    soonest, cheapest = min(hours for _, hours in outcomes), min(outcomes)[1]
    for share in (0.05, 0.3, 0.6):
        deadline = soonest + share * (cheapest - soonest)
        planned = plan_pipeline(each.tasks, each.plans, each.egress, deadline_hours=deadline)
        assert planned.is_optimal
        assert planned.usd == near(min(usd for usd, hours in outcomes if hours <= deadline))


def test_an_infeasible_deadline_reports_the_fastest_plan() -> None:
    each = case({"a": {}, "b": {"a": 1.0}}, {"a": [estimate("aws/a", 1.0, 5.0)], "b": [estimate("aws/a", 1.0, 7.0)]})
    with pytest.raises(NoOfferError, match=r"deadline of 10 h: the fastest takes 12\.0 h"):
        plan_pipeline(each.tasks, each.plans, each.egress, deadline_hours=10.0)


def test_a_deadline_pays_for_speed_only_where_it_is_needed() -> None:
    """Two parallel tasks: the shorter one may be slow."""
    options = {
        "long": [estimate("aws/a", 10.0, 10.0), estimate("aws/a", 30.0, 5.0, "fast")],
        "short": [estimate("aws/a", 4.0, 4.0), estimate("aws/a", 9.0, 2.0, "fast")],
        "join": [estimate("aws/a", 1.0, 1.0)],
    }
    each = case({"long": {}, "short": {}, "join": {"long": 0.0, "short": 0.0}}, options)
    planned = plan_pipeline(each.tasks, each.plans, each.egress, deadline_hours=6.0)
    assert [step.estimate.placement.offer.instance_type for step in planned.steps] == ["fast", "x", "x"]
    assert (planned.usd, planned.hours, planned.is_optimal) == (35.0, 6.0, True)


@given(st.integers(0, 10**9), st.randoms(use_true_random=False))
@settings(max_examples=examples(150), deadline=None)
def test_names_and_order_of_writing_change_nothing(seed: int, draw: random.Random) -> None:
    before = draw_case(seed, tasks_max=8)
    letters = draw.sample("abcdefgh", len(before.tasks))
    names = dict(zip((task.name for task in before.tasks), letters, strict=True))
    pairs = [
        (replace(task, name=names[task.name], needs={names[name]: gib for name, gib in task.needs.items()}), plan)
        for task, plan in zip(before.tasks, before.plans, strict=True)
    ]
    draw.shuffle(pairs)
    after = plan_pipeline([task for task, _ in pairs], [plan for _, plan in pairs], before.egress)
    assert after.usd == near(before.solve().usd)


@given(st.integers(0, 10**9), st.floats(0, 0.5), st.sampled_from((INTERNET, OTHER, SAME)))
@settings(max_examples=examples(150), deadline=None)
def test_more_expensive_egress_never_lowers_the_total(seed: int, more: float, target: str) -> None:
    cheap = draw_case(seed, tasks_max=8)
    dear = replace(
        cheap,
        egress=tuple(
            replace(each, usd_per_gb=each.usd_per_gb + (more if each.target == target else 0.0))
            for each in cheap.egress
        ),
    )
    assert dear.solve().usd >= cheap.solve().usd - 1e-9


@given(st.integers(0, 10**9))
@settings(max_examples=examples(100), deadline=None)
def test_free_egress_leaves_every_task_its_own_choice(seed: int) -> None:
    each = draw_case(seed, tasks_max=8)
    free = replace(
        each,
        egress=tuple(price(cloud, target, 0.0) for cloud in ("aws", "gcp", "vast") for target in (INTERNET, OTHER)),
    )
    solved = free.solve()
    assert solved.usd == near(solved.greedy_usd)
    assert solved.usd == near(sum(plan.choice.expected_usd or 0.0 for plan in free.plans))


def test_heavy_data_keeps_two_tasks_together_and_light_data_does_not() -> None:
    options = {
        "prepare": [estimate("aws/a", 1.0), estimate("gcp/a", 1.5)],
        "train": [estimate("gcp/a", 10.0), estimate("aws/a", 13.0)],
    }
    heavy = case({"prepare": {}, "train": {"prepare": 500.0}}, options).solve()
    assert [step.estimate.placement.offer.cloud for step in heavy.steps] == ["gcp", "gcp"]
    assert (heavy.usd, heavy.egress_usd) == (11.5, 0.0)
    assert heavy.greedy_usd == near(11.0 + 500 * GB_PER_GIB * 0.09)
    light = case({"prepare": {}, "train": {"prepare": 1.0}}, options).solve()
    assert [step.estimate.placement.offer.cloud for step in light.steps] == ["aws", "gcp"]
    assert light.usd == light.greedy_usd == near(11.0 + GB_PER_GIB * 0.09)


def test_a_task_with_an_order_of_preference_keeps_it() -> None:
    options = {"a": [estimate("aws/a", 1.0)], "b": [estimate("gcp/a", 2.0), estimate("aws/a", 2.5)]}
    free = case({"a": {}, "b": {"a": 900.0}}, options)
    ordered = replace(free, plans=(free.plans[0], replace(free.plans[1], task=replace(free.tasks[1], is_ordered=True))))
    assert free.solve().steps[1].estimate.placement.offer.cloud == "aws"
    assert ordered.solve().steps[1].estimate.placement.offer.cloud == "gcp"


def test_a_task_without_work_counts_as_one_hour_and_is_marked() -> None:
    solved = case(
        {"a": {}, "b": {"a": 0.0}}, {"a": [estimate("aws/a", 4.0, None)], "b": [estimate("aws/a", 6.0, 3.0)]}
    ).solve()
    assert [step.is_assumed for step in solved.steps] == [True, False]
    assert (solved.usd, solved.hours) == (10.0, 4.0)


def test_a_task_that_never_finishes_anywhere_is_named() -> None:
    stuck = case({"a": {}}, {"a": [estimate("aws/a", math.inf, math.inf)]})
    with pytest.raises(NoOfferError, match="`a`"):
        stuck.solve()


def test_a_search_that_stops_early_reports_its_gap() -> None:
    """Without any steps, the greedy choice improved by local moves is returned with a valid bound."""
    draw = random.Random(5)
    names = [f"t{i}" for i in range(7)]
    needs = {name: {other: draw.uniform(5, 60) for other in names[:i]} for i, name in enumerate(names)}
    options = {name: [estimate(place, draw.uniform(1, 20)) for place in PLACES] for name in names}
    each = case(needs, options)
    cut = plan_pipeline(each.tasks, each.plans, each.egress, work_max=0)
    best = each.solve()
    assert not cut.is_optimal
    assert cut.lower_bound <= best.usd <= cut.usd <= cut.greedy_usd
    assert best.is_optimal


class TestTransfer:
    table = EgressTable.from_prices(PRICES)

    def move(self, source: str, target: str, gib: float = 10.0) -> tuple[float, bool]:
        ends = (estimate(place, 1.0).placement.offer for place in (source, target))
        transfer = price_transfer(*ends, gib, self.table)
        return transfer.usd / gib / GB_PER_GIB, transfer.is_assumed

    def test_transfer_price_depends_on_distance_and_source(self) -> None:
        assert self.move("aws/a", "aws/a") == (near(0.01), False)
        assert self.move("aws/a", "aws/b") == (near(0.02), False)
        assert self.move("aws/a", "gcp/a") == (near(0.09), False)
        assert self.move("gcp/a", "aws/a") == (near(0.12), False)

    def test_a_price_of_the_region_overrides_the_clouds_default(self) -> None:
        assert self.move("aws/far", "gcp/a") == (near(0.15), False)
        assert self.move("aws/far", "aws/a") == (near(0.02), False)

    def test_an_unknown_cloud_has_a_high_egress_price_and_is_flagged(self) -> None:
        assert self.move("vast/a", "aws/a") == (near(ASSUMED_USD_PER_GB), True)
        assert self.move("vast/a", "vast/b") == (near(ASSUMED_USD_PER_GB), True)
        assert self.move("vast/a", "vast/a") == (0.0, False)

    def test_time_grows_with_size_and_is_longer_out_of_the_region(self) -> None:
        ends = [estimate(place, 1.0).placement.offer for place in ("aws/a", "aws/a", "gcp/a")]
        near_by = price_transfer(ends[0], ends[1], 100.0, self.table).hours
        far = price_transfer(ends[0], ends[2], 100.0, self.table).hours
        assert far == near(100 * 2**30 * 8 / 5e9 / 3600)
        assert near_by == near(far / 2)


class TestOrder:
    def order(self, **needs: Sequence[str]) -> tuple[str, ...]:
        return order_tasks([Task(name=name, needs=dict.fromkeys(each, 1.0)) for name, each in needs.items()])

    def test_needs_come_first_and_otherwise_the_written_order_is_kept(self) -> None:
        assert self.order(c=(), b=(), a=()) == ("c", "b", "a")
        assert self.order(train=["data"], report=["train"], data=(), notes=()) == ("data", "train", "report", "notes")

    @given(st.integers(0, 10**9), st.randoms(use_true_random=False))
    @settings(max_examples=examples(100), deadline=None)
    def test_every_task_follows_its_dependencies(self, seed: int, draw: random.Random) -> None:
        tasks = list(draw_case(seed, tasks_max=12).tasks)
        draw.shuffle(tasks)
        order = order_tasks(tasks)
        assert sorted(order) == sorted(task.name or "" for task in tasks)
        for task in tasks:
            assert all(order.index(name) < order.index(task.name or "") for name in task.needs)

    def test_unnamed_tasks_are_named_by_their_position(self) -> None:
        assert order_tasks([Task(), Task(name="b", needs={"task-1": 1.0}), Task()]) == ("task-1", "b", "task-3")

    def test_a_duplicate_name_is_ambiguous_only_in_needs(self) -> None:
        assert order_tasks([Task(name="a"), Task(name="a")]) == ("a", "a-2")
        with pytest.raises(UsageError, match="2 tasks are named"):
            order_tasks([Task(name="a"), Task(name="a"), Task(name="b", needs={"a": 1.0})])

    def test_cycles_and_missing_names_are_reported(self) -> None:
        with pytest.raises(UsageError, match=r"cycle: (`\w`( -> )?){3}$"):
            self.order(x=(), a=["x", "b"], b=["a"])
        with pytest.raises(UsageError, match="unknown task `dta`") as caught:
            self.order(data=(), train=["dta"])
        assert "`data`" in caught.value.hints[0]
