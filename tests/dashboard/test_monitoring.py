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

from broker.dashboard.families import render_families
from broker.dashboard.metrics import MetricsPage
from broker.dashboard.service_metrics import list_service_families
from broker.state.daemon_stats import DaemonStats
from broker.task.loader import load_tasks_text
from broker.types import EventKind, Goal, Progress
from broker.types.outcomes import make_event
from broker.wording import make_place
from tests.dashboard.conftest import PLACEMENT, PLANNED, TASK, Story
from tests.dashboard.test_metrics import make_service_line, read_samples

FOLDER = Path(__file__).parent.parent.parent / "docs" / "monitoring"
BOUNDED = replace(TASK, goal=Goal(budget_usd=50.0))
NAME = re.compile(r"\bbroker_[a-z_]+")


@pytest.fixture
def labels(story: Story) -> Mapping[str, set[str]]:
    """The labels of each family, from the first sample."""
    story.store.jobs.set_progress(story.store.jobs.add("bounded", BOUNDED).id, Progress(step=1, loss=2.0))
    story.store.jobs.add("due", load_tasks_text(PLANNED, "task.yaml")[0])
    story.store.leader.lead()
    story.store.leader.beat(DaemonStats())
    place = make_place(PLACEMENT)
    story.add_event(1, make_event(EventKind.PLACE_REFUSED, place=place, took_s=3.0, error="no capacity"))
    story.add_event(1, make_event(EventKind.PLACE_WHOLE, place=place, took_s=95.0))
    story.add_event(1, make_event(EventKind.RECOVERED, step=31, took_s=61.0))
    story.add_event(1, make_event(EventKind.NOTICED, rank=1, place=place))
    text = MetricsPage().render(story.context) + render_families(list_service_families([make_service_line()]))
    found: dict[str, set[str]] = {}
    for name, labels in read_samples(text):
        if not name.endswith(("_sum", "_count")):
            found.setdefault(name, set(re.findall(r'([a-z_]+)="', labels)))
    return found


def list_rules() -> list[dict[str, object]]:
    return [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def list_shown() -> Iterator[str]:
    for panel in json.loads((FOLDER / "grafana.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def list_expressions() -> Iterator[str]:
    yield from list_shown()
    yield from (str(rule["expr"]) for rule in list_rules())


def test_every_expression_names_metrics_that_are_exposed(labels: Mapping[str, set[str]]) -> None:
    used = {name for expression in list_expressions() for name in NAME.findall(expression)}
    assert used and used <= set(labels)
    shown = {name for expression in list_shown() for name in NAME.findall(expression)}
    assert set(labels) - shown == set(), "also those that are alerted on"


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
