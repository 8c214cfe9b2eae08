"""`/metrics` is what Prometheus reads."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from broker.dashboard import node_metrics
from broker.dashboard.metrics import PLACES_S, MetricsPage, render_metrics
from broker.dashboard.model import list_places, read_overview
from broker.dashboard.node_metrics import list_nodes
from broker.types import Progress
from tests.dashboard.conftest import Story, make_sample

LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*)\})? (-?[0-9.e+-]+)')


def read_samples(text: str) -> dict[tuple[str, str], float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, line
            found[match[1], match[2] or ""] = float(match[3])
    return found


def test_every_line_can_be_read_and_the_figures_hold(story: Story) -> None:
    overview = read_overview(story.context)
    samples = read_samples(render_metrics(overview, list_places(story.store)))
    assert samples["broker_jobs", 'status="RUNNING"'] == 1
    assert samples["broker_job_step", 'job="1"'] == 31
    assert samples["broker_job_progress_ratio", 'job="1"'] == pytest.approx(0.31)
    assert samples["broker_spend_usd_total", ""] == pytest.approx(overview.spent_usd)
    assert samples["broker_job_recoveries_total", 'job="1"'] == 1
    (preempted,) = [value for (name, _), value in samples.items() if name == "broker_preemptions_total"]
    assert preempted == 1


def test_jobs_that_ended_long_ago_have_no_series(story: Story) -> None:
    overview = read_overview(story.context)
    assert 'job="3"' in render_metrics(overview, ())
    text = render_metrics(replace(overview, now_s=overview.now_s + 7200), ())
    assert 'broker_job_info{job="1"' in text and 'job="3"' not in text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_accepts_the_page(story: Story) -> None:
    text = MetricsPage().render(story.context)
    assert "broker_node_gpu_errors_total" in text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nodes_have_series_while_they_report_within_both_bounds(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = read_samples(MetricsPage().render(story.context))
    assert samples["broker_node_cpu_ratio", 'job="1",node="0"'] == make_sample(story.now_s, 0).cpu_ratio
    assert samples["broker_node_gpu_power_watts", 'job="1",node="1",gpu="1"'] == 512.4
    assert samples["broker_node_gpu_errors_total", 'job="1",node="0",xid="79"'] == 1
    logs = story.context.config.logs
    assert list_nodes(logs, [2, 3], now_s=story.now_s) == []  # no live job
    assert list_nodes(logs, [1], now_s=story.now_s + 300) == []  # nothing was heard for five minutes
    monkeypatch.setattr(node_metrics, "GPUS_MAX", 3)
    assert [row.rank for row in list_nodes(logs, [1], now_s=story.now_s)] == [0]
    monkeypatch.setattr(node_metrics, "GPUS_MAX", 256)
    monkeypatch.setattr(node_metrics, "NODES_MAX", 1)
    assert [row.rank for row in list_nodes(logs, [1], now_s=story.now_s)] == [0]


def test_places_are_summed_once_a_minute_and_jobs_at_every_scrape(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [story.now_s]
    monkeypatch.setattr("broker.clock.SystemClock.now_s", lambda clock: now_s[0])
    page = MetricsPage()

    def read() -> tuple[float, float]:
        samples = read_samples(page.render(story.context))
        (preempted,) = [value for (name, _), value in samples.items() if name == "broker_preemptions_total"]
        return preempted, samples["broker_job_step", 'job="1"']

    assert read() == (1, 31)
    story.add_attempt(story.add_job("again"), 1, begin_s=story.now_s - 600, end_s=story.now_s - 60)
    story.store.jobs.set_progress(1, Progress(step=32, total=100))
    assert read() == (1, 32)
    now_s[0] += PLACES_S
    assert read() == (2, 32)
