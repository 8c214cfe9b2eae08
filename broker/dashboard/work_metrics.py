"""Collect the age of checkpoints and the lost work of jobs; an attempt is read again only after it changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from broker.dashboard.families import Family, render_job_label
from broker.jobs.summary import measure_lost_s
from broker.state.history import HistoryRows, StepRange

READ_MAX = 200  # jobs whose attempts one scrape reads


class JobWork:
    """What the attempts of jobs show beyond their steps, by job.

    Lost work grows only when a further attempt reports its first step, and a checkpoint has a new age only with a new
    step; so most scrapes read few attempts.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, float, float | None]] = {}  # version, lost seconds, newest save

    def update(self, history: HistoryRows, steps: Mapping[int, Sequence[StepRange]]) -> None:
        """Read up to `READ_MAX` jobs that changed, those of the newest ids first; forget those without steps."""
        versions = {job_id: (len(ranges), ranges[-1].checkpoint_step) for job_id, ranges in steps.items()}
        self._known = {job_id: known for job_id, known in self._known.items() if job_id in versions}
        due = [each for each, version in versions.items() if self._known.get(each, (None,))[0] != version]
        due = sorted(due, reverse=True)[:READ_MAX]
        for job_id, attempts in history.list_work(due).items():
            saved = [each.saved_s for each in attempts if each.saved_s is not None]
            lost_s = measure_lost_s([(each, each.steps) for each in attempts])
            self._known[job_id] = versions[job_id], lost_s, max(saved, default=None)

    def list_families(self, live: Sequence[int], *, now_s: float) -> Iterator[Family]:
        """List the families; only live jobs have a checkpoint that ages."""
        saved = {job_id: self._known[job_id][2] for job_id in live if job_id in self._known}
        ages = [
            (render_job_label(job_id), max(0.0, now_s - saved_s))
            for job_id, saved_s in saved.items()
            if saved_s is not None
        ]
        text = "Time since a live job first reported its newest checkpoint."
        yield Family("broker_job_checkpoint_age_seconds", "gauge", text, ages)
        lost = [(render_job_label(job_id), known[1]) for job_id, known in sorted(self._known.items())]
        text = "Time that a job worked on steps that were lost."
        yield Family("broker_job_lost_work_seconds_total", "counter", text, lost)
