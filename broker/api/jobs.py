"""Managed jobs without asyncio: `broker.jobs.launch` and so on. `broker.aio.jobs` documents each function."""

from __future__ import annotations

from broker.aio import jobs
from broker.aio.running import make_sync, make_sync_iterator

__all__ = [
    "cancel",
    "due_times",
    "launch",
    "launch_pipeline",
    "logs",
    "pause_schedule",
    "queue",
    "remove_schedule",
    "resume_schedule",
    "retry",
    "retry_group",
    "schedule",
    "schedules",
    "wait",
    "why",
]

launch = make_sync(jobs.launch)
launch_pipeline = make_sync(jobs.launch_pipeline)
wait = make_sync(jobs.wait)
queue = make_sync(jobs.queue)
cancel = make_sync(jobs.cancel)
retry = make_sync(jobs.retry)
retry_group = make_sync(jobs.retry_group)
logs = make_sync_iterator(jobs.logs)
why = make_sync(jobs.why)
schedule = make_sync(jobs.schedule)
schedules = make_sync(jobs.schedules)
due_times = make_sync(jobs.due_times)
pause_schedule = make_sync(jobs.pause_schedule)
resume_schedule = make_sync(jobs.resume_schedule)
remove_schedule = make_sync(jobs.remove_schedule)
