"""Plans, services, cost, clouds and the charts of a job: what they show equals `--json`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.app.checks import CheckedItem, read_checks, record_findings, record_overview
from broker.app.forecasts import list_paid
from broker.app.gateways import GatewayLine
from broker.app.services import describe_services, list_service_events
from broker.app.spending import Grouping, read_day_shares, read_spending
from broker.cli.main import main
from broker.cli.serve_top import describe_service
from broker.dashboard import content, pages
from broker.dashboard.cloud_page import show_clouds
from broker.dashboard.cost_page import show_cost
from broker.dashboard.model import read_job
from broker.dashboard.plan_page import show_plan
from broker.dashboard.plans import read_plan
from broker.dashboard.progress import draw_losses, draw_steps, read_losses
from broker.dashboard.service_page import show_service, show_services
from broker.dashboard.timeline import draw_timeline
from broker.formatting import format_duration, format_hours, format_usd
from broker.state.jobs import REPLICA_REQUEST
from broker.types import EventKind, Job
from broker.types.outcomes import make_event
from broker.wording import make_place
from tests.cli.test_serve_top import make_line
from tests.dashboard.conftest import HOSTILE, OFFER, PLACEMENT, PLANNED, TASK, Story
from tests.dashboard.test_model import read_json

PLANNED_ID = 4


@pytest.fixture
def frozen(story: Story, monkeypatch: pytest.MonkeyPatch) -> Story:
    """The story at one moment, with a job that follows a deadline and a service."""
    story.add_planned()
    story.add_service()
    monkeypatch.setattr("broker.clock.SystemClock.now_s", lambda clock: story.now_s)
    return story


def get_job(story: Story, job_id: int) -> Job:
    job = story.store.jobs.get(job_id)
    assert job is not None
    return job


def test_the_plan_page_equals_the_plan_command(
    frozen: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(PLANNED)
    change = "work=20h, use_spot=false"
    with pytest.raises(SystemExit, match=r"^0$"):
        main(("plan", str(file), "--what-if", change, "--json"))
    (told,) = json.loads(capsys.readouterr().out)
    page = read_plan(frozen.context, get_job(frozen, PLANNED_ID), change)
    assert len(page.plan.estimates) == told["candidates"]
    assert [each.expected_usd for each in page.top] == [each["expected_usd"] for each in told["estimates"]]
    assert [each.expected_hours for each in page.top] == [each["expected_hours"] for each in told["estimates"]]
    assert page.changed is not None
    assert page.changed.choice.expected_usd == told["what_if"][0]["choice"]["expected_usd"]
    shown = show_plan(page)
    for estimate in (told["choice"], told["what_if"][0]["choice"]):
        assert f">{format_usd(estimate['expected_usd'])}</td>" in shown
        assert f">{format_hours(estimate['expected_hours'])}</td>" in shown
    assert "expected preemptions" in shown and "<svg" in shown


def test_a_change_that_cannot_be_planned_gives_the_reason(frozen: Story) -> None:
    job = get_job(frozen, PLANNED_ID)
    before = frozen.store.events.get_newest_id()
    for change, reason in (("dedline=3h", "did you mean `deadline`"), (f"cloud={HOSTILE}", "&lt;script&gt;")):
        page = read_plan(frozen.context, job, change)
        assert page.changed is None and reason in show_plan(page) and "cannot be planned" in show_plan(page)
    assert frozen.store.events.get_newest_id() == before


def test_the_frontier_is_that_of_all_placements_if_the_plot_has_only_some(
    frozen: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = get_job(frozen, PLANNED_ID)
    whole = read_plan(frozen.context, job, "")
    monkeypatch.setattr("broker.dashboard.plans.POINTS_MAX", 1)
    cut = read_plan(frozen.context, job, "")
    assert len(cut.points) == 1 < len(whole.frontier)
    assert cut.frontier == whole.frontier
    note = f"The plot has the first 1 of {len(whole.points):,} placements"
    assert note in show_plan(cut) and "The plot has" not in show_plan(whole)


def test_the_service_pages_equal_the_status_command(frozen: Story, capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = read_json(capsys, "serve", "status")  # type: ignore[misc]
    (line,) = describe_services(frozen.context)
    listed = show_services([line], frozen.now_s)
    detail = show_service(line, list_service_events(frozen.context, "chat"), frozen.now_s)
    assert told["endpoint"] in listed and told["endpoint"] in detail
    assert f"0/{told['service']['wanted']}" in listed
    (replica,) = told["replicas"]
    assert replica["status"] in detail and f'href="/jobs/{replica["replica"]["job_id"]}"' in detail
    assert f">{format_usd(told['paid_usd'])} USD<" in detail and f">{format_usd(told['paid_usd'])}</td>" in listed
    assert "exit code 1: &lt;script&gt;" in detail and "<script" not in detail and "\x1b" not in detail
    assert "balancer is not running" in detail


def test_a_service_has_paid_for_replicas_that_were_replaced_and_pays_nothing_for_failed_ones(frozen: Story) -> None:
    service = frozen.store.services.list()[0]
    (replica,) = frozen.store.services.list_replicas("chat")
    request = f"{REPLICA_REQUEST}chat/{service.uid}/0"
    replaced = frozen.store.jobs.add("chat-0", TASK, request_id=request).id
    for job_id in (replaced, replica.job_id):
        frozen.add_attempt(job_id, 1, begin_s=frozen.now_s - 3600, end_s=frozen.now_s - 1800)
    (line,) = describe_services(frozen.context)
    assert line.paid_usd == pytest.approx(2 * 1.0)
    (shown,) = line.replicas
    assert shown.usd_hour == 0.0 and OFFER.cloud in shown.place


def test_serve_why_and_the_page_tell_how_replicas_lost_machines_and_recovered(
    frozen: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    service = frozen.store.services.list()[0]
    prefix = f"{REPLICA_REQUEST}chat/{service.uid}/"
    job_id = frozen.store.jobs.add("chat-7", TASK, request_id=f"{prefix}7").id
    gateway = frozen.store.jobs.add("gateway", TASK, request_id=f"{prefix}gateway-1/0").id
    place = dict(make_place(PLACEMENT))
    lost = make_event(EventKind.ATTEMPT_LOST, outcome="preempted", detail="node 0 gone")
    for number in (1, 2):
        frozen.add_event(job_id, make_event(EventKind.ATTEMPT, number=number, place=place, usd_hour=1.0))
        frozen.add_event(job_id, lost)
    frozen.add_event(gateway, lost)
    story: Any = read_json(capsys, "serve", "why", "chat")
    seen = [(each["kind"], each["message"]) for each in story["events"] if each["replica"] == 7]
    preempted = ("REPLICA_LOST", "replica 7: preempted: node 0 gone")
    attempt = seen[1][1]
    assert seen == [preempted, ("REPLICA_RECOVERING", attempt), preempted]
    assert attempt.startswith("replica 7: attempt 2: ")
    assert content.make_service(frozen.context, "chat").count(attempt) == 1


def test_the_service_page_has_the_load_of_the_last_minute_as_serve_top_has_it(frozen: Story) -> None:
    line = make_line()
    told = describe_service(line)
    detail = show_service(line, [], frozen.now_s)
    for name, text in {
        "First token, p50 / p95": "120ms / 400ms",
        "Failed requests": "1 of 120",
        "USD per million tokens": format_usd(told["usd_per_million_tokens"]),  # type: ignore[arg-type]
        "Current rate": f"{format_usd(told['usd_hour'])} USD/h",  # type: ignore[arg-type]
    }.items():
        assert f"<dt>{name}</dt><dd>{text}</dd>" in detail
    assert "First token" not in show_service(replace(line, load=None), [], frozen.now_s)


def test_service_page_shows_gateways_with_their_endpoints_jobs_and_reasons(frozen: Story) -> None:
    (line,) = describe_services(frozen.context)
    gateway = GatewayLine(
        number=2, job_id=7, status="LOST", endpoint="198.51.100.7:30001", place="aws/us-east-1a on-demand",
        usd_hour=0.08, load=None, error=HOSTILE,
    )  # fmt: skip
    assert line.endpoint == "127.0.0.1:30001"
    with_gateway = replace(line, gateways=(replace(gateway, number=1, endpoint="", status="PENDING"), gateway))
    detail = show_service(with_gateway, [], frozen.now_s)
    assert "Gateways" not in show_service(line, [], frozen.now_s)
    assert (
        "198.51.100.7:30001" in detail and 'href="/jobs/7"' in detail and "LOST" in detail and "<script" not in detail
    )
    assert with_gateway.endpoint == "198.51.100.7:30001"
    assert replace(with_gateway, gateways=with_gateway.gateways[:1]).endpoint == "-"


def test_days_clouds_and_jobs_sum_to_the_cost_command(frozen: Story, capsys: pytest.CaptureFixture[str]) -> None:
    shares = read_day_shares(frozen.store, frozen.now_s)
    for by, key in ((Grouping.DAY, "day"), (Grouping.CLOUD, "cloud"), (Grouping.JOB, "owner")):
        told = {row[by.value]: row["usd"] for row in read_json(capsys, "cost", "--by", by.value)["rows"]}  # type: ignore[index]
        sums: dict[str, float] = defaultdict(float)
        for share in shares:
            sums[getattr(share, key)] += share.usd
        assert dict(sums) == pytest.approx(told)


def test_forecasts_are_compared_with_what_succeeded_jobs_cost(frozen: Story) -> None:
    (found,) = list_paid(frozen.context)
    assert (found.job_id, found.forecast_usd) == (PLANNED_ID, 1.6)
    assert found.paid_usd == pytest.approx(2.0) and found.ratio == pytest.approx(1.25)
    spending = read_spending(frozen.store, Grouping.JOB, frozen.now_s)
    shown = show_cost(Grouping.JOB, spending, {PLANNED_ID: HOSTILE}, (), [found])
    assert ">1.25</td>" in shown and "<script" not in shown


def test_a_check_is_recorded_and_shown_with_its_commands(frozen: Story) -> None:
    config = frozen.context.config
    assert "No check is recorded" in show_clouds(read_checks(config), frozen.now_s)
    record_findings(
        config,
        "aws",
        [CheckedItem(name="login", is_ok=False, note=HOSTILE, command="aws configure")],
        now_s=frozen.now_s,
    )
    record_overview(config, [("aws", False, "login: none"), ("local", True, "this machine")], now_s=frozen.now_s + 60)
    shown = show_clouds(read_checks(config), frozen.now_s + 120)
    assert "<code>aws configure</code>" in shown and "this machine" in shown and "&lt;script&gt;" in shown
    assert f"{format_duration(60)} ago" in shown and f"{format_duration(120)} ago" in shown
    (config.home / "checks.json").write_text("{damaged")
    assert "No check is recorded" in show_clouds(read_checks(config), frozen.now_s)


def test_the_check_command_records_what_it_prints(
    frozen: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "absent"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(SystemExit, match=r"^5$"):  # no login
        main(("check", "aws", "--json"))
    told = json.loads(capsys.readouterr().out)
    known = read_checks(frozen.context.config).clouds["aws"]
    assert told and not known.can_launch
    assert [(each.name, each.note, each.command) for each in known.findings] == [
        (each["name"], each["note"], each["command"]) for each in told
    ]


def test_decisions_are_shown_with_every_number(frozen: Story, capsys: pytest.CaptureFixture[str]) -> None:
    events = read_json(capsys, "jobs", "why", str(PLANNED_ID))["events"]  # type: ignore[index]
    decisions = [event["data"] for event in events if event["kind"] == "decision"]
    shown = pages.show_job(read_job(frozen.context, get_job(frozen, PLANNED_ID)), []).show("t")
    for data in decisions:
        for name, usd in data["expected_usd"].items():
            assert f"{name}: {usd:.2f}" in shown
        assert f">{data['work_left_hours']:.1f} h</td>" in shown and f">{data['spare_hours']:.1f} h</td>" in shown
    assert len(re.findall("spot is worth its start", shown)) >= 2 * len(decisions)  # in the table and in the events


def test_lost_steps_are_hatched_where_they_were_lost(frozen: Story) -> None:
    page = read_job(frozen.context, get_job(frozen, 1))
    lines = [f"step {step}/100  loss {4 - step / 40:.4f}  9 tokens/s" for step in (10, 20, 30, 40, 30, 31)]
    steps, losses = draw_steps(page), draw_losses(page, lines)
    assert steps is not None and "attempt 1: 10 steps lost" in steps and "checkpoint of attempt 1: step 30" in steps
    assert losses is not None and "steps 31 to 40 were lost" in losses
    assert losses.count("<polyline") == 2  # the curve is cut where the second attempt resumed
    assert draw_losses(page, ["loss", HOSTILE]) is None


def test_losses_are_read_from_the_lines_of_trainers_only() -> None:
    assert read_losses(
        ["step 1/4  loss 2.5  10 tokens/s", "step 2/4  saved  loss 1e-3", "loss 3", "step x loss 1"]
    ) == [[(1, 2.5), (2, 0.001)]]
    assert read_losses(["step 1  loss nan", "step 1  loss " + "9" * 400]) == []


def test_the_timeline_has_the_price_of_each_attempt_and_that_of_on_demand(frozen: Story) -> None:
    page = read_job(frozen.context, get_job(frozen, 1))
    shown = draw_timeline(page)
    for row in page.attempts:
        placement = row.attempt.placement
        full = (placement.offer.ondemand_usd_hour or 0.0) * placement.node_count
        tip = (
            f"Attempt {row.attempt.number}: {format_usd(placement.usd_hour)} USD/h; on-demand {format_usd(full)} USD/h"
        )
        assert tip in shown
    bars = [float(each) for each in re.findall(r'height="([0-9.]+)" class="price spot"', shown)]
    assert bars == pytest.approx([64 * 2 / 6] * 2, abs=0.1)  # two nodes of 1 USD, on-demand 3


def test_a_step_that_is_repeated_at_once_begins_another_curve() -> None:
    lines = ["step 1/4  loss 2.5", "step 2/4  loss 2.25", "step 2/4  loss 2.0", "step 3/4  loss 1.5"]
    assert read_losses(lines) == [[(1, 2.5), (2, 2.25)], [(2, 2.0), (3, 1.5)]]
