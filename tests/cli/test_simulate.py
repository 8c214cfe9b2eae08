"""`broker simulate` and `broker traces` on the command line."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from broker.cli.simulate_html import spread_labels
from tests.cli.conftest import Shell

TASK = """
name: train
resources: {infra: local, cpus: 1+}
goal: {work: 6h, deadline: 9h}
checkpoint: {stall: 5s, restart: 6m, every: 10m}
run: "true"
"""
QUICK = ("--starts", "6", "--optima", "2")


def test_policies_stand_side_by_side_in_eighty_columns(shell: Shell) -> None:
    done = shell.run("simulate", shell.write("t.yaml", TASK), *QUICK, "--policy", "greedy,uniform-progress,failover")
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    head = next(index for index, line in enumerate(lines) if line.startswith("POLICY"))
    assert [line.split()[0] for line in lines[head + 1 : head + 5]] == [
        "on-demand", "greedy", "uniform-progress", "failover",
    ]  # fmt: skip
    assert any("(optimum)" in line and "█" in line for line in lines)


def test_an_expensive_job_of_weeks_does_not_truncate_policy_names(shell: Shell) -> None:
    dear = TASK.replace("{infra: local, cpus: 1+}", "{infra: aws, accelerators: H100:8}\nnum_nodes: 4")
    task = shell.write("t.yaml", dear.replace("{work: 6h, deadline: 9h}", "{work: 300h, deadline: 400h}"))
    done = shell.run("simulate", task, "--starts", "2", "--optima", "1", "--policy", "uniform-progress")
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    head = next(index for index, line in enumerate(lines) if line.startswith("POLICY"))
    assert "uniform-progress " in lines[head + 2] and "…" not in done.stdout


def test_json_figures_agree_with_each_other(shell: Shell) -> None:
    found = shell.read_json("simulate", shell.write("t.yaml", TASK), *QUICK, "--policy", "greedy,adaptive")
    assert found["job"]["work_hours"] == 6 and found["job"]["deadline_hours"] == 9
    by_name = {each["policy"]: each for each in found["policies"]}
    for name, lives in found["outcomes"].items():
        assert len(lives) == 6
        mean = sum(each["usd"] for each in lives) / 6
        assert abs(by_name[name]["usd_mean"] - mean) < 1e-9
    for name in ("greedy", "adaptive"):
        assert by_name[name]["late"] == 0
        assert by_name[name]["usd_mean"] < by_name["on-demand"]["usd_mean"]
    assert by_name["adaptive"]["over_optimum"] > -0.01


def test_the_report_is_one_file_without_scripts_or_links(shell: Shell) -> None:
    target = shell.folder / "report.html"
    trace = shell.write("a<b>&c.json", json.dumps({"metadata": {"gap_seconds": 600}, "data": [1, 1, 1, 0] * 40}))
    task = shell.write("t.yaml", TASK)
    shell.run("simulate", task, *QUICK, "--policy", "greedy", "--traces", trace, "--html", str(target))
    text = target.read_text()
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert "a&lt;b&gt;&amp;c" in text and "<b>" not in text
    assert not re.search(r"<script|<link|https?://|src=", text)
    for tag in ("svg", "table", "p", "h2", "h3"):
        assert text.count(f"<{tag}") - text.count(f"<{tag}r") >= 1
        assert len(re.findall(rf"<{tag}[ >]", text)) == text.count(f"</{tag}>")
    assert text.count("<svg") == 4  # the costs, and three timelines
    assert "<style>:root { color-scheme: light dark;" in text  # that of `broker report`
    assert "train on recorded spot markets" in text and "synthetic" not in text


def test_synthetic_markets_are_marked_in_the_report(shell: Shell) -> None:
    target = shell.folder / "report.html"
    done = shell.run("simulate", shell.write("t.yaml", TASK), *QUICK, "--policy", "greedy", "--html", str(target))
    text = target.read_text()
    assert "train on synthetic spot markets" in text and "recorded" not in text and "recording" not in text
    assert "synthetic" in done.stdout and "\r" not in done.stderr and "\x1b" not in done.stderr


def test_own_traces_are_used_alone_or_with_others(shell: Shell) -> None:
    folder = shell.folder / "traces"
    folder.mkdir()
    for name, data in (("a", [1] * 50 + [0] * 50), ("b", [0] * 50 + [1] * 50)):
        (folder / f"{name}.json").write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": data}))
    task = shell.write("t.yaml", TASK)
    options = ("--traces", str(folder), "--policy", "greedy", "--starts", "4", "--optima", "0")
    together = shell.read_json("simulate", task, *options)
    apart = shell.read_json("simulate", task, *options, "--apart")
    assert [each["name"] for each in together["traces"]] == ["a", "b"]
    assert together["policies"][1]["usd_mean"] < apart["policies"][1]["usd_mean"]
    assert together["policies"][1]["over_optimum"] is None


@pytest.mark.exhaustive
def test_policies_change_between_the_kinds_of_machines_that_a_task_accepts(shell: Shell) -> None:
    (shell.folder / "traces").mkdir()
    for name, data in (("one", [1, 1, 0, 1, 0, 0] * 40), ("two", [0, 1, 1, 1, 0, 1] * 40)):
        shell.write(f"traces/{name}.json", json.dumps({"metadata": {"gap_seconds": 3600}, "data": data}))
    goal = "goal: {work: {hours: 20, on: A100:8}, deadline: 16h}"
    both, slow = (
        shell.write(f"{number}.yaml", f"resources: {{infra: aws, accelerators: {kinds}}}\n{goal}\nrun: x")
        for number, kinds in enumerate(("{A100:8, H100:8}", "A100:8"))
    )
    quick = ("--traces", str(shell.folder / "traces"), "--starts", "3", "--optima", "1", "--policy", "adaptive")
    refused = shell.run("simulate", slow, *quick, code=2)
    assert "cannot be met even on-demand" in refused.stderr
    found = shell.read_json("simulate", both, *quick)
    names = {found["job"]["instance_type"], *(each["instance_type"] for each in found["job"]["other_kinds"])}
    assert names == {"p4d.24xlarge", "p5.48xlarge"}
    assert [each["late"] for each in found["policies"]] == [0, 0]
    ondemand, adaptive = found["policies"]
    assert adaptive["usd_mean"] < ondemand["usd_mean"] and found["optimum_usd"][0] > 0
    text = shell.run("simulate", both, *quick).stdout
    assert "times as fast" in text and text.count("USD/h") == 2


def test_unsupported_simulations_are_refused_with_hints(shell: Shell) -> None:
    task = shell.write("t.yaml", TASK)
    no_work = shell.write("n.yaml", "resources: {infra: local, cpus: 1+}\nrun: 'true'\n")
    for arguments, words in (
        (("simulate", no_work), "goal: {work: 40h, deadline: 60h}"),
        (("simulate", task, "--traces", str(shell.folder / "none")), "cannot read"),
        (("simulate", task, "--deadline-hours", "3"), "cannot be met even on-demand"),
    ):
        done = shell.run(*arguments, code=2)
        assert words in done.stderr and "Traceback" not in done.stderr
    broken = shell.write("broken.json", '{"metadata": {"gap_seconds": 600}, "data": ["x"]}')
    assert "cannot be read" in shell.run("simulate", task, "--traces", broken, code=1).stderr


def test_traces_are_recorded(shell: Shell) -> None:
    folder = shell.folder / "recorded"
    shell.run(
        "traces", "record", shell.write("t.yaml", TASK), "--out", str(folder), "--every", "0.001", "--hours", "0.00005",
        "--yes",
    )  # fmt: skip
    (facts,) = shell.read_json("traces", "info", str(folder))
    assert facts["open_share"] == 1.0 and facts["mean_usd_hour"] > 0
    assert "No clusters" in shell.run("status").stdout


def test_labels_of_lines_that_end_together_neither_overlap_nor_leave_the_picture() -> None:
    for heights in ([10.0] * 6, [250.0] * 7, [5.0, 260.0, 261.0, 262.0, 100.0], [40.0]):
        placed = spread_labels(heights, 294.0)
        assert all(0 <= each <= 294.0 for each in placed)
        assert all(abs(one - other) >= 13.9 for one, other in itertools.combinations(placed, 2))
    assert spread_labels([10.0, 200.0], 294.0) == [14.0, 204.0]
