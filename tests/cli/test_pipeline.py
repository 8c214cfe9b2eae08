"""`broker plan` for a file of several tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from broker.cli.launch import confirm_price
from broker.cli.pipeline import show_pipeline
from broker.pipelines.concurrency import find_usd_hour_max
from broker.types import (
    Estimate,
    GroupRole,
    Offer,
    PipelineEdge,
    PipelinePlan,
    PipelineStep,
    Placement,
    Plan,
    Task,
    Transfer,
)

ROOT = Path(__file__).parent.parent.parent
PIPELINE = """
name: nightly
---
name: prepare
resources: {cpus: 16}
goal: {work: 2h}
run: x
---
name: train
resources: {accelerators: H100:8, use_spot: true}
goal: {work: 10h}
run: x
"""


def broker(*arguments: str) -> str:
    shown = subprocess.run([sys.executable, "-m", "broker", *arguments], capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE)
    return str(path)


def test_json_holds_the_whole_and_every_ranking(file: str) -> None:
    data = json.loads(broker("plan", file, "--json", "--top", "2"))
    assert [step["name"] for step in data["steps"]] == [task["task"] for task in data["tasks"]] == ["prepare", "train"]
    assert [len(task["estimates"]) for task in data["tasks"]] == [2, 2]
    assert data["is_optimal"] is True
    assert data["usd"] == pytest.approx(sum(step["usd"] for step in data["steps"]) + data["egress_usd"])
    assert data["usd"] <= data["greedy_usd"]


def test_time_and_a_deadline_can_be_requested(file: str) -> None:
    cheapest = json.loads(broker("plan", file, "--json"))
    soonest = json.loads(broker("plan", file, "--json", "--minimize", "time"))
    assert soonest["hours"] < cheapest["hours"]
    assert soonest["usd"] > cheapest["usd"]
    halfway = (soonest["hours"] + cheapest["hours"]) / 2
    between = json.loads(broker("plan", file, "--json", "--deadline-hours", str(halfway)))
    assert between["hours"] <= halfway
    assert cheapest["usd"] <= between["usd"] <= soonest["usd"]


def make_step(name: str, cloud: str, usd: float, *, is_assumed: bool = False) -> PipelineStep:
    offer = Offer(
        cloud=cloud, region="far-away-1", zone=None, instance_type="x" * 40, vcpus=8, memory_gib=32,
        ondemand_usd_hour=usd, as_of="2026-01-02",
    )  # fmt: skip
    placement = Placement(offer=offer, is_spot=False, node_count=2)
    return PipelineStep(name=name, estimate=Estimate(placement=placement), usd=usd, hours=1.0, is_assumed=is_assumed)


def make_plan(**fields: object) -> PipelinePlan:
    moved = Transfer(usd=9.0, hours=0.5, is_assumed=True)
    values: dict[str, object] = {
        "objective": "cost", "steps": (make_step("a", "aws", 10.0), make_step("b", "vast", 20.0, is_assumed=True)),
        "edges": (PipelineEdge(source="a", target="b", gib=1234.5, transfer=moved),),
        "usd": 39.0, "hours": 2.5, "lower_bound": 39.0, "is_optimal": True, "greedy_usd": 60.0, "greedy_hours": 3.0,
    }  # fmt: skip
    return PipelinePlan(**{**values, **fields})  # type: ignore[arg-type]


def test_edges_total_and_greedy_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show_pipeline(make_plan())
    shown = capsys.readouterr().out
    assert shown == (
        "Pipeline of 2 tasks: lowest cost overall\n"
        f"All rows: INSTANCE 2 x {'x' * 40}\n"
        "TASK  CLOUD  REGION/ZONE  MODEL     USD     TIME\n"
        "a     aws    far-away-1   od      10.00   1h 00m\n"
        "b     vast   far-away-1   od     ~20.00  ~1h 00m\n"
        "\n"
        "DATA FROM  TO    GiB    USD     TIME\n"
        "a          b   1,234  ~9.00  30m 00s\n"
        "Total: 39.00 USD, of which 9.00 for data transfer; 2h 30m on the critical path\n"
        "Choosing each task separately would cost 60.00 USD and 3h 00m\n"
        "Prices as of 2026-01-02\n"
        "~ marks a task without `goal: work`, counted as one hour\n"
        "~ marks a transfer without a known egress price; a high one is assumed\n"
    )


GROUP = """
name: rl
execution: parallel
---
name: learner
resources: {accelerators: A100}
run: x
---
name: buffer
resources: {cpus: 4+}
run: x
"""


def test_group_is_planned_where_it_will_be_launched(tmp_path: Path) -> None:
    (tmp_path / "group.yaml").write_text(GROUP)
    data = json.loads(broker("plan", str(tmp_path / "group.yaml"), "--json"))
    offers = [each["choice"]["placement"]["offer"] for each in data["tasks"]]
    assert len({(each["cloud"], each["region"]) for each in offers}) == 1, offers
    assert data["usd"] > data["greedy_usd"], "apart, each task would have been cheaper"


def test_group_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    show_pipeline(make_plan(), name="rl", role=GroupRole(name="rl"))
    assert capsys.readouterr().out.startswith("Job group rl of 2 tasks in one region: lowest cost overall\n")
    show_pipeline(make_plan(), role=GroupRole(name="rl", is_connected=False))
    assert capsys.readouterr().out.startswith("Job group of 2 tasks: lowest cost overall\n")


@pytest.mark.parametrize(
    ("role", "needs", "price"),
    [
        (None, {"b": ["a"], "c": ["b"]}, "20.00"),  # one after the other
        (None, {"b": ["a"], "c": ["a"]}, "24.00"),  # two branches
        (None, {"c": ["a", "b"]}, "30.00"),
        (None, {"a": ["c"], "b": ["c"]}, "30.00"),  # in any order of the file
        (GroupRole(name="rl"), {}, "34.00"),
    ],
)
def test_price_to_confirm_is_of_the_tasks_that_run_at_a_time(
    role: GroupRole | None, needs: dict[str, list[str]], price: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks of a pipeline run one after the other, except in branches; those of a group run together."""
    asked = list[str]()
    monkeypatch.setattr("typer.confirm", lambda text, **_: asked.append(text))
    plans = [
        Plan(
            task=Task(name=name, group=role, needs=dict.fromkeys(needs.get(name, []), 0.0)),
            estimates=(make_step(name, "aws", usd).estimate,),
            rejections=(),
            prices_as_of="",
            reason="",
        )
        for name, usd in {"a": 5.0, "b": 10.0, "c": 2.0}.items()
    ]
    confirm_price(plans, yes=False)
    assert asked == [f"Start at up to {price} USD/h?"]


@pytest.mark.parametrize("branches", [1, 3])
def test_price_to_confirm_of_a_long_pipeline_counts_each_branch_once(branches: int) -> None:
    """More tasks than the exact search takes."""
    plans = [
        Plan(
            task=Task(name=f"{branch}-{step}", needs={f"{branch}-{step - 1}": 0.0} if step else {}),
            estimates=(make_step("a", "aws", 2.0 + (step == 30)).estimate,),
            rejections=(),
            prices_as_of="",
            reason="",
        )
        for branch in range(branches)
        for step in range(60)
    ]
    assert find_usd_hour_max(plans) == pytest.approx(branches * find_usd_hour_max(plans[30:31]))


def test_price_to_confirm_of_many_branches_takes_few_steps() -> None:
    """Without it, the price of 40 tasks in 13 branches is shown after a million steps."""
    plans = [
        Plan(
            task=Task(name=f"{branch}-{step}", needs={f"{branch}-{step - 1}": 0.0} if step else {}),
            estimates=(make_step("a", "aws", 1.0 + step).estimate,),
            rejections=(),
            prices_as_of="",
            reason="",
        )
        for branch in range(13)
        for step in range(3)
    ]
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"
        assert calls < 10_000

    sys.setprofile(count)
    try:
        found = find_usd_hour_max(plans)
    finally:
        sys.setprofile(None)
    assert found == pytest.approx(13 * plans[2].choice.placement.usd_hour)


def test_price_to_confirm_is_of_all_runs_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr("typer.confirm", lambda text, **_: asked.append(text))
    estimate = replace(make_step("a", "aws", 5.0).estimate, expected_usd=30.0)
    plan = Plan(task=Task(), estimates=(estimate,), rejections=(), prices_as_of="", reason="")
    confirm_price([plan], yes=False, parallel=4, total=10)
    assert asked == ["Start at 40.00 USD/h, 300.00 USD expected in total?"]


def test_an_unproven_plan_reports_its_gap(capsys: pytest.CaptureFixture[str]) -> None:
    show_pipeline(make_plan(lower_bound=38.5, is_optimal=False))
    assert "Not proven optimal: the lower bound is 38.50 USD, this plan costs 39.00\n" in capsys.readouterr().out
    show_pipeline(make_plan(objective="time", lower_bound=2.0, is_optimal=False))
    assert "the lower bound is 2h 00m, this plan takes 2h 30m\n" in capsys.readouterr().out
    show_pipeline(make_plan())
    assert "Not proven" not in capsys.readouterr().out
