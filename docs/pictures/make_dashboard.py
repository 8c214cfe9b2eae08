"""Take the pictures of docs/DASHBOARD.md: `python docs/pictures/make_dashboard.py`.

Serves a state folder with made-up jobs and opens its pages in Chromium (Debian: chromium), light and dark. PNGs have
few colours, so they stay small; together they are at most 320 kB.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
BYTES_MAX = 320_000
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
    story.context.close()


def main() -> None:
    """Write the pictures beside this file."""
    sys.path.insert(0, str(ROOT))
    from playwright.sync_api import sync_playwright

    import broker.app.container
    from tests.dashboard.conftest import Served

    broker.app.container.Context.ensure_daemon = lambda context: None  # type: ignore[method-assign]
    home = Path(tempfile.mkdtemp()) / "home"
    os.environ["BROKER_HOME"] = str(home)
    os.environ["TZ"] = "UTC"
    time.tzset()
    fill(home)
    served = Served(home)
    with sync_playwright() as playwright:
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
        browser.close()
    served.close()
    shutil.rmtree(home.parent)
    total = sum((HERE / name).stat().st_size for name in PICTURES)
    assert total <= BYTES_MAX, f"{total} bytes; make the pictures smaller"
    print(f"{len(PICTURES)} pictures, {total} bytes")


if __name__ == "__main__":
    main()
