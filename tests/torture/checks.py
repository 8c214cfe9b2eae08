"""Checks after all faults have been healed: each job once, the same numbers, and nothing left."""

from __future__ import annotations

import fcntl
import json
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.torture.bed import LocalBed
from tests.torture.history import History
from tests.torture.ledger import JobRow, View
from tests.torture.references import References
from tests.torture.workloads import STEPS, Training, Workload

LAST = "last"  # the job that shows, at the end, that nothing blocks a start


def read_log(evidence: Path) -> list[dict[str, Any]]:
    path = evidence / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_jobs(
    bed: LocalBed, history: History, view: View, submitted: Sequence[Workload], references: References
) -> None:
    """Check that every job ended as it must, once, with the numbers of an undisturbed run."""
    known = {LAST, *(name for work in submitted for name in work.ends)}
    for job in view.jobs.values():
        if job.name not in known:
            history.violate(f"job {job.id} ({job.name}) was submitted by no user")
    for work in submitted:
        for name, end in work.ends.items():
            jobs = view.list_named(name)
            check_ends(history, work, name, end, jobs)
            for problem in find_problems(work, name, jobs, bed.evidence / name):
                history.violate(f"{name}: {problem}", log=read_log(bed.evidence / name)[-40:])
    check_numbers(bed, history, view, submitted, references)


def check_numbers(
    bed: LocalBed, history: History, view: View, submitted: Sequence[Workload], references: References
) -> None:
    """Check losses and tensors of each trainer's successful run against the undisturbed run."""
    places: dict[str, Training] = {}
    names: dict[str, str] = {}
    for work in submitted:
        job = next((job for job in view.list_named(work.name) if job.status == "SUCCEEDED"), None)
        if work.training is None or job is None:
            continue
        for problem in references.compare(work.training, bed.evidence / work.name / "metrics.jsonl"):
            history.violate(f"{work.name}: {problem}")
        if work.training.nodes_min is None:
            place = bed.find_checkpoints(job.folder)
            places[place], names[place] = work.training, work.name
    if places:
        for place, problem in references.compare_tensors(places, bed.environment).items():
            history.violate(f"{names[place]}: {problem}")
    history.write("compared", trainings=len(places), places=names)


def check_ends(history: History, work: Workload, name: str, end: str, jobs: Sequence[JobRow]) -> None:
    wanted = [end, "SUCCEEDED"] if work.follow_up == "retry" else [end]
    found = [job.status for job in jobs]
    if found != wanted:
        ends = "; ".join(f"job {job.id} {job.status}: {job.failure}" for job in jobs)
        history.violate(f"{name} must end {' then '.join(wanted)}, and is: {ends or 'nowhere'}")


def find_problems(work: Workload, name: str, jobs: Sequence[JobRow], evidence: Path) -> Iterator[str]:
    """Find problems that the witnesses of one job's attempts saw."""
    log = read_log(evidence)
    finishes = [line for line in log if line["event"] == "finish"]
    succeeded = any(job.status == "SUCCEEDED" for job in jobs)
    for line in log:
        if line["event"] == "overlap":
            yield f"attempt {line['attempt']} met attempt {line['other']} alive"
    if len(finishes) > 1:
        yield f"its effect was had {len(finishes)} times"
    if succeeded != (evidence / "finished.json").exists():
        yield f"it {'succeeded without' if succeeded else 'did not succeed and had'} its effect"
    begun = [line["attempt"] for line in log if line["event"] == "begin"]
    if begun != sorted(begun):
        yield f"attempts began in the order {begun}"
    numbers = {attempt["number"] for job in jobs for attempt in job.attempts}
    if strays := sorted(set(begun) - numbers):
        yield f"attempts {strays} ran and are in no record"
    if work.counts and succeeded:
        yield from check_count((evidence / "ledger").read_text().splitlines())


def check_count(lines: Sequence[str]) -> Iterator[str]:
    """Check the order of steps; an attempt continues after the last step that the one before had saved."""
    last_attempt = last_step = 0
    for line in lines:
        attempt, step = map(int, line.split())
        is_next = step == last_step + 1
        if not is_next and not (attempt > last_attempt and step <= last_step + 1):
            yield f"attempt {attempt} counted {step} after attempt {last_attempt} had counted {last_step}"
        if attempt < last_attempt:
            yield f"attempt {attempt} counted after attempt {last_attempt}"
        last_attempt, last_step = attempt, step
    if last_step != STEPS:
        yield f"it counted to {last_step}, not to {STEPS}"


def check_rest(bed: LocalBed, history: History, view: View) -> None:
    """Check that nothing is left according to the store, the cloud's folders, and the kernel."""
    if view.clusters:
        history.violate(f"clusters are left: {sorted(view.clusters)}")
    if view.open_intents:
        history.violate(f"{view.open_intents} intents are open")
    if view.open_bills:
        history.violate(f"{view.open_bills} nodes still cost money by the bills")
    with closing(sqlite3.connect(bed.database)) as connection:
        answer = connection.execute("PRAGMA integrity_check").fetchone()[0]
        if answer != "ok":
            history.violate(f"the store is damaged: {answer}")
        for sql in ("SELECT id FROM nodes WHERE ended_s < created_s",):
            if rows := connection.execute(sql).fetchall():
                history.write("note", text=f"nodes whose bill ends before it begins: {rows}")
    done = bed.run("gc", "--dry-run", "--json")
    if done.returncode or json.loads(done.stdout)["nodes"] or json.loads(done.stdout)["clusters"]:
        history.violate("`broker gc` finds something to collect", stdout=done.stdout, stderr=done.stderr)
    done = bed.run("status", "--json")
    status = json.loads(done.stdout) if done.returncode == 0 else {}
    if status.get("clusters") != [] or status.get("live_jobs") not in (0, []):
        history.violate("`broker status` shows something that lives", stdout=done.stdout, stderr=done.stderr)
    check_modes(bed, history)


def check_modes(bed: LocalBed, history: History) -> None:
    """Check that the state folder is private: no file is readable by others, except the public halves of keys."""
    for path in [bed.home, *bed.home.rglob("*")]:
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & 0o077 and path.suffix != ".pub":
            history.violate(f"{path.relative_to(bed.home)} has mode {stat.S_IMODE(mode):o}")


def check_locks(bed: LocalBed, history: History) -> None:
    """Check that no lock is held when no process is left."""
    for path in (bed.home / "daemon.lock", bed.home / "local" / "lock"):
        if path.exists():
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    history.violate(f"{path.name} is still locked")
