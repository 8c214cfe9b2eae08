"""broker from Python, as a user calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import broker
from broker.errors import UsageError

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "tests/data/tasks/h100.yaml"
TEXT = "resources: {accelerators: A100:8, use_spot: true}\nrun: train"


def test_file_text_mapping_and_task_plan_the_same() -> None:
    mapping = {"resources": {"accelerators": "A100:8", "use_spot": True}, "run": "train"}
    plans = [broker.plan(each) for each in (TEXT, mapping, broker.read_task(TEXT))]
    assert len({(each.choice.placement, len(each.estimates)) for each in plans}) == 1
    assert plans[0].choice.strategy == "spot"
    assert broker.plan(FILE).choice == broker.plan(str(FILE)).choice


def test_plan_is_limited_to_the_given_clouds() -> None:
    made = broker.plan(TEXT, clouds=["gcp"])
    assert {each.placement.offer.cloud for each in made.estimates} == {"gcp"}


def test_errors_are_those_of_the_command_line() -> None:
    with pytest.raises(broker.TaskError):
        broker.plan("resources: {acelerators: A100}\nrun: x")
    with pytest.raises(broker.NoOfferError) as caught:
        broker.plan("resources: {accelerators: A100:8, cpus: 5000+}\nrun: x")
    assert caught.value.hints[0].startswith("drop `cpus: 5000+`: ")
    with pytest.raises(UsageError, match="pipeline"):
        broker.read_task("run: a\n---\nrun: b\n")


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no `lunch`"):
        broker.lunch  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="has no `lunch`"):
        broker.jobs.lunch  # type: ignore[attr-defined]  # noqa: B018
    assert "plan" in dir(broker) and "launch" in dir(broker.jobs)


def test_import_of_broker_imports_none_of_its_modules() -> None:
    code = "import sys, broker; print([name for name in sys.modules if name.startswith(('broker.', 'typer', 'yaml'))])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"
