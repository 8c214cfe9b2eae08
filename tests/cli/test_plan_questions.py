"""Options of `broker plan`: terms, changes, plots, limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from broker.app.what_if import change_task
from broker.axes import Axis
from broker.errors import TaskError, UsageError
from broker.task.loader import load_tasks_text

ROOT = Path(__file__).parent.parent.parent
TASK = """
name: train
resources: {accelerators: {A100-80GB: 8, H100: 8}}
num_nodes: 2
goal:
  work: {hours: 100, on: "A100-80GB:16"}
  throughput: {"A100-80GB:16": 1000, "H100:16": 9000}
  deadline: 6d
  budget: 5000
checkpoint: {stall: 10s, restart: 6m, size: 80GB}
run: x
"""


def broker(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    shown = subprocess.run([sys.executable, "-m", "broker", *arguments], capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == code, shown.stdout + shown.stderr
    return shown


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "train.yaml"
    path.write_text(TASK)
    return str(path)


def test_explanation_lists_zones_without_a_difference_once(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("resources: {infra: aws, accelerators: H100:8, use_spot: true}\ngoal: {work: 100h}\nrun: x\n")
    shown = broker("plan", str(path), "--explain").stdout
    first, second = [line for line in shown.splitlines() if line.startswith(("1. ", "2. "))]
    regions = [line.split(" in aws ")[1].split(",")[0].rstrip("abcdef") for line in (first, second)]
    assert regions[0] != regions[1], "the runner-up is another place, not another zone of the choice"
    assert ",b" in shown.partition("\n1. ")[2].partition("\n2. ")[0].splitlines()[0], first


@pytest.mark.long
def test_infeasible_what_if_shows_reason_and_hint(file: str) -> None:
    changes = ["deadline=1h", "infra=aws/us-eest-1"]
    shown = broker("plan", file, *(word for each in changes for word in ("--what-if", each))).stdout
    below = shown[shown.index("What if:") :]
    assert "deadline=1h: deadline: " in below and "can be met" in below
    assert "unknown region `us-eest-1` in aws" in below and "did you mean `us-east-1`" in below
    assert all(len(line) <= 80 for line in below.splitlines())


def test_what_if_compares_each_change_with_the_unchanged_plan(file: str) -> None:
    shown = broker("plan", file, "--what-if", "use_spot=false", "--what-if", "budget=1").stdout
    table = shown[shown.index("What if:") :]
    assert "nothing fits" in next(line for line in table.splitlines() if line.startswith("budget=1"))
    changed = next(line for line in table.splitlines() if line.startswith("use_spot=false"))
    assert " od " in changed
    assert " +" in changed  # on-demand costs more than the choice
    assert all(len(line) <= 80 for line in table.splitlines())


def test_what_if_as_data(file: str) -> None:
    (data,) = json.loads(broker("plan", file, "--json", "--what-if", "num_nodes=1", "--what-if", "budget=1").stdout)
    assert data["what_if"][0]["choice"]["placement"]["node_count"] == 1
    assert data["what_if"][1]["choice"] is None


def test_wrong_change_is_explained(file: str) -> None:
    assert "must be a duration" in broker("plan", file, "--what-if", "deadline=soon", code=2).stderr


@pytest.mark.parametrize(
    ("text", "get", "value"),
    [
        ("deadline=24h", lambda task: task.goal.deadline_hours, 24),
        ("deadline=none", lambda task: task.goal.deadline_hours, None),
        ("work=5h", lambda task: (task.goal.work_hours, task.goal.work_on), (5, "A100-80GB:16")),
        ("confidence=0.5", lambda task: task.goal.confidence, 0.5),
        ("checkpoint.every=10m", lambda task: task.checkpoint.every_s, 600),
        ("checkpoint.every=none", lambda task: task.checkpoint.every_s, None),
        ("num_nodes=4, use_spot=true", lambda task: (task.num_nodes, task.resources[0].use_spot), (4, True)),
        ("accelerators=L4:1", lambda task: [(r.accelerator, r.accelerator_count) for r in task.resources], [("L4", 1)]),
        ("max_hourly_cost=7.5", lambda task: {r.usd_hour_max for r in task.resources}, {7.5}),
        ("infra=gcp/us-east1", lambda task: (task.resources[0].cloud, task.resources[0].region), ("gcp", "us-east1")),
    ],
)
def test_change_means_what_it_means_in_a_file(text: str, get: object, value: object) -> None:
    (task,) = load_tasks_text(TASK, "train.yaml")
    assert get(change_task(task, text)) == value  # type: ignore[operator]


@pytest.mark.parametrize("text", ["deadline", "foo=1", "max_hourly_cost=-1", "deadline=x", "num_nodes=0"])
def test_change_without_effect_is_refused(text: str) -> None:
    (task,) = load_tasks_text(TASK, "train.yaml")
    with pytest.raises((UsageError, TaskError)):
        change_task(task, text)


def test_picture_is_drawn_and_written(file: str, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    broker("plan", file, "--pareto", "--plot", str(picture))
    root = ElementTree.parse(picture).getroot()
    space = "{http://www.w3.org/2000/svg}"
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    circles = list(root.iter(f"{space}circle"))
    assert circles
    assert all(0 <= float(each.get("cx", -1)) <= width and 0 <= float(each.get("cy", -1)) <= height for each in circles)
    tips = [each.text or "" for each in root.iter(f"{space}title")]
    assert "USD" in tips[0]


@pytest.mark.long
def test_picture_in_an_unknown_format_or_place_is_refused(file: str, tmp_path: Path) -> None:
    for name in ("a.gif", "a.png"):
        refused = broker("plan", file, "--plot", str(tmp_path / name), code=2).stderr
        assert "must name a .svg file" in refused
        assert f"--plot {tmp_path / 'a.svg'}" in refused
    assert "cannot write" in broker("plan", file, "--plot", str(tmp_path / "none" / "a.svg"), code=2).stderr


def test_picture_needs_work(tmp_path: Path) -> None:
    bare = tmp_path / "bare.yaml"
    bare.write_text("resources: {accelerators: H100:8}\nrun: x\n")
    assert "goal: {work: 100h}" in broker("plan", str(bare), "--pareto", code=2).stderr
    bare.write_text("name: a\nrun: x\n---\nname: b\nrun: x\n")
    assert "draws a single task, and the file has 2" in broker("plan", str(bare), "--plot", "x.svg", code=2).stderr


def test_price_cap_holds_for_each_node(file: str) -> None:
    (data,) = json.loads(broker("plan", file, "--max-price", "8", "--json", "--top", "1000").stdout)
    assert max(each["usd_hour"] for each in data["estimates"]) <= 2 * 8
    refused = broker("plan", file, "--max-price", "0.01", code=3).stderr
    assert "at most 0.01 USD/h per node" in refused
    assert "hint: raise the price limit" in refused


def test_a_mistyped_file_is_not_run_as_a_command() -> None:
    assert "cannot read the task file" in broker("plan", "trian", code=2).stderr


@pytest.mark.parametrize(("low", "high"), [(1.0, 1000.0), (30.0, 33.0), (5.0, 5.0)])
def test_axis_puts_ticks_inside_and_ends_at_its_ends(low: float, high: float) -> None:
    axis = Axis([low, high])
    ticks = axis.list_ticks()
    assert 1 <= len(ticks) <= 12
    assert all(low <= tick <= high for tick in ticks)
    if high > low:
        assert (axis.place(low), axis.place(high)) == (0, 1)
