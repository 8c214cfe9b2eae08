"""Grafana's dashboard and the alert rules name only metrics that `/metrics` has, with labels that these have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from broker.dashboard.metrics import list_families
from broker.dashboard.model import list_places, read_overview
from broker.dashboard.node_metrics import list_node_families, list_nodes
from broker.dashboard.service_metrics import list_service_families
from broker.types import Goal, Progress
from tests.dashboard.conftest import TASK, Story
from tests.dashboard.test_metrics import make_service_line

FOLDER = Path(__file__).parent.parent.parent / "docs" / "monitoring"
BOUNDED = replace(TASK, goal=Goal(budget_usd=50.0))
NAME = re.compile(r"\bbroker_[a-z_]+")


@pytest.fixture
def labels(story: Story) -> Mapping[str, set[str]]:
    """The labels of each family, from the first sample."""
    nodes = list_node_families(list_nodes(story.context.config.logs, [1], now_s=story.now_s))
    story.store.jobs.set_progress(story.store.jobs.add("bounded", BOUNDED).id, Progress(step=1, loss=2.0))
    services = list_service_families([make_service_line()])
    families = [*list_families(read_overview(story.context), list_places(story.store)), *services, *nodes]
    return {each.name: set(each.samples[0][0]) for each in families if each.samples}


def list_rules() -> list[dict[str, object]]:
    return [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def list_expressions() -> Iterator[str]:
    for panel in json.loads((FOLDER / "grafana.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (str(rule["expr"]) for rule in list_rules())


def test_every_expression_names_metrics_that_are_exposed(labels: Mapping[str, set[str]]) -> None:
    used = {name for expression in list_expressions() for name in NAME.findall(expression)}
    assert used and used <= set(labels)
    assert set(labels) - used == set()  # each metric is shown or alerted on


def test_labels_in_legends_and_annotations_exist(labels: Mapping[str, set[str]]) -> None:
    known = set().union(*labels.values())
    for panel in json.loads((FOLDER / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in known
                assert any(label in labels[name] for name in NAME.findall(target["expr"])), target
    for rule in list_rules():
        text = json.dumps(rule["annotations"])
        for label in re.findall(r"\$labels\.(\w+)", text):
            assert any(label in labels[name] for name in NAME.findall(str(rule["expr"]))), rule["alert"]


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(FOLDER / "alerts.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
