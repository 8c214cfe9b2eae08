"""Nodes may run alone for as long as the user allows, and for no more money and time than the job has left."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.config import Config
from broker.errors import TaskError, UsageError
from broker.jobs.allowance import (
    LATE_S,
    UNATTENDED_S,
    apply_unattended_default,
    describe_allowances,
    measure_allowance_s,
    read_unattended_s,
    show_hours,
)
from broker.jobs.job_limits import JobLimits
from broker.jobs.monitor import LEASE_EVERY_S
from broker.task.loader import load_tasks_text
from broker.task.measures import UNATTENDED_S_MIN
from broker.types import Estimate, Goal, Placement, Plan, Task
from tests.simulation.world import World, make_offer, make_plan

HOUR = 3600.0


@pytest.mark.parametrize(
    ("task", "spent_usd", "now_s", "expected_s"),
    [
        (Task(), 0.0, 0.0, 12 * HOUR),
        (Task(unattended_s=HOUR), 1e9, 1e9, HOUR),
        (Task(goal=Goal(work_hours=9.0)), 5.0, 0.0, 12 * HOUR),
        (Task(goal=Goal(budget_usd=100.0)), 5.0, 0.0, 12 * HOUR),
        (Task(goal=Goal(budget_usd=10.0)), 4.0, 0.0, 3 * HOUR + LEASE_EVERY_S / 2),
        (Task(goal=Goal(budget_usd=10.0)), 11.0, 0.0, LEASE_EVERY_S / 2),
        (Task(goal=Goal(deadline_hours=8.0)), 0.0, 2 * HOUR, 6 * HOUR),
        (Task(goal=Goal(deadline_hours=48.0)), 0.0, 2 * HOUR, 12 * HOUR),
        (Task(goal=Goal(deadline_hours=8.0)), 0.0, 7.9 * HOUR, LATE_S),
        (Task(goal=Goal(deadline_hours=8.0)), 0.0, 20 * HOUR, LATE_S),
        (Task(goal=Goal(deadline_hours=8.0), unattended_s=900.0), 0.0, 20 * HOUR, 900.0),
    ],
)
def test_allowance_is_bounded_by_user_budget_and_deadline(
    task: Task, spent_usd: float, now_s: float, expected_s: float
) -> None:
    found_s = measure_allowance_s(task, usd_hour=2.0, spent_usd=spent_usd, submitted_s=0.0, now_s=now_s)
    assert found_s == pytest.approx(expected_s)


def test_machines_that_cost_nothing_are_not_bounded_by_a_budget() -> None:
    assert measure_allowance_s(Task(goal=Goal(budget_usd=1.0)), usd_hour=0.0) == UNATTENDED_S


tasks = st.builds(
    lambda unattended_s, budget_usd, deadline_hours: Task(
        unattended_s=unattended_s, goal=Goal(budget_usd=budget_usd, deadline_hours=deadline_hours)
    ),
    st.none() | st.floats(UNATTENDED_S_MIN, 1e6),
    st.none() | st.floats(0.001, 1e5),
    st.none() | st.floats(0.01, 1e3),
)


@given(tasks, st.floats(0.0, 1e4), st.floats(0.0, 1e5), st.floats(0.0, 1e7))
def test_no_lease_is_longer_than_allowed_nor_so_short_that_a_renewal_comes_late(
    task: Task, usd_hour: float, spent_usd: float, now_s: float
) -> None:
    lease_s = measure_allowance_s(task, usd_hour=usd_hour, spent_usd=spent_usd, now_s=now_s)
    assert 0 < lease_s <= (UNATTENDED_S if task.unattended_s is None else task.unattended_s)
    budget_usd = task.goal.budget_usd if task.goal else None
    left_s = math.inf if budget_usd is None or not usd_hour else max(0.0, budget_usd - spent_usd) / usd_hour * 3600
    assert lease_s > min(left_s, 10 * LEASE_EVERY_S), "it lasts until the money is used up, or leaves time for renewals"


@given(
    st.floats(0.01, 100.0),
    st.floats(0.01, 500.0),
    st.lists(st.floats(0.0, LEASE_EVERY_S), max_size=200),
    st.integers(1, 16),
)
def test_unattended_the_bill_exceeds_the_budget_by_less_than_one_renewal(
    budget_usd: float, usd_hour: float, gaps_s: list[float], node_count: int
) -> None:
    """The bound holds however often the broker renewed before it left forever, unless the broker itself overspent."""
    task = Task(goal=Goal(budget_usd=budget_usd), num_nodes=node_count)
    now_s = ends_s = 0.0
    for gap_s in (0.0, *gaps_s):
        now_s += gap_s
        spent_usd = usd_hour * now_s / 3600
        if spent_usd >= budget_usd:
            break  # a broker that is there ends the job
        ends_s = now_s + measure_allowance_s(task, usd_hour=usd_hour, spent_usd=spent_usd, now_s=now_s)
    assert usd_hour * ends_s / 3600 <= budget_usd + usd_hour * LEASE_EVERY_S / 3600 + 1e-6


def test_lease_of_a_job_counts_what_it_has_paid_so_far(tmp_path: Path) -> None:
    world = World(tmp_path)
    cluster = world.clock.run(lambda: world.make_provisioner().up("job-1-1", make_small_plan(), job_id=world.job_id))
    job = replace(world.get_job(), task=Task(num_nodes=2, goal=Goal(budget_usd=4.0)))
    limits = JobLimits(world.store, world.clock)
    first_s = limits.find_lease_s(job, cluster)
    world.clock.run(lambda: world.clock.sleep(1800.0))
    later_s = limits.find_lease_s(job, cluster)
    assert cluster.placement.usd_hour == 2.0 and first_s <= 2 * HOUR + LEASE_EVERY_S
    assert first_s - later_s == pytest.approx(1800.0), "the end of the lease does not move while the budget bounds it"


def make_small_plan() -> Plan:

    return make_plan(Task(num_nodes=2))


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [("12h", 12 * HOUR), ("90m", 1.5 * HOUR), ("15m", 900.0), ("1d", 24 * HOUR), ("2", 2 * HOUR), ("0.25", 900.0)],
)
def test_task_overrides_the_default_allowance(text: str, expected_s: float) -> None:
    (task,) = load_tasks_text(f"run: x\nunattended: {text}\n", "task.yaml")
    assert task.unattended_s == expected_s


@pytest.mark.parametrize("text", ["0", "5m", "0.2", "14m59s", "0h", "-1", "soon", "[]"])
def test_invalid_allowance_of_a_task_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_tasks_text(f"run: x\nunattended: {text}\n", "task.yaml")
    (issue,) = caught.value.issues
    assert (issue.line, issue.column) == (2, 13) and "`unattended` must be" in issue.message


def test_users_default_applies_to_tasks_without_an_allowance(tmp_path: Path) -> None:
    config = Config(home=tmp_path, owner="me")
    assert read_unattended_s(config) == UNATTENDED_S
    (tmp_path / "config.toml").write_text('unattended = "3h"\ncheckpoints = "s3://b"\n')
    assert read_unattended_s(config) == 3 * HOUR
    own, default = apply_unattended_default([Task(unattended_s=900.0), Task()], read_unattended_s(config))
    assert (own.unattended_s, default.unattended_s) == (900.0, 3 * HOUR)
    (tmp_path / "config.toml").write_text("unattended = 2\n")
    assert read_unattended_s(config) == 2 * HOUR


@pytest.mark.parametrize("text", ['"5m"', "0", '"never"', "true", "[1]"])
def test_invalid_default_of_the_user_names_the_setting(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_text(f"unattended = {text}\n")
    with pytest.raises(UsageError, match=r"config\.toml: `unattended` is") as caught:
        read_unattended_s(Config(home=tmp_path, owner="me"))
    assert "15m" in caught.value.hints[0]


@pytest.mark.parametrize(
    ("duration_s", "expected"), [(12 * HOUR, "12 h"), (5400.0, "1.5 h"), (2700.0, "45 min"), (3629.0, "1 h")]
)
def test_durations_are_shown_in_readable_units(duration_s: float, expected: str) -> None:
    assert show_hours(duration_s) == expected


def make_paid_plan(cloud: str = "aws", **fields: Any) -> Plan:
    offer = replace(make_offer("east1a"), cloud=cloud)
    estimate = Estimate(placement=Placement(offer=offer, is_spot=True, node_count=2))
    return replace(make_plan(Task()), task=Task(**fields), estimates=(estimate,))


def test_one_sentence_is_shown_unless_tasks_differ_and_none_for_this_machine() -> None:
    told = "continues for up to 12 h without this machine; preemptions are handled when it is back"
    assert describe_allowances([make_paid_plan(), make_paid_plan(name="b")]) == [told]
    assert describe_allowances([make_paid_plan("local")]) == []
    short = make_paid_plan(name="b", goal=Goal(budget_usd=3.0))
    assert describe_allowances([make_paid_plan(name="a"), short]) == [f"a: {told}", f"b: {told.replace('12', '1.5')}"]


def test_no_allowance_is_promised_where_machines_cannot_terminate_themselves() -> None:
    (told,) = describe_allowances([make_paid_plan("hyperbolic", goal=Goal(budget_usd=3.0))])
    assert told == (
        "continues, and costs money, while this machine is unavailable, even beyond budget and deadline, because "
        "machines of hyperbolic cannot terminate themselves; preemptions are handled when it is back"
    )


def test_an_allowance_names_the_clouds_of_the_plan_where_it_would_not_hold() -> None:
    plan, other = make_paid_plan(), make_paid_plan("yotta")
    (told,) = describe_allowances([replace(plan, estimates=(*plan.estimates, *other.estimates))])
    assert told == (
        "continues for up to 12 h without this machine; as long as it is unavailable on yotta, whose machines cannot "
        "terminate themselves; preemptions are handled when it is back"
    )
