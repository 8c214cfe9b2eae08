"""Every number in the tables and totals of every page is that of the command's `--json`, in the page's format."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from typing import Any

import pytest

from broker.app.checks import record_overview
from broker.app.spending import Grouping
from broker.dashboard import content, people_page
from broker.dashboard.chances import JobExpectation
from broker.dashboard.jobs_page import JobFilter, read_jobs, show_list
from broker.dashboard.pages import PAGES
from broker.dashboard.people import list_audit, read_people
from broker.dashboard.plan_page import show_plan
from broker.dashboard.plans import read_plan
from broker.formatting import format_duration, format_hours, format_ms, format_share, format_usd
from broker.locks import hold_lock
from broker.optimizer.explain import show_chance
from broker.serve.files import Load, LoadWindow, ReplicaLoad, write_file
from broker.serve.replicas import find_folder
from broker.server.pages import ADMIN_PAGES
from broker.server.tokens import create_token
from broker.state.limits import Limit, LimitScope
from broker.state.people import Owned, Role
from broker.types import EventKind, Placement, ServiceEventKind
from broker.types.outcomes import make_event
from broker.wording import make_place
from tests.dashboard.conftest import OFFER, PLANNED, Story
from tests.dashboard.test_model import read_json

Rows = Sequence[Mapping[str, str]]
Ask = Callable[..., Any]


class Tables(HTMLParser):
    """The tables of a page by caption, each row by heading; and the cards by title."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[dict[str, str]]] = {}
        self.cards: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._open: list[str] = []
        self._heads: list[str] = []
        self._cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._open.append(tag)
        if tag in ("caption", "th", "td", "dt", "dd"):
            self._texts[tag] = ""
        if tag == "table":
            self._heads = []
        if tag == "tr":
            self._cells = []

    def handle_data(self, data: str) -> None:
        for tag in self._open:
            if tag in self._texts:
                self._texts[tag] += data

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass  # void elements have no end tag
        if tag == "caption":
            self.tables[self._texts["caption"]] = []
        elif tag == "th":
            self._heads.append(self._texts["th"])
        elif tag == "td":
            self._cells.append(self._texts["td"])
        elif tag == "tr" and self._cells:
            self.tables[self._texts["caption"]].append(dict(zip(self._heads, self._cells, strict=True)))
        elif tag == "dd":
            self.cards[self._texts["dt"]] = self._texts["dd"]


@pytest.fixture
def full(story: Story, monkeypatch: pytest.MonkeyPatch) -> Story:
    """The story at one moment, with a row in every table."""
    story.add_planned()
    story.add_service()
    refused = make_place(Placement(offer=OFFER, is_spot=True, node_count=1))
    story.add_event(1, make_event(EventKind.PLACE_REFUSED, place=refused, took_s=2.0, error="no capacity"))
    story.store.refusals.add("aws", "us-east-1", None, "p4d.24xlarge", True, 600.0, "no capacity")
    story.store.owners.put(Owned.JOB, "1", "ada")
    create_token(story.store, user="ada", role=Role.USER, days=1)
    story.store.limits.put(Limit(scope=LimitScope.USER, name="ada", usd_month=120.0, gpus=None))
    story.store.commitments.add(user="ada", project="", kind=Owned.JOB, names=("1",), usd=7.5, usd_hour=2.0, gpus=16.0)
    story.store.audit.add(user="ada", verb="launch_jobs", target="1", outcome="done")
    monkeypatch.setattr("broker.clock.SystemClock.now_s", lambda clock: story.now_s)
    return story


def show_step(step: int | None, total: int | None) -> str:
    return "-" if step is None else f"{step}" + (f"/{total}" if total else "")


def show_share(usage: Any, name: str) -> str:
    return "-" if usage is None else format_share(usage[name])


def check_overview(story: Story, ask: Ask) -> None:
    page, told = Tables(content.OverviewPage().make(story.context)), ask("top")
    running = told["counts"]["RUNNING"]
    assert page.cards == {
        "Today": f"{format_usd(told['today_usd'])} USD",
        "This month": f"{format_usd(told['month_usd'])} USD",
        "This month on-demand": f"{format_usd(told['month_ondemand_usd'])} USD",
        "Saved this month": f"{format_usd(told['month_ondemand_usd'] - told['month_usd'])} USD",
        "Total": f"{format_usd(told['spent_usd'])} USD",
        "Current rate": f"{format_usd(told['usd_hour'])} USD/h",
        "Running jobs": f"{running}",
        "Waiting jobs": f"{told['live_jobs'] - running}",
        "Clusters without a job": f"{len(told['clusters'])}",
    }
    assert page.tables["Live and newest managed jobs"] == [
        {
            "Job": str(each["id"]), "Name": page.tables["Live and newest managed jobs"][number]["Name"],
            "Status": each["status"], "Step": show_step(each["step"], each["total"]),
            "Recoveries": str(max(0, each["starts"] - 1)),
            "Time": format_duration((each["ended_s"] or story.now_s) - each["submitted_s"]),
            "CPU": show_share(each["usage"], "cpu_ratio"), "GPU": show_share(each["usage"], "gpu_ratio"),
            "USD": format_usd(each["spent_usd"]),
        }
        for number, each in enumerate(told["jobs"])
    ]  # fmt: skip
    assert [row["Job"] for row in page.tables["Jobs that require attention"]] == [
        str(each["job_id"]) for each in told["attention"]
    ]
    (limited,), (use,) = page.tables["Budgets and limits"], told["limits"]
    assert list(limited.values()) == [
        f"user {use['limit']['name']}", format_usd(use["used"]["usd"]), format_usd(use["limit"]["usd_month"]),
        f"{use['used']['gpus']:g}", "-",
    ]  # fmt: skip
    assert use["used"]["usd"] > 0 and use["used"]["gpus"] == 16


def check_jobs(story: Story, ask: Ask) -> None:
    found = read_jobs(story.context, choice=JobFilter.ALL)
    rows = {int(row["Job"]): row for row in Tables(show_list(found)).tables["Managed jobs"]}
    told = ask("jobs", "queue", "--all")
    assert len(told) == found.count == len(rows)
    for each in told:
        row, progress = rows[each["id"]], each["progress"] or {}
        assert (row["Status"], row["USD"]) == (each["status"], format_usd(each["spent_usd"]))
        assert row["Step"] == show_step(progress.get("step"), progress.get("total"))
        started = sum(attempt["running_s"] is not None for attempt in each["attempts"])
        assert row["Recoveries"] == str(max(0, started - 1))


def check_clusters(story: Story, ask: Ask) -> None:
    rows = {row["Cluster"]: row for row in Tables(content.make_clusters(story.context)).tables["Clusters"]}
    told = ask("status")["clusters"]
    assert set(rows) == {each["name"] for each in told}
    for each in told:
        row, count = rows[each["name"]], each["placement"]["node_count"]
        assert row["USD"] == format_usd(each["spent_usd"]) and row["Nodes"].startswith(f"{count} x ")
        assert row["USD/h"] == format_usd(sum(node["usd_hour"] for node in each["nodes"]))
        assert row["Age"] == format_duration(story.now_s - each["created_s"])
        assert row["Job"] == ("-" if each["job_id"] is None else str(each["job_id"]))


def check_services(story: Story, ask: Ask) -> None:
    (row,) = Tables(content.make_services(story.context)).tables["Services"]
    page = Tables(content.make_service(story.context, "chat"))
    (told,) = ask("serve", "status")
    ready = sum(each["status"] == "READY" for each in told["replicas"])
    wanted, paid = told["service"]["wanted"], format_usd(told["paid_usd"])
    assert (row["Ready"], row["Version"], row["USD"]) == (f"{ready}/{wanted}", str(told["service"]["version"]), paid)
    assert (page.cards["Replicas ready"], page.cards["Paid"]) == (f"{ready} of {wanted}", f"{paid} USD")
    (shown,), (replica,) = page.tables["Replicas"], told["replicas"]
    assert (shown["Replica"], shown["Job"]) == (str(replica["replica"]["number"]), str(replica["replica"]["job_id"]))
    assert shown["USD/h"] == format_usd(replica["usd_hour"])


def check_loaded_service(story: Story, ask: Ask) -> None:
    """The pages of services while a balancer runs."""
    window = LoadWindow(
        requests=1240, errors=31, qps=20.7, prompt_tokens_s=400.0, completion_tokens_s=1_234.0,
        ttft_p50_s=0.12, ttft_p95_s=0.4, tpot_p50_s=0.021, tpot_p95_s=0.05,
    )  # fmt: skip
    replicas = {1: ReplicaLoad(is_ready=True, in_flight=5, since_s=story.now_s - 60, window=window)}
    load = Load(
        generation=1, time_s=story.now_s, pid=1, arrivals=4_321, in_flight=5, waiting=2, resumed=3, broken=1,
        window=window, replicas=replicas,
    )  # fmt: skip
    (replica,) = story.store.services.list_replicas("chat")
    story.store.services.add_event("chat", ServiceEventKind.REPLICA_READY, replica=1)
    folder = find_folder(story.context.config, story.store.services.list()[0])
    write_file(folder.load, load)
    with hold_lock(folder.lock):
        (row,) = Tables(content.make_services(story.context)).tables["Services"]
        page = Tables(content.make_service(story.context, "chat"))
        (told,) = ask("serve", "status")
    seen, minute = told["load"], told["load"]["window"]
    assert (row["In flight"], row["Requests"]) == (str(seen["in_flight"]), f"{seen['arrivals']:,}")
    assert row["Age"] == format_duration(story.now_s - told["service"]["created_s"])
    expected = {
        "Requests since the balancer started": f"{seen['arrivals']:,}", "In flight": str(seen["in_flight"]),
        "Waiting": str(seen["waiting"]), "Streams resumed": str(seen["resumed"]),
        "Responses broken": str(seen["broken"]), "Requests/s": f"{minute['qps']:.1f}",
        "Failed requests": f"{minute['errors']} of {minute['requests']:,}",
        "Tokens/s": f"{minute['completion_tokens_s']:,.0f}",
        "First token, p50 / p95": f"{format_ms(minute['ttft_p50_s'])} / {format_ms(minute['ttft_p95_s'])}",
        "Each next token, p50 / p95": f"{format_ms(minute['tpot_p50_s'])} / {format_ms(minute['tpot_p95_s'])}",
    }  # fmt: skip
    assert {name: page.cards[name] for name in expected} == expected
    assert seen["arrivals"] == 4_321 and replica.number == 1


def check_one_plan(story: Story, ask: Ask) -> None:
    """Rankings, terms and rejections of the page of a plan."""
    file = story.context.config.home / "task.yaml"
    file.write_text(PLANNED)
    job = story.store.jobs.get(4)
    assert job is not None
    page = Tables(show_plan(read_plan(story.context, job, "")))
    (told,) = ask("plan", str(file), "--top", "1000")
    names = ("USD/h", "USD", "Time", "Preemptions/h", "Deadline")
    ranked = {"Best placements", "Pareto-optimal placements"}
    assert ranked <= set(page.tables)
    known = {
        (
            format_usd(each["usd_hour"]), format_usd(each["expected_usd"]), format_hours(each["expected_hours"]),
            f"{each['preemptions_per_hour']:.3f}",
            "-" if each["deadline_chance"] is None else show_chance(each["deadline_chance"]),
        )
        for each in told["estimates"]
    }  # fmt: skip
    for caption in ranked:
        rows = [tuple(list(row.values())[-5:]) for row in page.tables[caption]]
        assert rows and set(rows) <= known, (caption, names)


def check_places(story: Story, ask: Ask) -> None:
    page, told = Tables(content.make_places(story.context)), ask("locations")
    assert page.tables["Your time on spot"] == [
        {
            "Location": f"{each['row']['cloud']} {each['row']['zone']}", "Type": each["row"]["instance_type"],
            "Stays": str(each["row"]["stays"]), "Hours": f"{each['row']['hours']:.2f}",
            "Preemptions": str(each["row"]["preemptions"]), "Preemptions/h": f"{each['preemptions_per_hour']:.3f}",
            "Refusals in 14 days": str(len(each["refused_s"])), "Spot USD/h": format_usd(each["spot_usd_hour"]),
            "On-demand USD/h": format_usd(each["ondemand_usd_hour"]),
        }
        for each in told["places"]
    ]  # fmt: skip
    (shown,), (refusal,) = page.tables["Current refusals"], told["refusals"]
    assert shown["Expires in"] == format_duration(refusal["expires_s"] - story.now_s)


def check_cost(story: Story, ask: Ask) -> None:
    for by in Grouping:
        page, told = Tables(content.make_cost(story.context, by)), ask("cost", "--by", by.value)
        rows = {row[by.value.capitalize()].partition(" ")[0]: row for row in page.tables["Cost"]}
        assert {key: (row["Node hours"], row["USD"]) for key, row in rows.items()} == {
            row[by.value].partition(" ")[0]: (f"{row['node_hours']:.2f}", format_usd(row["usd"]))
            for row in told["rows"]
        }
    shares = ask("cost", "--by", "day")["shares"]
    assert [
        (row["Day"], row["Cloud"], row["Job or cluster"].partition(" ")[0], row["User"], row["Project"], row["USD"])
        for row in page.tables["Days, clouds and jobs"]
    ] == [
        (each["day"], each["cloud"], each["owner"], each["user"], each["project"], format_usd(each["usd"]))
        for each in shares
    ]
    assert "ada" in {each["user"] for each in shares}
    (paid,), (judged,) = page.tables["Forecasts against actual cost"], ask("cost", "--forecast")
    assert (paid["Job"], paid["Paid USD"]) == (str(judged["job_id"]), format_usd(judged["usd"]))
    assert paid["Forecast USD"] == format_usd(judged["forecast"]["usd_mean"])


def check_clouds(story: Story, ask: Ask) -> None:
    """Its numbers are ages only; `test_pages` compares the recorded results with `broker check --json`."""
    config = story.context.config
    record_overview(config, [("aws", False, "login: none"), ("local", True, "")], now_s=story.now_s - 90)
    assert [(row["Cloud"], row["Checked"]) for row in Tables(content.make_clouds(story.context)).tables["Clouds"]] == [
        ("aws", f"{format_duration(90)} ago"), ("local", f"{format_duration(90)} ago"),
    ]  # fmt: skip


def check_plan(story: Story, ask: Ask) -> None:
    """The list of plans has the IDs of jobs only; `test_pages` compares a plan with `broker plan --json`."""
    shown = content.make_choices(story.context)
    assert all(f'href="/jobs/{each["id"]}/plan"' in shown for each in ask("jobs", "queue", "--all"))


def check_job(story: Story, ask: Ask) -> None:
    page, told = Tables(content.make_job(story.context, 1, JobExpectation()).show("t")), ask("jobs", "why", "1")
    summary = told["summary"]
    assert page.cards == {
        "Status": told["status"],
        "Steps": f"{summary['steps']} of {summary['steps_total']}",
        "Steps lost": f"{summary['steps_lost']} in {summary['recoveries']} recovery",
        "Recovery time": format_duration(summary["recovery_s"]),
        "Time": format_duration(summary["total_s"]),
        "Paid": f"{format_usd(summary['paid_usd'])} USD",
        "Same hours on-demand": f"{format_usd(summary['ondemand_usd'])} USD",
        "Checkpoint": f"step {told['progress']['checkpoint_step']}",
        "Loss": f"{told['progress']['loss']:g}",
    }
    assert summary["paid_usd"] == pytest.approx(told["spent_usd"])
    reached = {each["number"]: each for each in summary["attempts"]}
    assert [
        tuple(row[name] for name in ("Attempt", "Steps", "Checkpoint", "Steps lost", "USD/h", "USD"))
        for row in page.tables["Attempts"]
    ] == [
        (
            str(each["number"]), f"{steps['first_step']} to {steps['last_step']}", str(steps["checkpoint_step"]),
            str(steps["steps_lost"]), format_usd(OFFER.spot_usd_hour * each["placement"]["node_count"]),
            format_usd(each["usd"]),
        )
        for each in told["attempts"]
        for steps in [reached[each["number"]]]
    ]  # fmt: skip
    assert sum(each["steps_lost"] for each in summary["attempts"]) == summary["steps_lost"] == 10
    assert sum(each["usd"] for each in told["attempts"]) == pytest.approx(summary["paid_usd"])
    assert [row["Time"] for row in page.tables["Events"]] == [
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["time_s"])) for each in reversed(told["events"])
    ]
    planned = Tables(content.make_job(story.context, 4, JobExpectation()).show("t"))
    decisions = [each["data"] for each in reversed(ask("jobs", "why", "4")["events"]) if each["kind"] == "decision"]
    assert [row["Work left"] for row in planned.tables["Decisions of the spot policy"]] == [
        f"{each['work_left_hours']:.1f} h" for each in decisions
    ]
    assert planned.cards["Deadline"] != "-" and format_hours(24.0) not in planned.cards["Deadline"]


def check_users(story: Story, ask: Ask) -> None:
    page = Tables(people_page.show_people(read_people(story.context), story.now_s))
    assert [
        (row["Valid tokens"], row["Live jobs"], row["Jobs"], row["Clusters"], row["USD this month"])
        for row in page.tables["Users"]
    ] == [
        (
            str(each["token_count"]), str(each["live_jobs"]), str(each["jobs"]), str(each["clusters"]),
            format_usd(each["month_usd"]),
        )
        for each in ask("server", "users")
    ]  # fmt: skip


def check_audit(story: Story, ask: Ask) -> None:
    shown = people_page.show_audit(
        list_audit(story.context, user="", verb="", outcome=""), user="", verb="", outcome=""
    )
    (row,), (told,) = Tables(shown).tables["Audit"], ask("server", "audit")
    assert (row["User"], row["Verb"], row["Target"], row["Outcome"]) == tuple(
        told[name] for name in ("user", "verb", "target", "outcome")
    )


CHECKS: dict[str, Callable[[Story, Ask], None]] = {
    "/": check_overview, "/jobs": check_jobs, "/clusters": check_clusters, "/services": check_services,
    "/plan": check_plan, "/places": check_places, "/cost": check_cost, "/clouds": check_clouds,
    "/admin/users": check_users, "/admin/audit": check_audit,
}  # fmt: skip


def test_each_number_of_each_page_equals_json(full: Story, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*arguments: str) -> Any:
        return read_json(capsys, *arguments)

    assert set(CHECKS) == {*PAGES, *ADMIN_PAGES}, "a page without a comparison"
    for check in (*CHECKS.values(), check_job, check_one_plan, check_loaded_service):
        check(full, ask)
