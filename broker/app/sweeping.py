"""Hyperparameter sweeps over managed jobs: submit runs, stop poor ones early, collect the results.

The runs of a sweep are identified by request IDs that depend only on the task and the sweep's parameters, so a command
that was killed at any point continues when it is run again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

from broker.app.container import Context
from broker.app.jobs import JobTarget
from broker.app.launching import Callbacks, fetch_repositories, prepare
from broker.app.limits import LaunchSize
from broker.app.programs import digest_files
from broker.errors import BrokerError
from broker.frozen import frozen
from broker.state.people import Owned
from broker.sweeps import board as boards
from broker.sweeps.board import Board, Early, SweepStep
from broker.sweeps.space import Configuration, draw, parse_parameters
from broker.task.codec import encode_task
from broker.types import Job, Task

POLL_S = 1.0


@frozen
class SweepRequest:
    """A sweep as requested by the user. `runs` None: all combinations."""

    task: Task
    parameters: Sequence[str]
    runs: int | None = None
    parallel: int = 8
    early: Early = "none"
    seed: int = 0


@frozen
class SweepView:
    """A sweep at one moment: the jobs of the runs that were submitted, and those stopped early, with their steps."""

    jobs: Mapping[int, Job]
    stopped: Mapping[int, int]
    usd: Mapping[int, float]
    is_over: bool


class SweepDriver:
    """Drive one sweep. Raises UsageError for invalid parameters."""

    def __init__(self, context: Context, request: SweepRequest, *, callbacks: Callbacks | None = None) -> None:
        (task,) = fetch_repositories(context, [request.task])  # the commit of a branch is part of the sweep's name
        request = replace(request, task=task)
        self._context, self._request, self._callbacks = context, request, callbacks
        self.names = [each.name for each in parse_parameters(request.parameters)]
        self.configurations: Sequence[Configuration] = draw(
            parse_parameters(request.parameters), runs=request.runs, seed=request.seed
        )
        self.group = name_sweep(request)
        self._ended: dict[int, Job] = {}
        self._task: Task | None = None
        self._live: frozenset[int] = frozenset()  # runs, as of the last step
        self._first_id: int | None = None  # the newest job when this command took its first step
        self._closed: BrokerError | None = None  # why no further run starts

    def show(self) -> None:
        """Plan the first run without starting anything."""
        self._prepare(is_dryrun=True)

    def read_view(self) -> SweepView:
        """Read the state without changing anything."""
        jobs, board = self._find_jobs(), self._read_board()
        is_over = len(jobs) == len(self.configurations) and all(job.status.is_terminal for job in jobs.values())
        return self._make_view(jobs, board, is_over=is_over)

    def advance(self) -> SweepView:
        """Take the next step: stop and submit runs; the first time, show and confirm the price."""
        store = self._context.store
        jobs = self._find_jobs()
        step = self._decide(jobs)
        for run in step.stops:
            self._context.check_owner(Owned.JOB, str(jobs[run].id))
            store.jobs.request_cancel(jobs[run].id)
        for run in step.starts:
            jobs[run] = self._submit(run)
        if step.starts or step.stops:
            self._context.ensure_daemon()
        self._live = frozenset(run for run, job in jobs.items() if not job.status.is_terminal)
        return self._make_view(jobs, step.board, is_over=step.is_over)

    async def follow(self) -> AsyncIterator[SweepView]:
        """Yield the state after each step, about once a second, until all runs have ended.

        Raises BrokerError if the sweep was cancelled, or its first runs all failed, once no run is live.
        """
        while True:
            view = self.advance()
            yield view
            if view.is_over:
                if self._closed is not None:
                    raise self._closed
                return
            self._context.restart_daemon_if_needed()
            await self._context.clock.sleep(POLL_S)

    def _decide(self, jobs: Mapping[int, Job]) -> SweepStep:
        """Decide the next step and store its board: before the requests, so that a stopped run is on record as stopped.

        Another command that drives the same sweep may have changed the board meanwhile, so it is read again in the
        transaction that stores it.
        """
        board, store = self._read_board(), self._context.store
        step = self._decide_on(board, jobs)
        if step.board != board:
            with store.transaction():
                step = self._decide_on(self._read_board(), jobs)
                store.meta.put(f"sweep:{self.group}", boards.encode(step.board))
        return step

    def _decide_on(self, board: Board, jobs: Mapping[int, Job]) -> SweepStep:
        request = self._request
        self._closed = self._closed or self._find_closure(board, jobs)
        return boards.decide(
            board, jobs, runs=len(self.configurations), parallel=request.parallel, early=request.early,
            is_closed=self._closed is not None,
        )  # fmt: skip

    def _find_closure(self, board: Board, jobs: Mapping[int, Job]) -> BrokerError | None:
        """Return why no further run starts; None to go on. Nothing is left to start once all runs have a job."""
        if self._first_id is None:
            self._first_id = max((line.id for line in self._context.store.jobs.list_lines(1)), default=0)
        left = len(self.configurations) - len(jobs)
        if not left:
            return None
        hint = "the same command starts the other runs"
        if boards.is_cancelled(board, jobs, before=self._live):
            return BrokerError(f"{self.group} was cancelled; {left} runs were not started", hints=[hint])
        if failed := boards.list_failures(jobs, after=self._first_id):
            return BrokerError(
                f"{len(failed)} runs failed and none has reported a step; {left} runs were not started",
                details=[f"job {job.id} ended with status {job.status.value}" for job in failed[:3]],
                hints=[f"see `broker jobs logs {failed[0].id}`; {hint}"],
            )
        return None

    def _find_jobs(self) -> dict[int, Job]:
        found = dict(self._ended)
        for run in range(len(self.configurations)):
            if run not in found and (job := self._context.store.jobs.find_request(f"{self.group}/{run}")):
                found[run] = job
        self._ended = {run: job for run, job in found.items() if job.status.is_terminal}
        return found

    def _read_board(self) -> Board:
        return boards.decode(self._context.store.meta.get(f"sweep:{self.group}"))

    def _submit(self, run: int) -> Job:
        if self._task is None:
            self._task = self._prepare(is_dryrun=False)
        task = replace(self._task, envs={**self._task.envs, **self.configurations[run]})
        store = self._context.store
        request_id = f"{self.group}/{run}"
        with store.transaction():
            self._context.check_requests([request_id])
            job = store.jobs.add(f"{self.group}-{run + 1}", task, request_id, pipeline=self.group)
            self._context.own_jobs([job])
        return job

    def _prepare(self, *, is_dryrun: bool) -> Task:
        task = self._request.task
        first = replace(task, envs={**task.envs, **self.configurations[0]})
        target = JobTarget(context=self._context)
        count = len(self.configurations)
        demand = LaunchSize(parallel=min(self._request.parallel, count), total=count)
        ready = prepare(self._context, [first], target, callbacks=self._callbacks, is_dryrun=is_dryrun, demand=demand)
        return ready.tasks[0]

    def _make_view(self, jobs: Mapping[int, Job], board: Board, *, is_over: bool) -> SweepView:
        spent = self._context.store.bills.list_spend_usd(now_s=self._context.clock.now_s())
        usd = {run: spent.get(job.id, 0.0) for run, job in jobs.items()}
        return SweepView(jobs=jobs, stopped=board.stopped, usd=usd, is_over=is_over)


def name_sweep(request: SweepRequest) -> str:
    """Return the name of a sweep: the same for the same task, parameters, number of runs, rule and seed.

    Changed files of the program make another sweep, as its results would be of two programs.
    """
    parts = [encode_task(request.task), *request.parameters, request.runs, request.early, request.seed]
    if files := digest_files(request.task):
        parts.append(repr(sorted(files.items())))
    return f"sweep-{sha256(repr(parts).encode()).hexdigest()[:8]}"
