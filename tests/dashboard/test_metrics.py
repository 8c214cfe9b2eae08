"""`/metrics` is what Prometheus reads."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from broker.app.services import ServiceLine
from broker.dashboard import node_metrics
from broker.dashboard.families import render_families
from broker.dashboard.job_metrics import CHANCES_AT_ONCE, count_repeated, count_unsaved
from broker.dashboard.metrics import ENDED_S, PLACES_S, MetricsPage, list_families
from broker.dashboard.model import list_places, read_overview
from broker.dashboard.node_metrics import list_nodes
from broker.dashboard.service_metrics import list_service_families
from broker.serve.files import DurationCounts, LoadTotals, LoadWindow
from broker.state.daemon_stats import DaemonStats
from broker.state.history import AttemptWork, HistoryRows, StepRange
from broker.task.loader import load_tasks_text
from broker.types import EventKind, Goal, JobStatus, Progress
from broker.types.outcomes import make_event
from broker.wording import make_place
from tests.cli.test_serve_top import make_line
from tests.dashboard.conftest import PLACEMENT, PLANNED, TASK, Story, make_sample

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
    samples = read_samples(render_families(list_families(overview, list_places(story.store))))
    assert samples["broker_jobs", 'status="RUNNING"'] == 1
    assert samples["broker_job_step", 'job="1"'] == 31
    assert samples["broker_job_progress_ratio", 'job="1"'] == pytest.approx(0.31)
    assert samples["broker_spend_usd_total", ""] == pytest.approx(overview.spent_usd)
    assert samples["broker_job_recoveries_total", 'job="1"'] == 1
    (preempted,) = [value for (name, _), value in samples.items() if name == "broker_preemptions_total"]
    assert preempted == 1


def make_service_line() -> ServiceLine:
    """Make a service with a replica that serves and one that starts, and the load of a minute."""
    line = make_line(
        LoadWindow(
            requests=40, errors=4, prompt_tokens_s=900.0, completion_tokens_s=120.0, ttft_p50_s=0.2, ttft_p95_s=0.5
        )
    )
    assert line.load is not None
    totals = LoadTotals(
        responses={"200": 380, "503": 4}, prompt_tokens=9000, completion_tokens=1200,
        first_token=DurationCounts(counts=(0, 3, 9, *(0,) * 7, 1), sum_s=75.5),
        request=DurationCounts(counts=(380, *(0,) * 10, 4), sum_s=1500.0),
    )  # fmt: skip
    load = replace(line.load, arrivals=400, waiting=3, resumed=2, totals=totals, certificate_ends_s=2e9)
    return replace(line, load=load)


def test_services_have_their_load_and_replicas() -> None:
    line = make_service_line()
    samples = read_samples(render_families(list_service_families([line])))
    name = f'service="{line.service.name}"'
    assert sum(value for (metric, _), value in samples.items() if metric == "broker_service_replicas") == len(
        line.replicas
    )
    assert line.load is not None
    expected = {
        "requests_total": 400, "waiting": 3, "streams_resumed_total": 2, "error_ratio": 0.1,
        "in_flight": line.load.in_flight, "spend_usd_total": line.paid_usd,
        "certificate_expiry_timestamp_seconds": 2e9,
    }  # fmt: skip
    assert {key: samples[f"broker_service_{key}", name] for key in expected} == pytest.approx(expected)
    assert samples["broker_service_tokens_total", f'{name},kind="prompt"'] == 9000
    assert samples["broker_service_responses_total", f'{name},code="503"'] == 4
    first, took = "broker_service_time_to_first_token_seconds", "broker_service_request_seconds"
    assert [samples[f"{first}_bucket", f'{name},le="{le}"'] for le in ("0.05", "0.1", "0.25", "60", "+Inf")] == [
        0, 3, 12, 12, 13,
    ]  # fmt: skip
    assert (samples[f"{first}_sum", name], samples[f"{first}_count", name]) == (75.5, 13)
    assert (samples[f"{took}_bucket", f'{name},le="300"'], samples[f"{took}_count", name]) == (380, 384)
    older = replace(line, load=replace(line.load, totals=LoadTotals()))  # a gateway of an earlier release
    assert "responses_total" not in render_families(list_service_families([older]))
    idle = render_families(list_service_families([replace(line, load=None)]))  # its balancer does not run
    assert "requests" not in idle and "broker_service_replicas" in idle


def test_loss_budget_and_savings_equal_the_overview(story: Story) -> None:
    job_id = story.store.jobs.add("bounded", replace(TASK, goal=Goal(budget_usd=50.0))).id
    story.add_attempt(job_id, 1, begin_s=story.now_s - 3600, end_s=story.now_s)  # 2 USD
    samples = read_samples(MetricsPage().render(story.context))
    assert samples["broker_job_loss", 'job="1"'] == 2.25
    assert samples["broker_job_budget_used_ratio", f'job="{job_id}"'] == pytest.approx(0.04)
    assert ("broker_job_budget_used_ratio", 'job="1"') not in samples  # it has no budget
    overview = read_overview(story.context)
    assert overview.month_ondemand_usd is not None
    assert samples["broker_month_on_demand_usd", ""] == pytest.approx(overview.month_ondemand_usd, rel=1e-2)
    assert samples["broker_month_spend_usd", ""] == pytest.approx(overview.month_usd, rel=1e-2)


def test_jobs_that_ended_long_ago_have_no_series(story: Story) -> None:
    overview = read_overview(story.context)
    assert 'job="3"' in render_families(list_families(overview, ()))
    text = render_families(list_families(replace(overview, now_s=overview.now_s + 7200), ()))
    assert 'broker_job_info{job="1"' in text and 'job="3"' not in text


def test_launches_and_recoveries_are_counted_from_their_events_once(story: Story) -> None:
    place = make_place(PLACEMENT)
    cloud = PLACEMENT.offer.cloud
    story.add_event(1, make_event(EventKind.PLACE_REFUSED, place=place, took_s=3.0, error="no capacity"))
    story.add_event(1, make_event(EventKind.PLACE_WHOLE, place=place, took_s=95.0))
    story.add_event(1, make_event(EventKind.RECOVERED, step=31, took_s=61.0))
    story.add_event(1, make_event(EventKind.NOTICED, rank=1, place=place))
    page = MetricsPage()
    for _ in range(2):
        samples = read_samples(page.render(story.context))
        assert samples["broker_tries_total", f'cloud="{cloud}",outcome="refused"'] == 1
        assert samples["broker_tries_total", f'cloud="{cloud}",outcome="created"'] == 1
        (refused,) = [value for (name, _), value in samples.items() if name == "broker_refusals_total"]
        (announced,) = [value for (name, _), value in samples.items() if name == "broker_notices_total"]
        assert refused == announced == 1
        buckets = [
            samples["broker_provision_seconds_bucket", f'cloud="{cloud}",le="{le}"'] for le in ("60", "120", "+Inf")
        ]
        assert buckets == [0, 1, 1]
        assert samples["broker_provision_seconds_sum", f'cloud="{cloud}"'] == 95.0
        assert samples["broker_recovery_seconds_count", ""] == 1
    story.add_event(1, make_event(EventKind.PLACE_WHOLE, place=place, took_s=200.0))
    samples = read_samples(page.render(story.context))
    assert samples["broker_provision_seconds_count", f'cloud="{cloud}"'] == 2


def test_steps_at_risk_and_repeated_steps(story: Story) -> None:
    samples = read_samples(MetricsPage().render(story.context))
    assert samples["broker_job_unsaved_steps", 'job="1"'] == 1
    assert samples["broker_job_repeated_steps_total", 'job="1"'] == 10  # 31 to 40
    first = StepRange(first_step=1, last_step=45, checkpoint_step=30)
    second = StepRange(first_step=31, last_step=60, checkpoint_step=None)
    assert (count_unsaved(second), count_repeated([first, second])) == (30, 15)
    saved = StepRange(first_step=1, last_step=9, checkpoint_step=9)
    assert (count_unsaved(saved), count_repeated([saved])) == (0, 0)


def test_age_of_the_checkpoint_and_lost_work_follow_the_attempts(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    page, saved_s = MetricsPage(), story.now_s - 3600 + 1900 + 600  # in the second attempt
    now_s = [story.now_s]
    monkeypatch.setattr("broker.clock.SystemClock.now_s", lambda clock: now_s[0])
    read: list[list[int]] = []
    list_work = HistoryRows.list_work

    def note(rows: HistoryRows, jobs: Sequence[int]) -> Mapping[int, Sequence[AttemptWork]]:
        read.append([*jobs])
        return list_work(rows, jobs)

    monkeypatch.setattr(HistoryRows, "list_work", note)

    def scrape() -> tuple[object, object]:
        samples = read_samples(page.render(story.context))
        age_s = samples.get(("broker_job_checkpoint_age_seconds", 'job="1"'))
        return age_s, samples.get(("broker_job_lost_work_seconds_total", 'job="1"'))

    lost_s = 10 * 1740 / 40  # steps 31 to 40, of 40 steps in the 1,740 s of the first attempt
    assert scrape() == (pytest.approx(story.now_s - saved_s), pytest.approx(lost_s))
    now_s[0] += 60
    story.store.jobs.set_progress(1, Progress(step=33, total=100, checkpoint_step=30))
    assert scrape() == (pytest.approx(story.now_s + 60 - saved_s), pytest.approx(lost_s))
    assert read == [[1], []], "no new attempt and no new checkpoint: nothing is read again"
    attempt = story.store.jobs.list_attempts(1)[-1]
    story.store.jobs.put_attempt(replace(attempt, saved_s=now_s[0] - 5))
    story.store.jobs.set_progress(1, Progress(step=50, total=100, checkpoint_step=50))
    assert scrape() == (pytest.approx(5.0), pytest.approx(lost_s)) and read[-1] == [1]
    story.store.jobs.set_status(1, JobStatus.SUCCEEDED)
    assert scrape() == (None, pytest.approx(lost_s))
    now_s[0] += ENDED_S
    assert scrape() == (None, None)


def test_on_demand_total_outlives_the_bills(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> float:
        return read_samples(MetricsPage().render(story.context))["broker_spend_on_demand_usd_total", ""]

    before_usd = read()
    assert before_usd == pytest.approx(story.store.bills.ondemand_since_usd(0.0, now_s=story.now_s), rel=1e-2)
    assert before_usd > read_overview(story.context).spent_usd
    story.store.retention.compact(ended_jobs_max=0)
    assert read() >= before_usd


def test_spending_by_cloud_adds_up_and_the_daemon_is_seen(story: Story) -> None:
    samples = read_samples(MetricsPage().render(story.context))
    clouds = [value for (name, _), value in samples.items() if name == "broker_cloud_spend_usd_total"]
    assert sum(clouds) == pytest.approx(samples["broker_spend_usd_total", ""], rel=1e-3)
    assert samples["broker_controllers", ""] == 0
    story.store.leader.lead()
    samples = read_samples(MetricsPage().render(story.context))
    assert samples["broker_controllers", ""] == 1 and samples["broker_daemon_heartbeat_age_seconds", ""] < 300
    assert not any(name.startswith("broker_daemon_step") for name, _ in samples)
    story.store.leader.beat(DaemonStats(step_counts=(3, 2, 0, 0, 0, 1, 0, 0), step_s=2.5, failures=4, lag_s=0.25))
    samples = read_samples(MetricsPage().render(story.context))
    buckets = {
        le: samples["broker_daemon_step_seconds_bucket", f'controller="leader",le="{le}"'] for le in (0.01, 1, 5)
    }
    assert buckets == {0.01: 3, 1: 5, 5: 6}
    assert samples["broker_daemon_step_seconds_sum", 'controller="leader"'] == 2.5
    assert samples["broker_daemon_errors_total", 'controller="leader"'] == 4
    assert samples["broker_daemon_lag_seconds", 'controller="leader"'] == 0.25
    assert samples["broker_daemon_epoch", ""] == story.store.leader.read_epoch() > 0


def test_chances_of_deadlines_are_computed_in_turn(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = load_tasks_text(PLANNED, "task.yaml")
    jobs = [story.store.jobs.add(f"due {number}", task).id for number in range(3)]
    now_s = [story.now_s]
    monkeypatch.setattr("broker.clock.SystemClock.now_s", lambda clock: now_s[0])
    page = MetricsPage()

    def list_known() -> set[str]:
        return {labels for name, labels in read_samples(page.render(story.context)) if "deadline_chance" in name}

    assert len(list_known()) == CHANCES_AT_ONCE
    assert list_known() == {f'job="{job_id}"' for job_id in jobs}
    story.store.jobs.set_status(jobs[0], JobStatus.SUCCEEDED)
    assert len(list_known()) == 2, "an ended job has none"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_accepts_the_page(story: Story) -> None:
    text = MetricsPage().render(story.context) + render_families(list_service_families([make_service_line()]))
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
    assert list_nodes(logs, [1], now_s=story.now_s + 300) == []  # no reports for five minutes
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


def test_each_figure_has_the_name_of_what_it_measures(story: Story) -> None:
    """Alerts name these series: one with the value of another would never fire, or always."""
    overview = read_overview(story.context)
    known = replace(
        overview, spent_usd=101.0, month_usd=102.0, month_ondemand_usd=103.0, usd_hour=104.0,
        attention=overview.attention[:1] * 3, counts={"RUNNING": 7, "FAILED": 2},
    )  # fmt: skip
    values = {each.name: [value for _, value in each.samples] for each in list_families(known, [])}
    assert values["broker_spend_usd_total"] == [101.0] and values["broker_month_spend_usd"] == [102.0]
    assert values["broker_month_on_demand_usd"] == [103.0] and values["broker_price_usd_per_hour"] == [104.0]
    assert values["broker_attention_jobs"] == [3.0] and sorted(values["broker_jobs"]) == [2.0, 7.0]
