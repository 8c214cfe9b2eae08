"""Batch inference over worker jobs: begin a map, submit its workers, follow it, finish it.

Every step may be repeated, so a command that was killed at any point continues when it is run again.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from broker.app.container import Context
from broker.app.jobs import JobTarget
from broker.app.launching import Callbacks, fetch_repositories, prepare
from broker.app.limits import LaunchSize
from broker.app.programs import digest_files
from broker.batch import tally
from broker.batch.plan_file import LEASE_S, MapPlan, begin, digest_program, list_changed_files
from broker.batch.splitting import SUFFIXES, Split, split
from broker.batch.tally import Tally
from broker.batch.workers import MapWorkers, list_problems, plan_workers
from broker.errors import BrokerError, UsageError
from broker.frozen import frozen
from broker.state.people import Owned
from broker.storage import open_bucket
from broker.types import DataSet, Job, JobStatus, Plan, Task

POLL_S = 1.0
GIB = 1 << 30
RUNS_WORKER = re.compile(r"-m\s+trainers\.map_(worker|ray|dask|spark)\b")
LEASES = (
    "worker"  # jobs of this program share the shards by leases; the other programs spread them over one job's nodes
)
WORKERS = 4  # without `--workers`
SCHEMES = ("file", "s3", "gs", "az")  # supported by the worker (trainers/map_places.py)
NOT_STARTED = (JobStatus.PENDING, JobStatus.STARTING, JobStatus.RECOVERING)


@frozen
class MapRequest:
    """A map as requested by the user; `input` and `output` are URLs or paths on this machine.

    `workers` is the number of jobs, by default 4, or 1 if the task runs an engine (Ray Data, Dask, Spark), which
    spreads the shards over the nodes of one job.
    """

    task: Task
    input: str
    output: str
    workers: int | None = None
    shard_bytes: int | None = None
    lease_s: float = LEASE_S

    @property
    def worker_count(self) -> int:
        """Number of worker jobs. Raises UsageError for several jobs of an engine."""
        engine = find_engine(self.task)
        if engine == LEASES:
            return self.workers or WORKERS
        if self.workers not in (None, 1):
            raise UsageError(
                f"`--workers` does not apply to `trainers.map_{engine}`, which uses the nodes of one job",
                hints=["set `num_nodes` in the task file"],
            )
        return 1


@frozen
class MapView:
    """A map at one moment."""

    tally: Tally
    workers: MapWorkers
    usd: float


@frozen
class MapResult:
    """A finished map; `failures` are the reasons for failed shards."""

    view: MapView
    items: int
    manifest: str
    failures: Sequence[str]

    @property
    def usd_per_million_items(self) -> float | None:
        """USD per million items, from all bills; None without items."""
        return 1e6 * self.view.usd / self.items if self.items else None


@frozen
class MapTarget(JobTarget):
    """The launch target for the workers of a map."""

    is_here: bool  # input or output is a path of this machine

    def check(self, plans: Sequence[Plan]) -> bool:
        """Return whether the workers may start. Raises UsageError if they cannot read the input."""
        clouds = {each.placement.offer.cloud for plan in plans for each in plan.estimates} - {"local"}
        if self.is_here and clouds:
            raise UsageError(
                f"nodes on {' or '.join(sorted(clouds)[:3])} cannot read paths of this machine",
                hints=[
                    "pass bucket URLs for `--input` and `--output`; `file:///...` is a folder that all nodes can read",
                    "or run on this machine with `--infra local`",
                ],
            )
        return JobTarget.check(self, plans)


class MapDriver:
    """Drive one map. Raises UsageError for an invalid input, output or task."""

    def __init__(self, context: Context, request: MapRequest, *, callbacks: Callbacks | None = None) -> None:
        self._workers = request.worker_count
        self._context, self._request, self._callbacks = context, request, callbacks
        self.output_url = to_url(request.output)
        self.input_url, name = split_input(to_url(request.input))
        if f"{self.output_url}/".startswith(f"{self.input_url}/") and not name:
            raise UsageError(
                "`--output` must not be inside the input folder",
                hints=["choose a folder outside of it, because all files below the input are read as items"],
            )
        self._output = open_bucket(self.output_url)
        keys = open_bucket(self.input_url).list_keys(name)
        if not keys:
            raise UsageError(f"the input `{request.input}` does not exist or is empty")
        self.split: Split = split(keys, shard_bytes=request.shard_bytes)
        self._task: Task | None = None
        self._plan: MapPlan | None = None
        self._retries_from = 0
        self.changed_files: Sequence[str] = ()  # of the program, since the map began
        self._own: set[int] = set()  # workers whose owner has been compared

    @property
    def plan(self) -> MapPlan:
        """The shards, as recorded in the output folder; `begin` must have been called."""
        assert self._plan is not None, "`begin` was called"
        return self._plan

    def show(self) -> None:
        """Plan the workers without starting or writing anything."""
        self._prepare(is_dryrun=True)

    def begin(self) -> bool:
        """Write the plan, or continue with the one in the output folder; return whether it is new."""
        store = self._context.store
        (task,) = fetch_repositories(self._context, [self._request.task])  # a branch may have another commit by now
        self._request = replace(self._request, task=task)
        self._retries_from = 1 + max((line.id for line in store.jobs.list_lines(1)), default=0)
        files = digest_files(task)
        self._plan, is_new = begin(
            self._output, self.split, input_url=self.input_url, program=digest_program(task),
            draw_uid=store.draw_uid, lease_s=self._request.lease_s, files=files,
        )  # fmt: skip
        self.split = self._plan.split
        self.changed_files = list_changed_files(self._plan, files)
        if not is_new:
            self._check_owner(self._plan_workers(left=0))
            tally.forget_failures(self._output, tally.take(self._output, self._plan))
        return is_new

    def read_view(self) -> MapView:
        """Read the state of the map and its workers. A server raises DeniedError if they are another user's."""
        store = self._context.store
        now = tally.take(self._output, self.plan)
        workers = self._plan_workers(left=now.left)
        self._check_owner(workers)
        spent = store.bills.list_spend_usd(now_s=self._context.clock.now_s())
        return MapView(tally=now, workers=workers, usd=sum(spent.get(each, 0.0) for each in workers.job_ids))

    def _plan_workers(self, *, left: int) -> MapWorkers:
        find_request = self._context.store.jobs.find_request
        return plan_workers(self.plan.group, self._workers, find_request, left=left, retries_from=self._retries_from)

    def _check_owner(self, workers: MapWorkers) -> None:
        """Raise DeniedError for workers of another user, who may have begun the same new map at the same time.

        Otherwise the second user's command would add workers to the map of the first, and cancel some at its end.
        """
        for job_id in workers.job_ids:
            if job_id not in self._own:
                self._context.check_owner(Owned.JOB, str(job_id))
                self._own.add(job_id)

    def submit(self, workers: MapWorkers) -> Sequence[Job]:
        """Submit the workers that are due; the first time, show and confirm the price."""
        if not workers.submissions:
            return ()
        if self._task is None:
            self._task = self._prepare(is_dryrun=False)
        store = self._context.store
        with store.transaction():
            self._context.check_requests([each.request_id for each in workers.submissions])
            jobs = [
                store.jobs.add(each.name, self._task, each.request_id, pipeline=self.plan.group)
                for each in workers.submissions
            ]
            self._context.own_jobs(jobs)
        self._context.ensure_daemon()
        return jobs

    async def follow(self) -> AsyncIterator[MapView]:
        """Yield the state, about once a second, until no shard remains. Raises BrokerError if all workers failed."""
        while True:
            view = self.read_view()
            yield view
            if view.tally.left <= 0:
                return
            if not view.workers.live and not view.workers.submissions:
                ids = view.workers.job_ids
                raise BrokerError(
                    f"{view.tally.left} of {view.tally.shards} shards remain, but no worker is live",
                    details=list_problems(view.workers.newest),
                    hints=[f"see `broker jobs logs {ids[-1]}`; the same command starts the workers again"],
                )
            self.submit(view.workers)
            self._context.restart_daemon_if_needed()
            await self._context.clock.sleep(POLL_S)

    def finish(self, view: MapView) -> MapResult:
        """Cancel workers that have not started, and write the manifest. May be repeated."""
        for job in view.workers.live:
            if job.status in NOT_STARTED:
                self._context.store.jobs.request_cancel(job.id)
        items = tally.count_items(self._output, view.tally)
        key = tally.write_manifest(self._output, self.plan, view.tally, items)
        return MapResult(
            view=view, items=sum(items.values()), manifest=f"{self.output_url}/{key}",
            failures=tally.explain_failures(self._output, view.tally),
        )  # fmt: skip

    def _prepare(self, *, is_dryrun: bool) -> Task:
        request = self._request
        target = MapTarget(context=self._context, is_here="://" not in request.input or "://" not in request.output)
        task = make_worker_task(request.task, self.input_url, self.output_url, sum(self.split.sizes) / self._workers)
        demand = LaunchSize(parallel=self._workers, total=self._workers)
        ready = prepare(self._context, [task], target, callbacks=self._callbacks, is_dryrun=is_dryrun, demand=demand)
        return ready.tasks[0]


def find_engine(task: Task) -> str:
    """Return the program that maps the shards, such as `worker` or `ray`. Raises UsageError if there is none."""
    if found := RUNS_WORKER.search(task.run or ""):
        return found[1]
    raise UsageError(
        "the task's `run:` does not start a map worker",
        hints=["write `run: python -m trainers.map_worker embed.py`, or a command after `map_worker --`"],
    )


def make_worker_task(task: Task, input_url: str, output_url: str, input_bytes: float) -> Task:
    """Add the input and output of a map to a task, with access to both for its nodes."""
    checkpoint = task.checkpoint
    if checkpoint.to is None and not output_url.startswith("file://"):
        checkpoint = replace(checkpoint, to=f"{output_url}/_map/jobs")
    return replace(
        task,
        envs={**task.envs, "BROKER_MAP": output_url},
        inputs=(*task.inputs, DataSet(url=input_url, size_gib=input_bytes / GIB)),
        outputs=(*task.outputs, DataSet(url=output_url, size_gib=0.0)),
        checkpoint=checkpoint,
    )


def to_url(place: str) -> str:
    """Return the URL of a place that may be a local path. Raises UsageError for storage that workers do not support."""
    if "://" not in place:
        path = Path(place).expanduser()
        # One folder has one URL: the plan in the output folder records it.
        return f"file://{path.resolve() if '..' in path.parts else path.absolute()}"
    if urlsplit(place).scheme not in SCHEMES:
        known = ", ".join(f"`{each}://`" for each in SCHEMES)
        raise UsageError(f"unsupported storage in `{place}`", hints=[f"supported: {known}"])
    return place.rstrip("/")


def split_input(url: str) -> tuple[str, str]:
    """Return the folder of the input, and the name of the file in it; "" for a whole folder."""
    if not url.endswith(SUFFIXES):
        return url, ""
    folder, _, name = url.rpartition("/")
    return folder, name
