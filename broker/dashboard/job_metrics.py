"""Collect further metrics of single jobs: unsaved steps, repeated steps, and the chance of meeting the deadline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from broker.app.container import Context
from broker.app.forecasts import forecast_jobs
from broker.dashboard.families import Family, render_job_label
from broker.state.history import StepRange

CHANCE_S = 60.0  # a chance is computed again when it is older
CHANCES_AT_ONCE = 2  # forecasts of one scrape: each takes tens of milliseconds


def count_unsaved(newest: StepRange) -> int:
    """Count the steps of the newest attempt since its checkpoint, or since its start without one. Pure.

    Steps 31 to 60 with a checkpoint at 50: 10.
    """
    saved = newest.first_step - 1 if newest.checkpoint_step is None else newest.checkpoint_step
    return max(0, newest.last_step - saved)


def count_repeated(attempts: Sequence[StepRange]) -> int:
    """Count the steps that were run again after a loss: those that an attempt and the next one have in common. Pure.

    Steps 1 to 45, then 31 to 60: 15.
    """
    return sum(max(0, before.last_step - after.first_step + 1) for before, after in pairwise(attempts))


class JobChances:
    """The chances of live jobs of meeting their deadlines. Each update computes the oldest ones again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float | None]] = {}  # when, and the chance; None: no forecast

    def update(self, context: Context, live: Sequence[int]) -> Mapping[int, float]:
        """Compute up to `CHANCES_AT_ONCE` chances again; return all known ones by job."""
        store, now_s = context.store, context.clock.now_s()
        wanted = store.jobs.list_goals(live, field="deadline_hours")
        self._known = {job_id: known for job_id, known in self._known.items() if job_id in wanted}
        ages = {job_id: now_s - self._known[job_id][0] if job_id in self._known else CHANCE_S for job_id in wanted}
        due = [each for each in wanted if not 0.0 <= ages[each] < CHANCE_S]
        due = sorted(due, key=lambda each: self._known.get(each, (0.0, None))[0])[:CHANCES_AT_ONCE]
        jobs = [job for job in map(store.jobs.get, due) if job is not None]
        found = forecast_jobs(context, jobs, store.bills.list_spend_usd(due, now_s=now_s)) if jobs else {}
        for job_id in due:
            self._known[job_id] = now_s, found[job_id].deadline_chance if job_id in found else None
        return {job_id: chance for job_id, (_, chance) in self._known.items() if chance is not None}


def list_job_families(
    steps: Mapping[int, Sequence[StepRange]], chances: Mapping[int, float], live: Sequence[int]
) -> Iterator[Family]:
    """List the families about steps of jobs and chances of live ones."""
    unsaved = [(render_job_label(each), float(count_unsaved(steps[each][-1]))) for each in live if each in steps]
    yield Family("broker_job_unsaved_steps", "gauge", "Steps of a live job since its newest checkpoint.", unsaved)
    repeated = [
        (render_job_label(job_id), float(count_repeated(attempts)))
        for job_id, attempts in steps.items()
        if len(attempts) > 1
    ]
    yield Family("broker_job_repeated_steps_total", "counter", "Steps that were run again after a loss.", repeated)
    shares = [(render_job_label(job_id), chance) for job_id, chance in sorted(chances.items())]
    yield Family("broker_job_deadline_chance_ratio", "gauge", "Chance of a live job to meet its deadline.", shares)
