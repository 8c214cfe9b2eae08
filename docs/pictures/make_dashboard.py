"""Take the pictures of docs/DASHBOARD.md: `python docs/pictures/make_dashboard.py`.

Serves a state folder with made-up jobs and opens its pages in Chromium (Debian: chromium), light and dark. PNGs have
few colours, so they stay small; together they are at most 600 kB.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.dashboard.conftest import Served, Story

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
BYTES_MAX = 600_000
WIDTH = 880
# name -> (page, scheme, first and last element of the picture)
PICTURES = {
    "dashboard-overview.png": ("/", "light", "dl.figures", "main > .scroll:last-of-type"),
    "dashboard-chance.png": (
        "/jobs/1",
        "dark",
        "h2:has-text('Chance of the deadline')",
        "p.key",
    ),
    "dashboard-job.png": ("/jobs/1", "light", "h2:has-text('Attempts')", "svg.chart >> nth=1"),
    "dashboard-nodes.png": ("/jobs/1", "light", "h2:has-text('Nodes')", ".scroll:has(caption:text-is('GPUs now'))"),
    "dashboard-plan.png": ("/jobs/2/plan", "dark", "h2:has-text('Cost against time')", "svg.chart"),
    "dashboard-locations.png": ("/places", "light", "main > h1", ".as-of"),
    "dashboard-cost.png": ("/cost", "light", "main > h1", ".as-of"),
    "dashboard-services.png": ("/services/chat", "light", "main > h1", ".scroll:has(caption:text-is('Replicas'))"),
    "dashboard-clouds.png": ("/clouds", "light", "main > h1", ".as-of"),
}


def fill(home: Path) -> None:
    """Fill a state folder with jobs that look like real ones."""
    from broker.task.loader import load_tasks_text
    from broker.types import JobStatus, Progress
    from broker.types.outcomes import EventKind, make_event
    from tests.dashboard.conftest import PLANNED, Story

    story = Story(home)
    begin_s = story.now_s - 5 * 3600
    (goal,) = load_tasks_text(
        PLANNED.replace("work: 10h", "work: 8h").replace("deadline: 24h", "deadline: 10h, budget: 40"), "task.yaml"
    )
    job_id = story.store.jobs.add("gpt2-finetune", goal).id
    story.store.write("UPDATE jobs SET submitted_s = ? WHERE id = ?", (begin_s - 120, job_id))
    reached = [(0, 400, 360), (360, 900, 850), (850, 1240, 1200)]
    ends = [begin_s + 4000, begin_s + 11000, None]
    lines = []
    for number, ((first, last, saved), end_s) in enumerate(zip(reached, ends, strict=True), start=1):
        start_s = begin_s if number == 1 else (ends[number - 2] or 0.0) + 200
        story.add_attempt(job_id, number, begin_s=start_s, end_s=end_s)
        for step in (first + 1, last):
            progress = Progress(step=step, total=2000, loss=3.6 - step / 900, checkpoint_step=saved)
            story.store.jobs.set_progress(job_id, progress)
        lines += [f"step {step}/2000  loss {1.9 + 2.2 * 0.998**step + 0.05 * (step * 37 % 11 - 5) / 5:.4f}"
                  for step in range(first + 10, last + 1, 10)]  # fmt: skip
        story.add_event(job_id, make_event(EventKind.STARTED))
    story.store.jobs.set_status(job_id, JobStatus.RUNNING)
    log = story.context.config.logs / "jobs" / f"{job_id}.log"
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(lines) + "\n")
    story.add_samples(job_id, count=170)
    text = PLANNED.replace("{infra: local}", "{accelerators: A100:8}").replace("work: 10h", "work: 40h")
    (task,) = load_tasks_text(text.replace("deadline: 24h", "deadline: 72h"), "task.yaml")
    story.store.jobs.add("llama-sft", task)
    story.store.jobs.set_status(story.add_job("tokenize"), JobStatus.SUCCEEDED)
    story.store.jobs.set_status(story.add_job("eval"), JobStatus.FAILED, "exit code 3: CUDA out of memory")
    story.add_cluster("dev", begin_s=begin_s)
    story.add_planned()
    fill_places_and_clouds(story)
    fill_service(story)
    story.context.close()


def fill_places_and_clouds(story: Story) -> None:
    """Add refusals of the last days, and recorded checks of three clouds."""
    from broker.app.checks import CheckedItem, record_findings, record_overview
    from broker.types import EventKind, Placement
    from broker.types.outcomes import make_event
    from broker.wording import make_place
    from tests.dashboard.conftest import OFFER

    place = make_place(Placement(offer=OFFER, is_spot=True, node_count=2))
    for _ in range(3):
        story.add_event(1, make_event(EventKind.PLACE_REFUSED, place=place, took_s=2.0, error="no capacity"))
    story.store.refusals.add("aws", "us-east-1", "us-east-1b", "p4d.24xlarge", True, 540.0, "InsufficientCapacity")
    config, now_s = story.context.config, story.now_s
    checks = [("aws", True, ""), ("gcp", False, "login: none"), ("local", True, "")]
    record_overview(config, checks, now_s=now_s - 240)
    findings = [
        CheckedItem(name="login", is_ok=True, note="account 123456789012"),
        CheckedItem(
            name="quota of p4d.24xlarge spot", is_ok=False, note="0 vCPUs in us-east-1", is_needed=False,
            command="aws service-quotas request-service-quota-increase --service-code ec2 --quota-code L-7212CCBC "
            "--desired-value 96 --region us-east-1",
        ),
    ]  # fmt: skip
    record_findings(config, "aws", findings, now_s=now_s - 200)


def fill_service(story: Story) -> None:
    """Add a service with two replicas that serve and the load that its balancer reported."""
    from broker.serve.files import Load, LoadWindow, ReplicaLoad, write_file
    from broker.serve.replicas import find_folder
    from broker.task.loader import load_tasks_text
    from broker.types import JobStatus, Replica, ServiceEventKind
    from tests.dashboard.conftest import SERVED

    (task,) = load_tasks_text(SERVED, "service.yaml")
    service = story.store.services.add("chat", task, host="127.0.0.1", port=30001, wanted=2)
    seen, begin_s = {}, story.now_s - 3600
    for number in (1, 2):
        job_id = story.add_job(f"chat-{number}")
        story.add_attempt(job_id, 1, begin_s=begin_s, end_s=None)
        story.store.jobs.set_status(job_id, JobStatus.RUNNING)
        replica = Replica(
            service="chat", number=number, version=1, job_id=job_id, port=8080, created_s=begin_s, ready_s=begin_s + 90
        )
        story.store.services.put_replica(replica)
        seen[number] = ReplicaLoad(is_ready=True, in_flight=4 + number, since_s=begin_s + 90)
        story.store.services.add_event("chat", ServiceEventKind.REPLICA_READY, replica=number)
    window = LoadWindow(
        requests=540, errors=1, qps=9.0, prompt_tokens_s=4100.0, completion_tokens_s=1900.0,
        ttft_p50_s=0.21, ttft_p95_s=0.48, tpot_p50_s=0.019, tpot_p95_s=0.031,
    )  # fmt: skip
    load = Load(
        generation=1, time_s=story.now_s, pid=1, arrivals=31_480, in_flight=11, resumed=3, window=window, replicas=seen
    )
    write_file(find_folder(story.context.config, service).load, load)


def main() -> None:
    """Write the pictures beside this file."""
    sys.path.insert(0, str(ROOT))
    import broker.app.container
    from tests.dashboard.conftest import Served

    broker.app.container.Context.ensure_daemon = lambda context: None  # type: ignore[method-assign]
    home = Path(tempfile.mkdtemp()) / "home"
    os.environ["BROKER_HOME"] = str(home)
    os.environ["TZ"] = "UTC"
    time.tzset()
    fill(home)
    served = Served(home)
    try:
        take_pictures(home, served)
    finally:
        served.close()  # its thread would keep this process alive
        shutil.rmtree(home.parent)
    total = sum((HERE / name).stat().st_size for name in PICTURES)
    assert total <= BYTES_MAX, f"{total} bytes; make the pictures smaller"
    print(f"{len(PICTURES)} pictures, {total} bytes")


def take_pictures(home: Path, served: Served) -> None:
    """Open each page in Chromium, and write its picture."""
    from playwright.sync_api import sync_playwright

    from broker.locks import hold_lock

    (folder,) = (home / "serve").iterdir()
    with hold_lock(folder / "balancer.lock"), sync_playwright() as playwright:  # as a balancer that runs does
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-lcd-text"]
        )
        link: str | None = served.link
        context = browser.new_context(viewport={"width": WIDTH, "height": 700})
        context.new_page().goto(link)
        for name, (path, scheme, first, last) in PICTURES.items():
            page = context.new_page()
            page.emulate_media(color_scheme=scheme)
            page.goto(served.base + path)
            top, bottom = page.locator(first).first.bounding_box(), page.locator(last).bounding_box()
            assert top is not None and bottom is not None
            height = bottom["y"] + bottom["height"] - top["y"] + 10
            clip = {"x": 0, "y": top["y"] - 6, "width": WIDTH, "height": height}
            page.screenshot(path=str(HERE / name), clip=clip, full_page=True, scale="css")
            page.close()  # it follows changes on a connection of its own, and Chromium opens six to one server
        browser.close()


if __name__ == "__main__":
    main()
