"""`broker advise` on the command line."""

from __future__ import annotations

import json
import re

import pytest

from broker.app.advising import round_batch
from tests.cli.conftest import Shell


def test_table_fits_and_its_task_file_plans(shell: Shell) -> None:
    path = shell.folder / "advice.yaml"
    done = shell.run(
        "advise", "--params", "7B", "--tokens", "20B", "--deadline", "5d", "--explain", "--yaml", str(path)
    )
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    (plan,) = shell.read_json("plan", str(path))
    (first, *_) = shell.read_json("advise", "--params", "7B", "--tokens", "20B", "--deadline", "5d")["options"]
    assert plan["choice"]["expected_usd"] == pytest.approx(first["expected_usd"], rel=0.05)
    assert first["expected_hours"] < 120


def test_json_carries_the_task_file(shell: Shell) -> None:
    data = shell.read_json(
        "advise", "--params", "1B", "--tokens", "1B", "--gpus", "a100", "--infra", "aws", "--no-spot"
    )
    assert {each["accelerator"] for each in data["options"]} == {"A100"}
    assert all(each["estimate"]["placement"]["offer"]["cloud"] == "aws" for each in data["options"])
    assert "infra: aws" in data["yaml"] and "use_spot: false" in data["yaml"]
    assert data["training"]["steps"] == pytest.approx(1e9 / 2**19, rel=1e-6)


def test_the_shape_can_be_given(shell: Shell) -> None:
    data = json.loads(
        shell.run("advise", "--layers", "2", "--hidden", "256", "--vocab", "256", "--tokens", "10M", "--seq", "256",
                  "--batch", "8K", "--gpus", "L4", "--hour-value", "0", "--json").stdout
    )  # fmt: skip
    assert data["training"]["shape"]["width"] == 256
    assert data["options"][0]["strategy"] == "1 GPU"
    assert data["hour_value_usd"] == 0 and "hour_value: 0" in data["yaml"]


@pytest.mark.parametrize(
    ("sequences", "rounded"), [(4e6 / 4096, 1024), (16e6 / 4096, 4096), (31.25, 32), (3000, 3072), (128, 128), (0.2, 1)]
)
def test_a_batch_is_rounded_to_what_ranks_can_share(sequences: float, rounded: int) -> None:
    assert round_batch(sequences) == rounded


def test_the_largest_runs_name_what_limits_them_and_how_large_a_spot_gang_is(shell: Shell) -> None:
    wish = ["--tokens", "15.6T", "--gpus", "H100", "--max-gpus", "8192", "--deadline", "900d"]
    done = shell.run("advise", "--params", "405B", *wish, "--batch", "4M", "--spot")
    assert "the bundled trainer limits this" in done.stderr and "`--trainer megatron`" in done.stderr
    assert re.search(r"\d,\d{3} spot GPUs in one zone are rarely available", done.stderr)
    assert "15.6T tokens" in done.stdout and not re.search(r"\de\+", done.stdout)
    sure = shell.run("advise", "--params", "405B", *wish, "--no-spot", "--trainer", "megatron")
    assert "spot GPUs" not in sure.stderr and "require a program such as Megatron-LM" in sure.stderr
    assert "trainers.lm" not in sure.stdout
    assert "…" not in sure.stdout and "LOCATION: 1 " in sure.stdout, "a table of long amounts names whole places"


def test_a_mixture_of_experts_computes_with_its_active_parameters(shell: Shell) -> None:
    wish = ["--params", "100B", "--tokens", "1T", "--gpus", "H100", "--infra", "aws", "--no-spot", "--deadline", "300d"]
    dense = shell.read_json("advise", *wish, "--trainer", "megatron", "--batch", "8M")
    sparse = shell.read_json("advise", *wish, "--active-params", "12B", "--batch", "8M")
    assert sparse["training"]["trainer"] == "megatron"
    assert sparse["training"]["parameters"] == pytest.approx(100e9, rel=0.05)
    assert sparse["options"][0]["expected_usd"] < dense["options"][0]["expected_usd"] / 2
    assert "mixture" not in sparse["yaml"] and "trainers.lm" not in sparse["yaml"]


def test_the_bundled_trainer_trains_a_mixture(shell: Shell) -> None:
    wish = ["--params", "47B", "--active-params", "13B", "--tokens", "100B", "--trainer", "bundled", "--gpus", "H100"]
    found = shell.read_json("advise", *wish)
    assert found["training"]["parameters"] == pytest.approx(47e9, rel=0.05)
    assert "--model.experts 10 --model.experts_per_token 2 --model.hidden_width" in found["yaml"]
    assert "expert" in found["options"][0]["sharding"]
