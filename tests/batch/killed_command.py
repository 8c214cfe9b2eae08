"""A command in this process that is killed before or after one of its actions, and a world in which its jobs run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.app.container import Context
from broker.types import Job, JobStatus


class KilledError(BaseException):
    """Ends the command as kill -9 does: nothing of ours catches it."""


class Killer:
    """Counts actions, and kills at one of them: action 2n before it has an effect, 2n + 1 after."""

    def __init__(self, at: int | None) -> None:
        self.at, self.actions = at, 0

    def wrap(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._make(getattr(owner, name)))

    def _make(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **named: Any) -> Any:
            self._count()
            found = call(*arguments, **named)
            self._count()
            return found

        return act

    def _count(self) -> None:
        if self.actions == self.at:
            raise KilledError
        self.actions += 1


class World:
    """A clock on which each sleep of a command lets its jobs do something."""

    def __init__(self, home: Path, live: Callable[[Context, Job], None]) -> None:
        self.home, self._live, self._now_s = home, live, 1e9

    def now_s(self) -> float:
        return self._now_s

    async def sleep(self, duration_s: float) -> None:
        self._now_s += duration_s
        self.run_jobs(self.context)

    def run_jobs(self, context: Context) -> None:
        for job in context.store.jobs.list():
            if job.cancel_requested and not job.status.is_terminal:
                context.store.jobs.set_status(job.id, JobStatus.CANCELLED)
            elif not job.status.is_terminal:
                context.store.jobs.set_status(job.id, JobStatus.RUNNING)
                self._live(context, job)

    def open(self, killer: Killer) -> Context:
        """Open what one command uses; its daemon is this world."""
        self.context = context = Context(self.home)
        context.clock = self
        context.ensure_daemon = lambda: None  # type: ignore[method-assign]
        killer.wrap(context.store.jobs, "add", "request_cancel")
        killer.wrap(context.store.meta, "put")
        return context
