"""`broker plan` and related commands."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.cli.main import main
from broker.cli.plan_table import join_zones
from broker.clock import SystemClock
from broker.state.store import Store
from broker.types import Estimate, Offer, Placement

ROOT = Path(__file__).parent.parent.parent
HEAVY = (
    "cryptography", "torch", "boto3", "google", "sky", "numpy", "pandas", "rich", "asyncio", "logging", "msgspec",
    "broker.types.jobs",
)  # fmt: skip


def broker(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "broker", *arguments], capture_output=True, text=True, cwd=cwd)


def test_explained_plan_of_the_shipped_catalog_fits_80_columns() -> None:
    shown = broker("plan", "tests/data/tasks/h100.yaml", "--explain")
    assert shown.returncode == 0, shown.stderr
    assert all(len(line) <= 80 for line in shown.stdout.splitlines() if not line.startswith("Why"))


@pytest.mark.parametrize(
    ("region", "letters", "shown"),
    [
        ("southamerica-west1", "a", "southamerica-west1-a"),
        ("southamerica-west1", "abc", "southamerica-west1-a +2"),
        ("us-east1", "bc", "us-east1-b,c"),
    ],
)
def test_zones_share_a_cell(region: str, letters: str, shown: str) -> None:
    offers = [
        Offer(cloud="gcp", region=region, zone=f"{region}-{letter}", instance_type="i", vcpus=1, memory_gib=1)
        for letter in letters
    ]
    placements = [Placement(offer=each, is_spot=False, node_count=1) for each in offers]
    assert join_zones([Estimate(placement=each) for each in placements]) == shown


def test_json_gives_the_same_as_data() -> None:
    (data,) = json.loads(broker("plan", "tests/data/tasks/h100.yaml", "--json").stdout)
    assert data["choice"] == data["estimates"][0]
    scores = [each["expected_usd"] + data["hour_value_usd"] * each["expected_hours"] for each in data["estimates"]]
    assert scores == sorted(scores)


def test_a_dry_run_of_a_job_prints_the_same_plan_as_json() -> None:
    task = "tests/data/tasks/h100.yaml"
    dry = broker("jobs", "launch", task, "--dryrun", "--json", "--yes")
    (launched,), (planned,) = json.loads(dry.stdout), json.loads(broker("plan", task, "--json").stdout)
    assert launched["choice"] == planned["choice"]


def test_a_deadline_that_local_spot_would_miss_is_named(tmp_path: Path) -> None:
    task = tmp_path / "t.yaml"
    task.write_text("resources: {infra: local, use_spot: true}\ngoal: {work: 6h, deadline: 6.2h}\nrun: x\n")
    shown = broker("plan", str(task))
    assert shown.returncode == 3
    assert "\n  deadline " in shown.stderr and "use_spot" in shown.stderr.partition("hint:")[2]


def test_misspelt_region_gets_its_near_miss_in_launch_as_in_plan() -> None:
    shown = broker("launch", "--dryrun", "--yes", "true", "--infra", "aws/us-eest-1", "--gpus", "H100:8")
    assert shown.returncode == 3
    assert "unknown region `us-eest-1` in aws" in shown.stderr
    assert "hint: did you mean `us-east-1`" in shown.stderr and "drop `cloud" not in shown.stderr


@pytest.mark.parametrize("arguments", [("gpus", "H100:8"), ("prices", "p5.48xlarge")])
def test_lists_of_old_prices_warn_about_their_age(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SystemClock, "now_s", lambda clock: 4e9)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(arguments)
    told = capsys.readouterr().err
    assert "note: outdated prices: on-demand on " in told and "spot on aws (" in told
    assert "`broker catalog update" in told.splitlines()[-1]
    assert all(len(line) <= 80 for line in told.splitlines())


def test_gpus_lists_one_accelerator() -> None:
    shown = broker("gpus", "h100:8")
    assert shown.returncode == 0
    assert "nebius" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("gpus", "H100:0"), "error: invalid count `0`"),
        (("gpus", "H100:nan"), "error: invalid count `nan`"),
        (("catalog", "update", "--cloud", "aaws"), "error: unknown cloud `aaws`\n\nhint: did you mean `aws`?"),
    ],
)
def test_unknown_cloud_and_a_count_of_nothing_are_refused(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--help"], ""),
        (["plan", "task_templates/ddp.yaml"], ""),
        (["plan", "--gpus", "V100", "--infra", "aws"], "note: a launch requires `image_id`"),
    ],
    ids=["help", "plan", "plan without an image"],
)
def test_fast_command_imports_nothing_heavy(arguments: list[str], told: str, tmp_path: Path) -> None:
    own = os.environ | {"BROKER_HOME": str(tmp_path)}
    Store(tmp_path / "state.db", clock=SystemClock(), owner="me").close()  # a plan reads the history of its jobs
    (tmp_path / "owner").write_text("me")
    code = (
        "import sys; from broker.cli.main import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=own)
    assert shown.stdout.splitlines()[-1] == "HEAVY []", shown.stdout + shown.stderr
    assert told in shown.stderr and shown.stderr.count("image_id") == bool(told)


def test_zones_of_one_price_share_a_line_and_are_shown_whole(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("resources: {infra: aws, accelerators: A100-80GB:8, use_spot: true}\ngoal: {work: 100h}\nrun: x\n")
    lines = broker("plan", str(file), "--top", "3").stdout.splitlines()
    zones = [line.split()[1] for line in lines[2:5]]
    assert all(len(line) <= 80 for line in lines[:5]) and "…" not in "".join(zones)
    (data,) = json.loads(broker("plan", str(file), "--json").stdout)
    offers = data["estimates"]
    first = offers[0]["placement"]["offer"]
    alike = [each for each in offers if each["usd_hour"] == offers[0]["usd_hour"]]
    assert zones[0] == first["zone"] + "".join(f",{each['placement']['offer']['zone'][-1]}" for each in alike[1:])


@pytest.mark.parametrize(("hour_value", "is_explained"), [(4, True), (0, False)])
def test_rows_that_are_not_in_the_order_of_their_cost_are_explained(
    hour_value: int, is_explained: bool, tmp_path: Path
) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        "resources: {accelerators: {A100-80GB:8, H100:8}}\nnum_nodes: 2\nrun: x\n"
        f"goal: {{work: {{hours: 100, on: A100-80GB:8}}, hour_value: {hour_value}}}\n"
    )
    (data,) = json.loads(broker("plan", str(file), "--json").stdout)
    costs = [each["expected_usd"] for each in data["estimates"]]
    shown = broker("plan", str(file)).stdout
    assert (costs != sorted(costs)) == is_explained == ("\nOrder: USD + 4.00 for each hour of TIME" in shown)


def test_options_alone_are_planned() -> None:
    (data,) = json.loads(broker("plan", "--gpus", "h100:8", "--num-nodes", "2", "--use-spot", "--json").stdout)
    placement = data["choice"]["placement"]
    assert (placement["offer"]["accelerator"], placement["is_spot"], placement["node_count"]) == ("H100", True, 2)


def test_a_cloud_without_prices_explains_how_to_add_them() -> None:
    shown = broker("plan", "--infra", "k8s/mine", "--gpus", "H100:8")
    assert shown.returncode == 0 and "has no offers of kubernetes yet" in shown.stderr
    assert "`broker catalog import DIR`" in shown.stderr and shown.stdout == ""
    assert "kubernetes.yaml` (" in shown.stderr and "run `broker check kubernetes`" in shown.stderr
    assert "`broker catalog update --cloud vast`" in broker("plan", "--infra", "vast", "--gpus", "H100:8").stderr
    assert "`broker catalog update --cloud runpod`" in broker("plan", "--gpus", "A4000").stderr
    assert "no offers of" not in broker("plan", "--infra", "aws", "--gpus", "H100:7").stderr


def test_empty_name_of_a_task_file_is_not_the_current_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["plan", ""])
    assert "the name of the task file is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *(["plan", "--gpus", "H100:8", "--infra", "aws"], ["status", "--json"], ["--version"]),
        *(["--help"], ["jobs", "launch", "--help"], ["--show-completion", "bash"]),
    ],
)
def test_output_that_cannot_be_written_is_named(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        with pytest.raises(SystemExit, match=r"^1$"):
            main(arguments)
        with contextlib.suppress(OSError):
            full.close()
    assert "error: cannot write the output: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["plan", "--gpus", "H100:8", "--infra", "aws"], ["--help"], ["jobs", "launch", "--help"]]
)
def test_output_that_nothing_reads_ends_the_command_as_sigpipe_would(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", pipe)
        with pytest.raises(SystemExit, match=r"^141$"):
            main(arguments)
        with contextlib.suppress(OSError):
            pipe.close()
    assert "rror" not in capsys.readouterr().err
