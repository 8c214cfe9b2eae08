"""Verbs that drive many jobs as one piece of work: maps and sweeps. They continue the work of an earlier call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from broker.app.buckets import TrackUpload
from broker.app.container import Context
from broker.app.launching import Callbacks, ignore_upload
from broker.app.mapping import MapDriver, MapRequest, MapResult, MapView
from broker.app.sweeping import SweepDriver, SweepRequest, SweepView
from broker.formatting import format_count, format_usd
from broker.frozen import frozen
from broker.types import JobStatus, Plan, Progress, Task

Show = Callable[[Sequence[Plan]], None]


@frozen
class MapState:
    """A map at one moment. `manifest` is None while shards remain; `failures` explain failed shards."""

    name: str
    input: str
    output: str
    shards: int
    shards_done: int
    shards_failed: tuple[int, ...]
    items: int
    jobs: tuple[int, ...]
    live_workers: int
    usd: float
    usd_per_million_items: float | None = None
    manifest: str | None = None
    failures: tuple[str, ...] = ()


@frozen
class SweepRun:
    """A run of a sweep that was started; `number` counts from 0."""

    number: int
    job_id: int
    status: JobStatus
    progress: Progress | None
    is_stopped_early: bool
    usd: float


@frozen
class SweepState:
    """A sweep at one moment. `runs` are the started runs, the best first; `best` is the number of a run."""

    name: str
    configurations: tuple[Mapping[str, str], ...]
    runs: tuple[SweepRun, ...]
    best: int | None
    is_over: bool

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of `--param`."""
        return tuple(self.configurations[0])


def run_map(
    context: Context,
    *,
    request: MapRequest,
    is_detached: bool,
    is_dryrun: bool,
    show: Show,
    confirm: Show,
    on_begin: Callable[[MapState], None],
    on_change: Callable[[MapState], None],
    track_upload: TrackUpload = ignore_upload,
) -> MapState | None:
    """Begin or continue a map, and drive it to its end unless `is_detached`; return None for a dry run.

    `on_begin` is called once the workers are submitted. Raises BrokerError if all workers failed.
    """
    callbacks = Callbacks(show=show, confirm=confirm, track_upload=track_upload)
    driver = MapDriver(context, request, callbacks=callbacks)
    context.note(f"input: {format_count(len(driver.split.shards), 'shard')}, {sum(driver.split.sizes):,} bytes")
    note_budget(context, request.task, request.worker_count, "worker")
    if is_dryrun:
        driver.show()
        return None
    if not driver.begin():
        context.note(f"continuing {driver.plan.group}")
    if driver.changed_files:
        context.note(
            f"changed since {driver.plan.group} began: {', '.join(driver.changed_files)}; finished shards keep their "
            "results, and `--output` with a new folder computes all of them again"
        )
    driver.submit(driver.read_view().workers)
    begun = driver.read_view()
    on_begin(_describe_map(driver, begun))
    if is_detached:
        return _describe_map(driver, begun)
    view = asyncio.run(_follow_map(driver, on_change))
    return _describe_map(driver, view, driver.finish(view))


def note_budget(context: Context, task: Task, count: int, each: str) -> None:
    """Note that the budget of a task limits each of its jobs, and how much all of them may cost."""
    budget_usd = task.goal.budget_usd if task.goal else None
    if budget_usd is not None and count > 1:
        whole = f"{format_count(count, each)} may cost up to {format_usd(count * budget_usd)} USD together"
        context.note(f"the budget of {format_usd(budget_usd)} USD limits each {each}, so {whole}")


async def _follow_map(driver: MapDriver, on_change: Callable[[MapState], None]) -> MapView:
    view = None
    async for view in driver.follow():
        on_change(_describe_map(driver, view))
    assert view is not None
    return view


def _describe_map(driver: MapDriver, view: MapView, result: MapResult | None = None) -> MapState:
    return MapState(
        name=driver.plan.group,
        input=driver.plan.input,
        output=driver.output_url,
        shards=view.tally.shards,
        shards_done=len(view.tally.parts),
        shards_failed=tuple(sorted(view.tally.failed)),
        items=result.items if result else sum(view.tally.items.values()),
        jobs=view.workers.job_ids,
        live_workers=len(view.workers.live),
        usd=view.usd,
        usd_per_million_items=result.usd_per_million_items if result else None,
        manifest=result.manifest if result else None,
        failures=tuple(result.failures) if result else (),
    )


def run_sweep(
    context: Context,
    *,
    request: SweepRequest,
    is_detached: bool,
    is_dryrun: bool,
    show: Show,
    confirm: Show,
    on_begin: Callable[[SweepState], None],
    on_change: Callable[[SweepState], None],
    track_upload: TrackUpload = ignore_upload,
) -> SweepState:
    """Begin or continue a sweep, and drive it to its end unless `is_detached`; a dry run has no runs.

    `on_begin` is called once the first runs are submitted.
    """
    callbacks = Callbacks(show=show, confirm=confirm, track_upload=track_upload)
    driver = SweepDriver(context, request, callbacks=callbacks)
    note_budget(context, request.task, len(driver.configurations), "run")
    if is_dryrun:
        driver.show()
        return _describe_sweep(driver, SweepView(jobs={}, stopped={}, usd={}, is_over=False))
    begun = _describe_sweep(driver, driver.advance())
    on_begin(begun)
    return begun if is_detached else asyncio.run(_follow_sweep(driver, on_change))


async def _follow_sweep(driver: SweepDriver, on_change: Callable[[SweepState], None]) -> SweepState:
    state = None
    async for view in driver.follow():
        state = _describe_sweep(driver, view)
        on_change(state)
    assert state is not None
    return state


def read_sweep(context: Context, *, request: SweepRequest) -> SweepState:
    """Read the state of a sweep without changing anything."""
    driver = SweepDriver(context, request)
    return _describe_sweep(driver, driver.read_view())


def _describe_sweep(driver: SweepDriver, view: SweepView) -> SweepState:
    from broker.sweeps.board import find_best, rank

    runs = tuple(
        SweepRun(
            number=run, job_id=view.jobs[run].id, status=view.jobs[run].status, progress=view.jobs[run].progress,
            is_stopped_early=run in view.stopped, usd=view.usd[run],
        )
        for run in rank(view.jobs, view.stopped)
    )  # fmt: skip
    return SweepState(
        name=driver.group,
        configurations=tuple(dict(each) for each in driver.configurations),
        runs=runs,
        best=find_best(view.jobs),
        is_over=view.is_over,
    )
