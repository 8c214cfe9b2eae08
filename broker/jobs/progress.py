"""Record the progress that a program reports, the end of a recovery, and the silence of nodes."""

from __future__ import annotations

from dataclasses import replace

from broker.clock import Clock
from broker.jobs.monitor import with_silence
from broker.state.store import Store
from broker.types import Attempt, EventKind, Job, Progress, make_event


def record_progress(store: Store, clock: Clock, job: Job, attempt: Attempt, progress: Progress) -> Attempt:
    """Record progress if it is new; the first new step of an attempt ends its recovery."""
    progress = complete_progress(progress, job.progress)
    if progress == job.progress:
        return attempt
    now_s = clock.now_s()
    with store.transaction(is_durable=False):  # after a power cut, progress is observed again
        if _is_new_checkpoint(store, job, progress):
            attempt = replace(attempt, saved_s=now_s)
            store.jobs.put_attempt(attempt)
        store.jobs.set_progress(job.id, progress)
        if attempt.resumed_s is not None or not _is_new_step(store, attempt, progress):
            return attempt
        attempt = replace(attempt, resumed_s=now_s)
        store.jobs.put_attempt(attempt)
        lost_s = next((old.lost_s for old in reversed(job.attempts) if old.number < attempt.number), None)
        if lost_s is not None:
            took_s = now_s - lost_s if now_s >= lost_s else None  # None: the clock was set back
            event = make_event(EventKind.RECOVERED, step=progress.step, took_s=took_s)
            store.events.add(event, job_id=job.id)
    return attempt


def complete_progress(progress: Progress, known: Progress | None) -> Progress:
    """Return the progress with what an earlier line stated and its own line leaves out: total, newest checkpoint.

    A step before that checkpoint shows that the program did not resume from it. Example: after `{"step": 60, "total":
    100, "checkpoint_step": 60}`, the line `{"step": 61}` leaves 40 steps of work, but `{"step": 0}` leaves 100.
    """
    if known is None or not (progress.total is None or progress.checkpoint_step is None):
        return progress
    total = known.total if progress.total is None else progress.total
    saved = progress.checkpoint_step
    if saved is None and known.checkpoint_step is not None and known.checkpoint_step <= progress.step:
        saved = known.checkpoint_step
    return replace(progress, total=total, checkpoint_step=saved)


def record_silence(store: Store, attempt: Attempt, silent_s: float) -> Attempt:
    """Record the seconds for which nodes have been silent; a restarted controller continues from there."""
    recorded = with_silence(attempt, silent_s)
    if recorded != attempt:
        with store.transaction(is_durable=not silent_s):  # an outdated record may end a gang too soon
            store.jobs.put_attempt(recorded)
    return recorded


def _is_new_step(store: Store, attempt: Attempt, progress: Progress) -> bool:
    """Return whether the step is new: a program that just restored or started reports a step without new work."""
    first_step = store.jobs.list_steps(attempt.job_id)[attempt.number].first_step
    return progress.step > 0 and progress.step > min(
        first_step, progress.checkpoint_step if progress.checkpoint_step is not None else -1
    )


def _is_new_checkpoint(store: Store, job: Job, progress: Progress) -> bool:
    """Return whether the checkpoint is of a later step than all before; one that was only restored is not."""
    step = progress.checkpoint_step
    if step is None or (job.progress is not None and step == job.progress.checkpoint_step):
        return False
    saved = (each.checkpoint_step for each in store.jobs.list_steps(job.id).values())
    return step > max((each for each in saved if each is not None), default=-1)
