"""The adapter to the rules of "Can't Be Late": ticks, bills, what the evaluator overrules, and its folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from broker.lab.replay import Case
from broker.lab.traces import Trace
from broker.spot.policies.base import Candidate, Decision, JobView, Wait
from tests.bench.cant_be_late import (
    ONDEMAND_USD,
    SPOT_USD,
    Run,
    TickedLife,
    finish,
    list_scenarios,
    place,
    play,
    read_zones,
    score,
)

GAP_HOURS = 1 / 6


def make_run(*counts: Sequence[int], policy: str = "adaptive", **facts: float) -> Run:
    traces = tuple(Trace(name=f"z{i}", gap_hours=GAP_HOURS, counts=tuple(each)) for i, each in enumerate(counts))
    run = Run(
        scenario="s", policy=policy, traces=traces, from_hour=0.0, work_hours=12.0, deadline_hours=14.0,
        overhead_hours=0.1, bills_ticks=True,
    )  # fmt: skip
    return replace(run, **facts)  # type: ignore[arg-type]


def test_spot_only_costs_its_ticks_and_one_start() -> None:
    found = play(make_run([1]))
    ticks = 73  # twelve hours and a start that takes a part of a tick
    assert found.usd == pytest.approx(ticks * GAP_HOURS * SPOT_USD)
    assert score(found.usd, 12.0) == pytest.approx(99.36, abs=0.01)


def test_on_demand_alone_scores_a_little_below_0() -> None:
    found = play(make_run([0]))
    assert not found.is_late
    assert found.usd == pytest.approx(73 * GAP_HOURS * ONDEMAND_USD)


@pytest.mark.parametrize("policy", ["adaptive", "uniform-progress", "greedy"])
@pytest.mark.parametrize("slack_ticks", [2, 3, 7, 12])
def test_no_policy_is_late_however_few_ticks_are_free(policy: str, slack_ticks: int) -> None:
    for counts in ([1, 0], [1, 1, 1, 0], [0, 0, 1], [1] * 20 + [0] * 200):
        run = make_run(counts, policy=policy, deadline_hours=12.0 + slack_ticks * GAP_HOURS)
        assert not play(run).is_late


def test_a_policy_that_waits_forever_is_overruled_in_time() -> None:
    def wait(view: JobView, candidates: Sequence[Candidate], /) -> Decision:
        return Wait()

    run = make_run([0])
    case = Case(sites=(place(run.traces[0], 0.1),), work_hours=12.0, deadline_hours=14.0, look_hours=-1.0)
    life = TickedLife(case, 0.0, GAP_HOURS)
    outcome = finish(life, wait)
    assert not outcome.is_late and outcome.hours > 13.5
    assert outcome.ondemand_hours == pytest.approx(12.1)


def test_the_evaluator_bills_all_hours_at_the_last_zone_and_we_each_tick_at_its_own() -> None:
    dear = Trace(name="a", gap_hours=GAP_HOURS, counts=(1,) * 30 + (0,) * 100, prices=(2.0,) * 130)
    cheap = Trace(name="b", gap_hours=GAP_HOURS, counts=(0,) * 30 + (1,) * 100, prices=(0.5,) * 130)
    run = replace(make_run([1], policy="greedy"), traces=(dear, cheap), deadline_hours=20.0)
    own, last = play(run).usd, play(replace(run, bills_ticks=False)).usd
    assert own > last and not play(run).is_late


def test_folders_of_the_evaluator_have_the_other_sign(tmp_path: Path) -> None:
    for name in ("us-east-1a_v100_1", "us-east-1c_v100_1"):
        folder = tmp_path / name / "traces" / "random_start"
        folder.mkdir(parents=True)
        for index in range(2):
            text = json.dumps({"metadata": {"gap_seconds": 600}, "data": [0, 0, 0, 1] * 50})
            (folder / f"{index}.json").write_text(text)
    zones = read_zones(tmp_path, 30, 30.0)
    assert {name: len(found) for name, found in zones.items()} == {"us-east-1a_v100_1": 2, "us-east-1c_v100_1": 2}
    assert zones["us-east-1a_v100_1"][0][0].open_share == 0.75
    assert list_scenarios(list(zones), is_single=False) == {
        "two zones of a region": ("us-east-1a_v100_1", "us-east-1c_v100_1")
    }
    assert not read_zones(tmp_path, 30, 40.0), "shorter than the deadline"
