"""The Python API for asyncio: the functions of `broker` as coroutines.

from broker import aio
launched = await aio.launch("train.yaml", cluster="dev")
async for line in aio.logs("dev", launched.run_id): ...

No function prints or asks. Each raises `broker.BrokerError` or a subclass. Money is USD, points in time are seconds
since the epoch. `home` is the state folder, by default `BROKER_HOME` or `~/.broker`; `on_note` receives progress and
warnings as text, possibly in another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from broker.aio import jobs
from broker.aio.running import Notes, call_server, is_remote, list_remote_lines, open_context, use_in_thread
from broker.app import clusters
from broker.app.advising import AdviceRequest, Precision, Recommendation, Trainer
from broker.app.advising import advise as recommend
from broker.app.clusters import Status
from broker.app.container import Context
from broker.app.launching import ClusterTarget, PreparedLaunch, exec_task, prepare, start_cluster
from broker.app.market import Market, find_cache
from broker.app.planning import TaskLike, apply_checkpoint_default, read_task
from broker.app.simulating import Simulation, SimulationRequest
from broker.app.simulating import simulate as replay
from broker.app.verbs import clusters as verbs
from broker.app.verbs import launching
from broker.config import find_home
from broker.frozen import frozen
from broker.types import Autostop, Cluster, Plan, Run

__all__ = [
    "Launched", "advise", "cancel", "down", "exec", "jobs", "launch", "logs", "plan", "queue", "simulate", "status",
]  # fmt: skip


@frozen
class Launched:
    """A cluster that is up, and the run that was started; `run_id` is None for a task with nothing to run."""

    cluster: Cluster
    run_id: int | None


async def plan(task: TaskLike, *, clouds: Collection[str] | None = None, cache: Path | None = None) -> Plan:
    """Rank every placement that fits, cheapest to finish first (per hour if the task states no work). Starts nothing.

    `task` is a file (Path, or a string of one line), YAML text (a string of several lines), a mapping with a file's
    content, or a Task. `clouds` limits the plan to some clouds. Prices come from the price book in `cache`, by default
    the one that the command line uses.

    Raises TaskError for an invalid task, NoOfferError with verified hints if nothing fits, StateError if the price book
    cannot be opened.
    """

    def rank() -> Plan:
        market = Market(cache or find_cache(), home=find_home())
        (resolved,) = apply_checkpoint_default(find_home(), [market.resolve(read_task(task))])
        return market.plan(resolved, usable_clouds=None if clouds is None else frozenset(clouds))

    return await asyncio.to_thread(rank)


async def launch(
    task: TaskLike,
    *,
    cluster: str | None = None,
    idle_minutes_to_autostop: int | None = None,
    down: bool = False,
    hedge: int = 2,
    retry_until_up: bool = False,
    home: Path | None = None,
    on_note: Notes | None = None,
) -> Launched:
    """Start a cluster and a task on it, and return once the task is submitted; `logs` follows it.

    This starts billing without confirmation: see `plan` for the price. A cluster of that name that is up is reused.
    `cluster` defaults to a name that is the same for every launch of the task. With `down`, the idle cluster is
    terminated instead of stopped. `hedge` is the number of locations to try in parallel.

    Raises TaskError, UsageError, NoOfferError, CloudError. After a CloudError or a cancellation, `down(cluster)`
    terminates what may have been started.
    """
    autostop = None
    if idle_minutes_to_autostop is not None or down:
        autostop = Autostop(idle_minutes=idle_minutes_to_autostop or 0, is_down=down)
    found = read_task(task)
    if is_remote(home):
        started = await call_server(
            home, on_note, launching.launch, task=found, cluster=cluster, autostop=autostop, hedge=hedge,
            retry_until_up=retry_until_up, is_dryrun=False, show=_accept, confirm=_accept, on_stage=_ignore,
        )  # fmt: skip
        known = (await call_server(home, on_note, verbs.show_status)).clusters
        return Launched(cluster=next(each for each in known if each.name == started.cluster), run_id=started.run_id)
    with open_context(home, on_note) as context:
        target = ClusterTarget.of(context, found, name=cluster, autostop=autostop)

        def prepare_apart(other: Context) -> PreparedLaunch:
            return prepare(other, [found], replace(target, context=other))

        ready = await use_in_thread(home, on_note, prepare_apart)
        run_id = await start_cluster(context, target, ready, hedge=hedge, retry_until_up=retry_until_up)
        return Launched(cluster=context.find_cluster(target.name), run_id=run_id)


def _accept(plans: Sequence[Plan]) -> None:
    pass


def _ignore(text: str) -> None:
    pass


async def exec(cluster: str, task: TaskLike, *, home: Path | None = None, on_note: Notes | None = None) -> int:
    """Start a task's `run`, without its `setup`, on a cluster that is up; return the run's id.

    A task that requests accelerators reserves them and runs alongside others; any other task has the whole cluster.
    Raises UsageError for an unknown cluster or one that is not up, CloudError if its nodes do not respond.
    """
    if is_remote(home):
        return await call_server(home, on_note, launching.exec_task, cluster=cluster, task=read_task(task))
    with open_context(home, on_note) as context:
        return await exec_task(context, clusters.find_up(context, cluster), read_task(task))


async def status(*, refresh: bool = False, home: Path | None = None, on_note: Notes | None = None) -> Status:
    """Return all clusters and their cost; with `refresh`, query the clouds for their current state.

    A cloud that cannot be queried is in `failures`; its clusters show their last known state.
    """
    if is_remote(home):
        return await call_server(home, on_note, verbs.show_status, is_refreshing=refresh)
    with open_context(home, on_note) as context:
        return await clusters.read_status(context, is_refreshing=refresh)


async def queue(cluster: str, *, home: Path | None = None) -> tuple[Run, ...]:
    """Return the runs of a cluster that is up, oldest first. Raises UsageError, CloudError."""
    if is_remote(home):
        return tuple(sorted(await call_server(home, None, verbs.list_runs, cluster=cluster), key=lambda run: run.id))
    with open_context(home) as context:
        runs = await context.gang.list_runs(clusters.find_up(context, cluster))
        return tuple(sorted(runs, key=lambda run: run.id))


async def cancel(cluster: str, run_ids: Sequence[int] | None = None, *, home: Path | None = None) -> tuple[int, ...]:
    """Cancel runs of a cluster, or all if `run_ids` is None; return the ids of those that were live.

    Raises UsageError for an unknown cluster or one that is not up, CloudError if its nodes do not respond.
    """
    if is_remote(home):
        wanted = None if run_ids is None else tuple(run_ids)
        return await call_server(home, None, verbs.cancel_runs, cluster=cluster, run_ids=wanted)
    with open_context(home) as context:
        return tuple(await clusters.cancel_runs(context, clusters.find_up(context, cluster), run_ids))


async def logs(
    cluster: str, run_id: int | None = None, *, follow: bool = True, home: Path | None = None
) -> AsyncIterator[str]:
    """Yield the output of a run, line by line; by default of the newest run, until it ends.

    Raises RunFailedError after the last line of a failed run, so a loop that ends without an error means success.
    """
    if is_remote(home):
        known = await call_server(home, None, verbs.find_run, cluster=cluster, run_id=run_id)
        async for line in list_remote_lines(home, verbs.follow_run, cluster=cluster, run_id=known, is_following=follow):
            yield line
        return
    with open_context(home) as context:
        found = clusters.find_up(context, cluster)
        wanted = clusters.find_run_id(context, cluster, run_id)
        async for line in clusters.follow_run(context, found, wanted, is_following=follow):
            yield line


async def down(
    *names: str, now: bool = False, home: Path | None = None, on_note: Notes | None = None
) -> tuple[str, ...]:
    """Terminate clusters, by name or pattern (`dev-*`), and delete their disks; return their names.

    Waits until files written to mounted buckets are uploaded, unless `now`, and returns once each is confirmed gone.
    Raises UsageError for an unknown name or the cluster of a live job, and BrokerError if a cloud fails or files are
    not uploaded, after the other clusters are terminated.
    """
    if is_remote(home):
        preview = await call_server(home, on_note, verbs.preview_down, patterns=names)
        kept = await call_server(
            home, on_note, verbs.terminate_clusters, names=preview.names, on_down=_ignore, is_immediate=now
        )
        clusters.raise_failures([*preview.failures, *kept], ended_count=len(preview.names) - len(kept))
        return preview.names
    with open_context(home, on_note) as context:
        wanted, failures = clusters.select_clusters(context, names)
        refused = await clusters.take_down(context, wanted, is_immediate=now)
        clusters.raise_failures([*failures, *refused], ended_count=len(wanted) - len(refused))
        return tuple(each.name for each in wanted)


async def advise(
    *,
    tokens: float | str,
    params: float | str | None = None,
    active_params: float | str | None = None,
    sequence: int = 4096,
    batch: float | str | None = None,
    deadline: str | None = None,
    budget_usd: float | None = None,
    dtype: Precision = "bf16",
    gpus: Sequence[str] = (),
    infra: str | None = None,
    gpus_max: int = 512,
    spot: bool | None = None,
    trainer: Trainer | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    vocab: int | None = None,
    home: Path | None = None,
) -> Recommendation:
    """Recommend GPUs and parallelism for training a model, with time and cost. Starts nothing.

    Amounts are numbers or text such as 7B; `batch` is in tokens, `deadline` is a duration such as 5d. `params`
    specifies the model, or `layers` and `hidden` do. `Recommendation.task` is the first option's task file as YAML
    text, which `plan` and `jobs.launch` accept.
    """
    request = AdviceRequest(
        params=_write_amount(params), active_params=_write_amount(active_params), tokens=_write_amount(tokens) or "",
        sequence=sequence, batch=_write_amount(batch), deadline=deadline, budget_usd=budget_usd, dtype=dtype,
        gpus=",".join(gpus) or None, infra=infra, gpus_max=gpus_max, spot=spot, trainer=trainer, layers=layers,
        hidden=hidden, heads=heads, vocab=vocab,
    )  # fmt: skip
    return await use_in_thread(home, None, lambda context: recommend(context, request))


def _write_amount(amount: float | str | None) -> str | None:
    return f"{amount:.15g}".replace("e+", "e") if isinstance(amount, int | float) else amount


async def simulate(
    task: TaskLike,
    *,
    traces: Path | None = None,
    policies: Sequence[str] | None = None,
    starts: int = 16,
    optima: int | None = None,
    apart: bool = False,
    notice_s: float = 0.0,
    deadline_hours: float | None = None,
    home: Path | None = None,
) -> Simulation:
    """Compare spot policies for a task on the recorded markets in `traces`, or on synthetic ones.

    `starts` is the number of start times, `optima` the number of those for which the optimum is computed. `apart`
    replays each trace as a separate market instead of a zone of one market. The task must state its work
    (`goal: {work: 40h}`).
    """
    request = SimulationRequest(
        traces=traces, policies=None if policies is None else tuple(policies), starts=starts, optima=optima,
        is_apart=apart, notice_s=notice_s, deadline_hours=deadline_hours,
    )  # fmt: skip
    found = read_task(task)
    return await use_in_thread(home, None, lambda context: replay(context, found, request))
