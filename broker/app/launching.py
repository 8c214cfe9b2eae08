"""The launch sequence, shared by clusters, managed jobs and every other kind of launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from broker.app.backup_place import check_backups
from broker.app.buckets import TrackUpload, fill_buckets, note_copies
from broker.app.container import Context
from broker.app.limits import LaunchSize
from broker.app.planning import (
    anchor,
    apply_checkpoint_default,
    check_notices,
    check_plans,
    check_programs,
    plan_launch,
    warn_of_more_nodes,
)
from broker.app.sources import check_sources, note_state_folder
from broker.errors import TransientError, UnreachedError, UsageError
from broker.formatting import format_count, format_usd
from broker.frozen import frozen
from broker.state.people import Owned
from broker.types import Autostop, Cluster, ClusterStatus, NodeState, Plan, Task
from broker.wording import describe_event

if TYPE_CHECKING:
    from broker.jobs.monitor import AttemptMonitor

POLL_S = 0.3
NOTE_EVERY_S = 15.0  # minimum time between notes about the same failure of a start


class LaunchTarget(Protocol):
    """The target of a launch: a cluster, or managed jobs. A new kind implements these five methods."""

    def apply_defaults(self, tasks: Sequence[Task]) -> tuple[Task, ...]:
        """Write the user's defaults into the tasks. Raises UsageError for tasks that this target cannot launch."""
        ...

    def place(self, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        """Drop placements that this target does not use for the tasks together. Raises NoOfferError if none is left."""
        ...

    def check(self, plans: Sequence[Plan]) -> bool:
        """Check the requirements of this target; return whether the launch starts anything that costs money."""
        ...

    def list_allowances_s(self, tasks: Sequence[Task]) -> Sequence[float] | None:
        """Return the seconds for which the nodes of each task may run unattended; None if that does not apply."""
        ...

    def mount(self, task: Task) -> Task:
        """Add the steps that mount buckets, unless each start adds them."""
        ...


@contextmanager
def ignore_upload(url: str) -> Iterator[Callable[[int, int], None]]:
    """Accept progress reports of an upload, and show nothing."""
    yield lambda done, total: None


@frozen
class Callbacks:
    """The callbacks of a launch; the defaults show nothing and accept every price."""

    show: Callable[[Sequence[Plan]], None] = lambda plans: None
    confirm: Callable[[Sequence[Plan]], None] = lambda plans: None  # raises to refuse the price
    track_upload: TrackUpload = ignore_upload


def refuse_schedules(tasks: Sequence[Task]) -> None:
    """Raise UsageError for a task with `schedule`, which only `app/schedules.py` launches."""
    if any(each.schedule is not None for each in tasks):
        raise UsageError(
            "`schedule` starts managed jobs only",
            hints=["store the schedule with `broker jobs launch`, or with `broker.jobs.schedule` in Python"],
        )


@frozen
class PreparedLaunch:
    """Tasks that passed all checks and have their files uploaded, with their plans."""

    tasks: tuple[Task, ...]
    plans: tuple[Plan, ...]
    is_priced: bool = False  # whether the price was accepted, which the target may not require


def prepare(
    context: Context,
    tasks: Sequence[Task],
    target: LaunchTarget,
    *,
    callbacks: Callbacks | None = None,
    is_dryrun: bool = False,
    demand: LaunchSize | None = None,
) -> PreparedLaunch:
    """Resolve, apply defaults, plan, check, confirm, upload and mount, in this order, without starting machines.

    `demand` is the number of gangs that will start; by default one per plan. A dry run ends after showing the plans.
    Raises TaskError, UsageError, NoOfferError, StateError, AuthError, InvalidRequestError, LimitError, and the errors
    of `callbacks`.
    """
    callbacks = callbacks or Callbacks()
    refuse_schedules(tasks)
    tasks = tuple(context.resolve(anchor(each)) for each in tasks)
    check_notices(tasks, is_launch=not is_dryrun, note=context.note)
    note_state_folder(context, tasks)
    context.check_notify(tasks)
    tasks = target.apply_defaults(tasks)
    check_backups(context, tasks)
    plans = target.place([plan_launch(context, each, is_dryrun=is_dryrun) for each in tasks])
    check_plans(plans, home=context.market.home, is_launch=not is_dryrun, note=context.note)
    callbacks.show(plans)
    if is_dryrun:
        return PreparedLaunch(tasks=tasks, plans=plans)
    tasks = fetch_repositories(context, tasks)
    is_priced = target.check(plans)
    if is_priced:
        check_programs(context, plans)
        check_sources(tasks)
        for sentence in context.grants.check(plans, allowances_s=target.list_allowances_s(tasks)):
            context.note(sentence)
        note_copies(context, plans)
        context.admit([plan.choice for plan in plans], demand or LaunchSize())
        callbacks.confirm(plans)
    tasks = fill_buckets(context, tasks, track=callbacks.track_upload)
    return PreparedLaunch(tasks=tuple(target.mount(each) for each in tasks), plans=plans, is_priced=is_priced)


def fetch_repositories(context: Context, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Clone the tasks' repositories on this machine. Without any repository, nothing is imported."""
    if all(each.repository is None for each in tasks):
        return tuple(tasks)
    from broker.app.repositories import fetch_repositories as fetch

    return fetch(tasks, context.config.home, note=context.note)


@frozen
class ClusterTarget:
    """The launch target for a named cluster, on which one task runs."""

    context: Context
    name: str
    autostop: Autostop | None = None

    @classmethod
    def of(
        cls, context: Context, task: Task, *, name: str | None = None, autostop: Autostop | None = None
    ) -> ClusterTarget:
        """Make a target; derive the name and the autostop rule from the task if they are not given."""
        name = name_cluster(task, context.config.owner) if name is None else name
        return cls(context=context, name=name, autostop=autostop or task.autostop)

    def apply_defaults(self, tasks: Sequence[Task]) -> tuple[Task, ...]:
        """Fill in the checkpoint folders, and print a note about limits that do not apply to clusters."""
        note_job_limits(self.context, tasks)
        return apply_checkpoint_default(self.context.config.home, tasks)

    def place(self, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        """Return the plans unchanged: a cluster runs one task."""
        return tuple(plans)

    def check(self, plans: Sequence[Plan]) -> bool:
        """Check the name and autostop; return False for a running cluster, which is already paid for."""
        check_cluster_name(self.name)
        clouds = {each.placement.offer.cloud for plan in plans for each in plan.estimates}
        self.context.check_autostop(self.autostop, clouds)
        known = self.context.store.clusters.get(self.name)
        return known is None or known.status is not ClusterStatus.UP

    def list_allowances_s(self, tasks: Sequence[Task]) -> None:
        """Return None: a cluster without a job has no allowance."""
        return None

    def mount(self, task: Task) -> Task:
        """Add the commands that mount buckets to the task's `setup` and `run`."""
        from broker.storage.mounts import add_mounts

        return add_mounts(task)


def name_cluster(task: Task, owner: str) -> str:
    """Derive the cluster's name, the same for every launch of the task, and valid even if the task's name is not."""
    name = task.name or "broker"
    if not name[0].isalpha():
        name = f"broker-{name}"
    return f"{name[:58].rstrip('-_.')}-{owner[:4]}"


def check_cluster_name(name: str) -> None:
    """Raise UsageError for an invalid cluster name."""
    from broker.task.allowed import CLUSTER_NAME

    if not CLUSTER_NAME.admits(name):
        near = CLUSTER_NAME.suggest(name)
        hints = [near] if near else []
        raise UsageError(f"invalid cluster name `{name}`: it must be {CLUSTER_NAME.expected}", hints=hints)


def note_job_limits(context: Context, tasks: Sequence[Task]) -> None:
    """Note limits that apply to managed jobs only, so that users do not rely on them for a cluster."""
    remedy = (
        "submit the task with `broker jobs launch`, or terminate the cluster when it is idle with `-i MINUTES --down`"
    )
    if any(task.max_duration_s is not None for task in tasks):
        context.note(f"`max_duration` has no effect on a cluster: {remedy}")
    if any(task.goal is not None and task.goal.budget_usd is not None for task in tasks):
        context.note(f"`budget` is enforced for managed jobs only, so this cluster may cost more: {remedy}")


async def start_cluster(
    context: Context,
    target: ClusterTarget,
    ready: PreparedLaunch,
    *,
    hedge: int,
    retry_until_up: bool = False,
    on_stage: Callable[[str], None] = lambda text: None,
) -> int | None:
    """Bring the cluster up and start the task; return the run's ID, or None for a task with nothing to run.

    `on_stage` is called with a description of each stage.
    """
    name, (task,), (plan,) = target.name, ready.tasks, ready.plans
    context.check_owner(Owned.CLUSTER, name)  # it may have been created while the user read the price
    known = context.store.clusters.get(name)

    def claim() -> None:
        if not ready.is_priced:
            raise UsageError(
                f"cluster `{name}` ended while the launch was prepared; nothing was started",
                hints=["repeat the command to launch it again, at the price that it then shows"],
            )
        context.own(Owned.CLUSTER, name)

    cluster = await context.provisioner.up(
        name,
        plan,
        autostop=target.autostop,
        on_event=lambda event: context.note(describe_event(event)),
        hedge=hedge,
        retry_until_up=retry_until_up,
        on_claimed=claim,
    )
    if len(cluster.nodes) < task.num_nodes:
        raise UsageError(
            f"cluster `{name}` has {format_count(len(cluster.nodes), 'node')}, but the task requires {task.num_nodes}",
            hints=["launch a new cluster: pass another name with `-c`"],
        )
    if known is not None and known.status is ClusterStatus.UP:
        cluster = match_alternative(cluster, task)
    context.note(f"cluster `{name}` is up: {format_count(len(cluster.nodes), 'node')}")
    on_stage(f"uploading files to `{name}`" if task.workdir or task.file_mounts else f"starting the run on `{name}`")
    run_id = None
    if task.run is None and task.setup is None:
        await wait_booted(context, cluster, task)
    else:
        run_id = await start_run(context, cluster, task)
    # an agent that never receives a request assumes that its node is unclaimed, and terminates it
    if target.autostop or run_id is None:
        await context.gang.set_autostop(cluster, target.autostop)
    await context.provisioner.finish()  # wait for pending releases: no later process may do so
    return run_id


def match_alternative(cluster: Cluster, task: Task) -> Cluster:
    """Return the cluster with the alternative of `task` that fits its placement, which was planned for another task."""
    from broker.optimizer.filters import find_alternative

    alternative = find_alternative(task, cluster.placement)
    return replace(cluster, placement=replace(cluster.placement, alternative=alternative))


async def exec_task(context: Context, cluster: Cluster, task: Task) -> int:
    """Start the task's `run`, without its `setup`, on a cluster that is up; return the run's ID."""
    refuse_schedules([task])
    task = replace(anchor(task), setup=None)
    task = context.resolve(task)
    check_notices([task], is_launch=True, note=context.note)
    note_job_limits(context, [task])
    (task,) = fetch_repositories(context, apply_checkpoint_default(context.config.home, [task]))
    return await start_run(context, match_alternative(cluster, task), task)


async def start_run(context: Context, cluster: Cluster, task: Task) -> int:
    """Start a prepared task on the cluster; return the run's ID. Raises UsageError for a task with nothing to run."""
    from broker.jobs.checkpoints import find_checkpoint_dir
    from broker.runtime.reserving import find_reservation

    if task.run is None and task.setup is None:
        raise UsageError("the task has no `run:` and no `setup:`", hints=["add `run:` to the task"])
    find_reservation(task, cluster)  # before anything is sent: refuse accelerators that no node has
    if warning := warn_of_more_nodes(task, cluster):
        context.note(f"note: {warning}")
    run_id = context.store.clusters.next_run_id(cluster.name)
    envs = {"SKYPILOT_TASK_ID": f"broker-{cluster.name}-{run_id}"}
    if place := find_checkpoint_dir(context.config, task, cluster, name=cluster.name):
        envs["BROKER_CHECKPOINT_DIR"] = place
    await wait_booted(context, cluster, task)
    await context.gang.start(cluster, task, run_id=run_id, envs=envs)
    return run_id


async def wait_booted(context: Context, cluster: Cluster, task: Task) -> None:
    """Prepare the nodes, retrying while they boot: clouds report nodes as running before SSH answers.

    Raises TransientError for lost nodes, and for nodes that a managed job would also give up on.
    """
    monitor: AttemptMonitor | None = None
    noted_s: dict[str, float] = {}
    while True:
        try:
            await context.gang.prepare(cluster, task)
            return
        except TransientError as error:
            from broker.jobs.booting import StartVerdict, judge_start
            from broker.jobs.monitor import AttemptMonitor

            monitor = monitor or AttemptMonitor(cluster.name)
            cluster = await context.provisioner.refresh(cluster)
            if judge_start(error, cluster, monitor, context.clock.now_s()) is not StartVerdict.WAIT:
                raise explain_unreachable(context, cluster, error) from error
            is_booting = isinstance(error, UnreachedError)
            now_s = context.clock.now_s()
            if now_s - noted_s.get(error.message, -NOTE_EVERY_S) >= NOTE_EVERY_S:
                noted_s[error.message] = now_s
                context.note(f"{error.message}; {'it may still be booting' if is_booting else 'retrying'}")
            await context.clock.sleep(POLL_S)


def explain_unreachable(context: Context, cluster: Cluster, error: TransientError) -> TransientError:
    """Make the error for a cluster that does not respond, with its cost and how to inspect and terminate it."""
    from broker.jobs.booting import get_wait_s

    lost = [node for node in cluster.nodes if node.state in (NodeState.TERMINATED, NodeState.STOPPED)]
    usd_hour = sum(node.usd_hour for node in cluster.nodes if node.state is not NodeState.TERMINATED)
    end = f"terminate the cluster with `broker down {cluster.name}`; until then, it costs {format_usd(usd_hour)} USD/h"
    if lost:
        end_word = "terminated" if lost[0].state is NodeState.TERMINATED else "stopped"
        message = f"{len(lost)} of {len(cluster.nodes)} nodes {end_word} ({lost[0].reason})"
        return TransientError(message, hints=[end, *error.hints])
    console = context.provisioner.hint_console(cluster, error.node_id) if isinstance(error, UnreachedError) else None
    hints = [
        *([console] if console else []),
        "nodes accept SSH only from this machine's public address: check whether you are behind a proxy or VPN",
        f"{end}; to keep waiting, repeat the launch with `-c {cluster.name}`",
    ]
    return TransientError(f"{error.message} for {get_wait_s(error) / 60:g} minutes", hints=[*hints, *error.hints])


def describe_interrupted(context: Context, name: str) -> Sequence[str]:
    """Describe what is still running after an interrupted launch, its cost, and the command that terminates it."""
    from broker.provision.launch import describe

    begun = [intent.request.placement for intent in context.store.intents.list_open(name)]
    cluster = context.store.clusters.get(name)
    if cluster is not None and cluster.status is ClusterStatus.UP:
        return [
            f"interrupted; cluster `{name}` is up at {format_usd(cluster.placement.usd_hour)} USD/h",
            *(f"  also being released: {describe(each)}; `broker gc` terminates it" for each in begun),
            f"terminate it with `broker down {name}`, or run a task on it with `broker exec {name} TASK.yaml`",
        ]
    if not begun:
        return ["interrupted; nothing was started"]
    at_stake_usd = sum(each.usd_hour for each in begun)
    return [
        f"interrupted; these requests may cost up to {format_usd(at_stake_usd)} USD/h until they are cancelled:",
        *(f"  {describe(each)}" for each in begun),
        f"cancel them with `broker down {name}`, or continue with the same launch and `-c {name}`",
    ]
