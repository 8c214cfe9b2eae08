"""Managed jobs without asyncio: `broker.jobs.launch` and so on. `broker.aio.jobs` documents each function."""

from __future__ import annotations

from broker.aio import jobs
from broker.aio.running import make_sync, make_sync_iterator

__all__ = ["cancel", "launch", "launch_pipeline", "logs", "queue", "retry", "retry_group", "wait", "why"]

launch = make_sync(jobs.launch)
launch_pipeline = make_sync(jobs.launch_pipeline)
wait = make_sync(jobs.wait)
queue = make_sync(jobs.queue)
cancel = make_sync(jobs.cancel)
retry = make_sync(jobs.retry)
retry_group = make_sync(jobs.retry_group)
logs = make_sync_iterator(jobs.logs)
why = make_sync(jobs.why)
