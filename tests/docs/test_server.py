"""The policy in SERVER.md does what the text says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.errors import PolicyError
from broker.types import Resources, Task
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "SERVER.md"
FOUND = re.search(r"```python\n# /etc/broker/policy\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    assert FOUND, "the page has the example"
    (tmp_path / "policy.py").write_text(FOUND[1])
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(f'admin_policy = "{tmp_path}/policy.py:govern"\n')
    return Context(home)


def test_policy_of_the_page_allows_spot_in_the_regions_and_accepts_its_own_result(context: Context) -> None:
    task = context.resolve(Task(run="true", resources=(Resources(accelerator="A100", accelerator_count=8),)))
    assert {each.region for each in task.resources} == {"us-east-1", "us-west-2", "eu-west-1"}
    assert all(each.use_spot and each.labels["project"] == "none" for each in task.resources)
    assert context.resolve(task) == task
    plan = context.plan(task)
    assert {each.placement.offer.cloud for each in plan.estimates} == {"aws"}


def test_policy_of_the_page_refuses_other_regions_and_images(context: Context) -> None:
    task = Task(run="true", resources=(Resources(region="ap-south-1"),))
    with pytest.raises(PolicyError, match="region ap-south-1 is not approved"):
        context.resolve(task)
    image = Resources(image_id="docker:example.com/pytorch:2")
    with pytest.raises(PolicyError, match="is not from"):
        context.resolve(replace(task, resources=(image,)))
