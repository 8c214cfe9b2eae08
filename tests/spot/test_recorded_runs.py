"""Interpolation between the nodes of the table of recorded runs."""

from __future__ import annotations

import json

import pytest

from broker.lab.recorded_runs import list_cells
from broker.spot.recorded_runs import TABLE, BoundedHours, interpolate_runs, read_scenarios


def test_a_node_of_the_table_equals_the_replayed_one() -> None:
    scenarios = read_scenarios()[::17]
    for cell, (work, deadline, start) in enumerate(list_cells()):
        runs = interpolate_runs(
            scenarios,
            work_hours=work,
            deadline_hours=None if deadline is None else work * deadline + start,
            start_hours=start,
        )
        for scenario, run in zip(scenarios, runs, strict=True):
            assert run.spot_hours == pytest.approx(scenario.spot[cell] * work / 1000, abs=1e-6)
            assert run.ondemand_hours == pytest.approx(scenario.ondemand[cell] * work / 1000, abs=1e-6)
            assert run.preemptions == pytest.approx(scenario.preemptions[cell])


@pytest.mark.parametrize("work", [0.5, 12.0, 30.0, 400.0])
@pytest.mark.parametrize("deadline", [1.02, 1.2, 2.5, 30.0])
def test_no_run_is_late_or_shorter_than_its_work(work: float, deadline: float) -> None:
    start = 0.2
    limit = work * deadline + start
    for run in interpolate_runs(read_scenarios(), work_hours=work, deadline_hours=limit, start_hours=start):
        assert run.hours <= limit + 1e-9
        assert run.spot_hours + run.ondemand_hours >= 0.999 * work


@pytest.mark.parametrize("work", [0.5, 12.0, 30.0, 400.0])
@pytest.mark.parametrize("deadline", [1.001, 1.02, 1.2, 2.5, 30.0, 1e4])
@pytest.mark.parametrize("start", [0.0, 0.02, 0.2, 0.3])
def test_bounded_hours_have_the_mean_of_the_runs(work: float, deadline: float, start: float) -> None:
    """Whether all runs reach the deadline, some or none."""
    scenarios = read_scenarios()
    weights = [1.0 + index % 7 for index in range(len(scenarios))]
    limit = work * deadline + start
    found = BoundedHours(scenarios, weights=[each / sum(weights) for each in weights]).mean(
        work_hours=work, deadline_hours=limit, start_hours=start
    )
    runs = interpolate_runs(scenarios, work_hours=work, deadline_hours=limit, start_hours=start)
    mean = sum(weight * run.hours for weight, run in zip(weights, runs, strict=True)) / sum(weights)
    assert found == pytest.approx(mean, rel=1e-12)


def test_without_spare_time_a_job_runs_on_demand() -> None:
    (run, *_) = interpolate_runs(read_scenarios(), work_hours=10.0, deadline_hours=10.1, start_hours=0.2)
    assert (run.spot_hours, run.ondemand_hours, run.preemptions) == (0.0, 10.2, 0.0)


def test_the_shipped_table_is_complete_and_names_its_origin() -> None:
    table = json.loads(TABLE.read_text())
    assert "recordings" in table["source"]
    cells = len(list(list_cells()))
    for scenario in read_scenarios():
        lengths = [len(each) for each in (scenario.spot, scenario.ondemand, scenario.hours, scenario.preemptions)]
        assert lengths == [cells] * 4
