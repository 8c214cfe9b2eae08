"""`broker launch` starts a cluster and runs a task on it; `broker exec` runs a task on a running cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer

from broker.app.container import Context
from broker.cli import options
from broker.cli.clusters import ClusterName, find_up, follow_unless
from broker.cli.context import make_context
from broker.cli.copies import note_copies
from broker.cli.plan import show_plan
from broker.cli.render import print_json, print_note
from broker.cli.terminal import Bar, show_wait
from broker.cli.uploads import fill_buckets
from broker.errors import NoOfferError, TransientError, UnknownNameError, UnreachedError, UsageError
from broker.formatting import format_count, format_usd
from broker.task.allowed import CLUSTER_NAME
from broker.types import Autostop, Cluster, ClusterStatus, Node, NodeState, Plan, Task
from broker.wording import describe_event

POLL_S = 0.3
BOOT_S_MAX = 300.0  # large GPU machines and images take minutes to boot


def plan_launch(context: Context, task: Task, *, is_dryrun: bool) -> Plan:
    """Plan on the clouds that are set up; a dry run plans on all."""
    if is_dryrun:
        return context.plan(task)
    try:
        return context.plan(task, usable_clouds=frozenset(context.clouds))
    except UnknownNameError:
        raise
    except NoOfferError as error:
        usable = ", ".join(f"`{name}`" for name in context.clouds)
        hint = f"set up: {usable}; plan on every cloud with `--dryrun`, or run on this machine with `--infra local`"
        enable = "see how to enable more clouds with `broker check`"
        raise NoOfferError(error.message, hints=[hint, enable, *error.hints]) from None


def confirm_price(plans: Sequence[Plan], *, yes: bool) -> None:
    """Ask before anything paid starts, unless `yes`."""
    choices = [plan.choice for plan in plans]
    text = f"{format_usd(max(each.placement.usd_hour for each in choices))} USD/h"
    if all(each.expected_usd is not None for each in choices):
        text += f", {format_usd(sum(each.expected_usd or 0.0 for each in choices))} USD expected in total"
    if all(each.placement.offer.cloud == "local" for each in choices):
        print_note(f"simulated price: {text}")
    elif not yes:
        typer.confirm(f"Start at {text}?", abort=True)


def launch(
    entrypoint: options.Entrypoint,
    cluster: options.ClusterOption = None,
    name: options.Name = None,
    workdir: options.Workdir = None,
    infra: options.Infra = None,
    gpus: options.Gpus = None,
    cpus: options.Cpus = None,
    memory: options.Memory = None,
    instance_type: options.InstanceType = None,
    num_nodes: options.NumNodes = None,
    use_spot: options.UseSpot = None,
    env: options.Env = None,
    env_file: options.EnvFile = None,
    secret: options.Secret = None,
    idle: Annotated[
        int | None,
        typer.Option(
            "--idle-minutes-to-autostop",
            "-i",
            metavar="MINUTES",
            min=0,
            help="Stop the cluster after this many idle minutes.",
        ),
    ] = None,
    down: Annotated[bool, typer.Option("--down", help="Terminate the idle cluster instead of stopping it.")] = False,
    hedge: options.Hedge = 2,
    retry_until_up: Annotated[
        bool, typer.Option("--retry-until-up", "-r", help="Keep retrying until capacity is available.")
    ] = False,
    yes: options.Yes = False,
    detach: options.Detach = False,
    dryrun: options.Dryrun = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dryrun: print the plan as JSON.")] = False,
) -> None:
    """Start a cluster and run a task on it."""
    context = make_context()
    overrides = options.Overrides(
        name=name, workdir=workdir, infra=infra, gpus=gpus, cpus=cpus, memory=memory, instance_type=instance_type,
        num_nodes=num_nodes, use_spot=use_spot, env=env or (), env_file=env_file, secret=secret or (),
    )  # fmt: skip
    one = context.resolve(options.read_task(entrypoint, overrides))
    options.check_notices([one], is_launch=not dryrun)
    plan = plan_launch(context, one, is_dryrun=dryrun)
    options.check_plans([plan], is_launch=not dryrun)
    if not dryrun:
        context.prepare(plan)
    if dryrun and as_json:
        from broker.cli.plan import describe_plan

        print_json(describe_plan(plan, 10))
        return
    show_plan(plan)
    if dryrun:
        return
    wanted = _name_cluster(one, context.config.owner) if cluster is None else cluster
    autostop = one.autostop
    if idle is not None or down:
        autostop = Autostop(idle_minutes=0 if idle is None else idle, is_down=down)
    _check_cluster(context, wanted, plan, autostop, yes=yes)
    (one,) = fill_buckets([one])
    try:
        with show_wait(f"starting `{wanted}`", is_told=False) as bar:
            work = _launch(context, wanted, one, plan, autostop, bar, hedge=hedge, is_patient=retry_until_up)
            run_id = asyncio.run(work)
    except KeyboardInterrupt:
        tell_what_is_left(context, wanted)
        raise typer.Exit(130) from None
    if run_id is None:
        _note_development(wanted)
    else:
        follow_unless(context, wanted, run_id, detach=detach)


def _note_development(name: str) -> None:
    """Say how to use a cluster whose task has no `run`."""
    print_note(
        f"the task has no `run:`, so nothing runs; open a shell with `broker ssh {name}`, "
        f"run a task with `broker exec {name} TASK.yaml`, terminate the cluster with `broker down {name}`"
    )


def _name_cluster(task: Task, owner: str) -> str:
    """Derive the cluster's name, the same for every launch of the task; adapt task names that clusters cannot have."""
    name = task.name or "broker"
    if not name[0].isalpha():
        name = f"broker-{name}"
    return f"{name[:58].rstrip('-_.')}-{owner[:4]}"


def _check_cluster(context: Context, name: str, plan: Plan, autostop: Autostop | None, *, yes: bool) -> None:
    """Check the name, autostop, access and price; a cluster that is up is already paid for."""
    if not CLUSTER_NAME.admits(name):
        near = CLUSTER_NAME.suggest(name)
        hints = [near] if near else []
        raise UsageError(f"invalid cluster name `{name}`: it must be {CLUSTER_NAME.expected}", hints=hints)
    context.check_autostop(autostop, {each.placement.offer.cloud for each in plan.estimates})
    known = context.store.clusters.get(name)
    if known is None or known.status is not ClusterStatus.UP:
        check_access(context, plan)
        note_copies(context, [plan])
        confirm_price([plan], yes=yes)


def check_access(context: Context, plan: Plan) -> None:
    """Check that nodes can access the task's buckets. Raises AuthError, InvalidRequestError before anything is paid."""
    from dataclasses import replace

    from broker.config import find_checkpoint_url
    from broker.jobs.checkpoints import settle_tasks

    (task,) = settle_tasks([plan.task], find_checkpoint_url(context.config))
    for sentence in context.grants.check([replace(plan, task=task)]):
        print_note(sentence)


async def _launch(
    context: Context,
    name: str,
    task: Task,
    plan: Plan,
    autostop: Autostop | None,
    bar: Bar,
    *,
    hedge: int,
    is_patient: bool,
) -> int | None:
    """Bring the cluster up and submit the task; return the run's id, or None for a task with nothing to run."""
    from broker.storage.mounts import add_mounts

    known = context.store.clusters.get(name)
    cluster = await context.provisioner.up(
        name,
        plan,
        autostop=autostop,
        on_event=lambda event: print_note(describe_event(event)),
        hedge=hedge,
        retry_until_up=is_patient,
    )
    if len(cluster.nodes) < task.num_nodes:
        raise UsageError(
            f"cluster `{name}` has {format_count(len(cluster.nodes), 'node')}, but the task requires {task.num_nodes}",
            hints=["launch a new cluster: pass another name with `-c`"],
        )
    if known is not None and known.status is ClusterStatus.UP:
        cluster = match_alternative(cluster, task)
    print_note(f"cluster `{name}` is up: {format_count(len(cluster.nodes), 'node')}")
    bar.describe(
        f"uploading files to `{name}`" if task.workdir or task.file_mounts else f"starting the run on `{name}`"
    )
    task = add_mounts(task)  # before the check for something to run: mounts are part of `setup`
    run_id = None
    if task.run is None and task.setup is None:
        await _prepare(context, cluster, task)
    else:
        run_id = await submit(context, cluster, task)
    if autostop or run_id is None:  # a node whose agent receives no request terminates itself as unclaimed
        await context.gang.set_autostop(cluster, autostop)
    await context.provisioner.finish()  # wait for pending releases: there may be no later process that does
    return run_id


def match_alternative(cluster: Cluster, task: Task) -> Cluster:
    """The cluster as the place of a task that it was not planned for."""
    from dataclasses import replace

    from broker.optimizer.filters import find_alternative

    alternative = find_alternative(task, cluster.placement)
    return replace(cluster, placement=replace(cluster.placement, alternative=alternative))


def tell_what_is_left(context: Context, name: str) -> None:
    """After Ctrl-C, list what was started and still costs money, with the command that terminates it."""
    from broker.provision.failover import describe

    begun = [intent.request.placement for intent in context.store.intents.list_open(name)]
    cluster = context.store.clusters.get(name)
    if cluster is not None and cluster.status is ClusterStatus.UP:
        lines = [f"interrupted; cluster `{name}` is up at {format_usd(cluster.placement.usd_hour)} USD/h"]
        lines += [f"  also being released: {describe(each)}; `broker gc` terminates it" for each in begun]
        lines.append(f"terminate it with `broker down {name}`, or run a task on it with `broker exec {name} TASK.yaml`")
    elif begun:
        at_stake_usd = sum(each.usd_hour for each in begun)
        lines = [
            f"interrupted; these requests may cost up to {format_usd(at_stake_usd)} USD/h until they are cancelled:"
        ]
        lines += [f"  {describe(each)}" for each in begun]
        lines.append(f"cancel them with `broker down {name}`, or continue with the same launch and `-c {name}`")
    else:
        lines = ["interrupted; nothing was started"]
    for line in lines:
        print_note(line)


async def submit(context: Context, cluster: Cluster, task: Task) -> int:
    """Start the task on the cluster; return the run's id. Raises UsageError for a task with nothing to run."""
    from broker.config import find_checkpoint_url
    from broker.jobs.checkpoints import find_checkpoint_dir, settle_tasks
    from broker.runtime.reserving import find_reservation

    if task.run is None and task.setup is None:
        raise UsageError("the task has no `run:` and no `setup:`", hints=["add `run:` to the task"])
    find_reservation(task, cluster)  # before anything is sent: refuse what no node has
    (task,) = settle_tasks([task], find_checkpoint_url(context.config))
    run_id = context.store.clusters.next_run_id(cluster.name)
    envs = {"SKYPILOT_TASK_ID": f"broker-{cluster.name}-{run_id}"}
    if place := find_checkpoint_dir(context.config, task, cluster, name=cluster.name):
        envs["BROKER_CHECKPOINT_DIR"] = place
    await _prepare(context, cluster, task)
    await context.gang.start(cluster, task, run_id=run_id, envs=envs)
    return run_id


async def _prepare(context: Context, cluster: Cluster, task: Task) -> None:
    """Prepare the nodes, retrying while they boot: clouds report nodes as running before SSH answers."""
    give_up_s = context.clock.now_s() + BOOT_S_MAX
    while True:
        try:
            await context.gang.prepare(cluster, task)
            return
        except TransientError as error:
            cluster = await context.provisioner.refresh(cluster)
            lost = [node for node in cluster.nodes if node.state is NodeState.TERMINATED]
            if lost or context.clock.now_s() >= give_up_s:
                raise explain_unreachable(context, cluster, lost, error) from error
            print_note(
                f"{error.message}; {'it may still be booting' if isinstance(error, UnreachedError) else 'retrying'}"
            )
            await context.clock.sleep(POLL_S)


def explain_unreachable(
    context: Context, cluster: Cluster, lost: Sequence[Node], error: TransientError
) -> TransientError:
    """Make the error for a cluster that does not answer: where to look, its cost, and how to terminate it."""
    usd_hour = sum(node.usd_hour for node in cluster.nodes if node.state is not NodeState.TERMINATED)
    end = f"terminate the cluster with `broker down {cluster.name}`; until then it costs {format_usd(usd_hour)} USD/h"
    if lost:
        message = f"{len(lost)} of {len(cluster.nodes)} nodes terminated ({lost[0].reason})"
        return TransientError(message, hints=[end, *error.hints])
    console = context.provisioner.hint_console(cluster, error.node_id) if isinstance(error, UnreachedError) else None
    hints = [
        *([console] if console else []),
        "nodes accept SSH only from this machine's public address: check for a proxy or VPN in between",
        f"{end}; to keep waiting, repeat the launch with `-c {cluster.name}`",
    ]
    return TransientError(f"{error.message} for {BOOT_S_MAX / 60:g} minutes", hints=[*hints, *error.hints])


def exec_(
    cluster: ClusterName,
    entrypoint: options.Entrypoint,
    name: options.Name = None,
    workdir: options.Workdir = None,
    gpus: options.Gpus = None,
    env: options.Env = None,
    env_file: options.EnvFile = None,
    secret: options.Secret = None,
    detach: options.Detach = False,
) -> None:
    """Run a task on a running cluster.

    The task's `setup` is not run. A task that requests accelerators reserves them and runs beside others; any
    other task has the whole cluster.
    """
    from dataclasses import replace

    context = make_context()
    found = find_up(context, cluster)
    overrides = options.Overrides(
        name=name, workdir=workdir, gpus=gpus, env=env or (), env_file=env_file, secret=secret or ()
    )
    one = options.read_task(entrypoint, overrides)
    if any(each.accelerator for each in one.resources):
        one = context.resolve(one)
    options.check_notices([one], is_launch=True)
    run_id = asyncio.run(submit(context, match_alternative(found, one), replace(one, setup=None)))
    follow_unless(context, cluster, run_id, detach=detach)
