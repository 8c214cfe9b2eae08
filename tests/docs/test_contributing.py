"""The examples of CONTRIBUTING.md are complete: each is registered in one line and does what the text says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from broker.lab.markets import make_site
from broker.lab.replay import Case, replay
from broker.lab.traces import Trace
from broker.spot.policies import POLICIES, load_policy
from tests.docs.pages import ROOT
from tests.spot import test_policies

PAGE = ROOT / "CONTRIBUTING.md"
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```python\n(.*?)```", re.DOTALL)
EXAMPLES = {path: text for path, text in EXAMPLE.findall(PAGE.read_text())}


def load_example(path: str) -> types.ModuleType:
    """Import the example as the module that its path would be."""
    name = path.removesuffix(".py").replace("/", ".")
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # dataclasses and later imports look it up here
    exec(compile(EXAMPLES[path], path, "exec"), module.__dict__)  # noqa: S102 - our own page
    return module


def find_registry_line(registry: str) -> tuple[str, str]:
    """Return the line that the page says to add, as name and target."""
    match = re.search(rf'^    "([\w-]+)": "({registry}[\w.:]+)",$', PAGE.read_text(), re.MULTILINE)
    assert match, f"the text shows no line for {registry}"
    return match[1], match[2]


def test_every_python_block_is_an_example_that_a_test_executes() -> None:
    assert PAGE.read_text().count("```python\n") == len(EXAMPLES)
    assert set(EXAMPLES) == {
        "broker/spot/policies/seasoned.py",
        "broker/clouds/toy.py",
        "tests/clouds/test_contract_toy.py",
        "trainers/strategies/mean.py",
    }
    assert not any((ROOT / path).exists() for path in EXAMPLES), "an example has become a part of the product"


def test_examples_are_formatted_and_linted(tmp_path: Path) -> None:
    for path, text in EXAMPLES.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    options = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    # I001: isort does not see the packages there. D101 to D103: tests need no docstrings, but are known by folder.
    for verb in (["format", "--check"], ["check", "--ignore", "I001,D101,D102,D103"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *verb, *options, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr


# The cloud: the contract of all clouds, collected here from the example itself.

load_example("broker/clouds/toy.py")
_contract = load_example("tests/clouds/test_contract_toy.py")
bed = _contract.bed
TestToy = _contract.TestToy


def test_line_of_the_cloud_registry_names_its_maker() -> None:
    name, target = find_registry_line("broker.clouds.")
    module, _, attribute = target.partition(":")
    assert name == sys.modules[module].ToyCloud.name and callable(getattr(sys.modules[module], attribute))


# The spot policy.


def test_policy_waits_for_spot_of_age_and_keeps_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    load_example("broker/spot/policies/seasoned.py")
    name, target = find_registry_line("broker.spot.policies.")
    monkeypatch.setitem(POLICIES, name, target)
    flicker = ([0] * 3 + [1] * 3) * 40  # never open for an hour
    calm = [0] * 12 + [1] * 240
    for counts, uses_spot in ((flicker, False), (calm, True)):
        trace = Trace(name="t", gap_hours=1 / 6, counts=tuple(counts))
        case = Case(sites=(make_site(trace, start_hours=0.1),), work_hours=8.0, deadline_hours=16.0)
        outcome = replay(case, load_policy(name))
        assert not outcome.is_late
        assert (outcome.spot_hours > 0) is uses_spot


def test_policy_passes_the_tests_of_all_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    load_example("broker/spot/policies/seasoned.py")
    name, target = find_registry_line("broker.spot.policies.")
    monkeypatch.setitem(POLICIES, name, target)
    test_policies.test_nothing_runs_and_spot_is_closed_or_open_with_time_to_spare(name)
    test_policies.test_without_deadline_spot_is_waited_for(name)
    test_policies.test_on_demand_is_taken_if_nothing_else_is_for_sale(name)
    test_policies.test_at_the_point_of_no_return_on_demand_is_started(name)


# The strategy.


def train(folder: Path, strategy: str, workers: int) -> list[float]:
    """Return the losses of a short run on this machine, with the example registered as its text says."""
    name, target = find_registry_line("trainers.strategies.")
    folder.mkdir()
    (folder / "example_mean.py").write_text(EXAMPLES["trainers/strategies/mean.py"])
    (folder / "example_lm.py").write_text(
        "import sys\nfrom trainers.strategies import STRATEGIES\n"
        f"STRATEGIES[{name!r}] = 'example_mean:{target.partition(':')[2]}'\n"
        "from trainers.lm import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    flags = "--model.depth 1 --model.width 16 --model.heads 2 --model.context 16 --train.batch 6 --train.micro_batch 1"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("BROKER_", "SKYPILOT_"))}
    progress = folder / "progress.jsonl"
    environment = {
        **kept, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "BROKER_PROGRESS_FILE": str(progress),
        "BROKER_CHECKPOINT_DIR": str(folder / "checkpoints"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = ["-m", "trainers.launch", "--workers", str(workers), "-m", "example_lm", "--strategy", strategy]
    done = subprocess.run(
        [sys.executable, *command, *flags.split(), "--train.steps", "6", "--model.dropout", "0"],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in progress.read_text().splitlines()]
    return [line["loss"] for line in lines if line.get("loss") is not None]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_strategy_on_two_ranks_trains_as_one_process_does(tmp_path: Path) -> None:
    alone = train(tmp_path / "one", "ddp", 1)
    shared = train(tmp_path / "two", find_registry_line("trainers.strategies.")[0], 2)
    assert len(alone) == 6 and alone[-1] < alone[0]
    assert shared == pytest.approx(alone, rel=1e-5)
