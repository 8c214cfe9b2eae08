"""`broker launch` brings a cluster up and runs a task on it; `broker exec` runs one on a cluster that is up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer

from broker.cli import options
from broker.cli.clusters import ClusterName, find_up, follow_unless
from broker.cli.context import Context
from broker.cli.copies import note_copies
from broker.cli.plan import show_plan
from broker.cli.render import print_json, print_note, show_count, show_usd
from broker.cli.terminal import Bar, show_wait
from broker.cli.uploads import fill_buckets
from broker.errors import NoOfferError, TransientError, UnknownNameError, UnreachedError, UsageError
from broker.task.allowed import CLUSTER_NAME
from broker.types import Autostop, Cluster, ClusterStatus, Node, NodeState, Plan, Task
from broker.wording import describe_event

POLL_S = 0.3
BOOT_S_MAX = 300.0  # large GPU machines and images take minutes until somebody answers


def plan_launch(context: Context, task: Task, *, is_dryrun: bool) -> Plan:
    """A plan among the clouds that can launch; a dry run plans among all."""
    if is_dryrun:
        return context.plan(task)
    try:
        return context.plan(task, usable_clouds=frozenset(context.clouds))
    except UnknownNameError:
        raise
    except NoOfferError as error:
        usable = ", ".join(f"`{name}`" for name in context.clouds)
        hint = f"set up here: {usable}; `--dryrun` plans on every cloud, `--infra local` runs the task on this machine"
        enable = "`broker check` says how to enable more clouds"
        raise NoOfferError(error.message, hints=[hint, enable, *error.hints]) from None


def confirm_price(plans: Sequence[Plan], *, yes: bool) -> None:
    """Money is visible: nothing paid starts without a yes."""
    choices = [plan.choice for plan in plans]
    text = f"{show_usd(max(each.placement.usd_hour for each in choices))} USD/h"
    if all(each.expected_usd is not None for each in choices):
        text += f", {show_usd(sum(each.expected_usd or 0.0 for each in choices))} USD expected in all"
    if all(each.placement.offer.cloud == "local" for each in choices):
        print_note(f"pretend price: {text}")
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
    idle: Annotated[int | None, typer.Option("--idle-minutes-to-autostop", "-i", min=0)] = None,
    down: Annotated[bool, typer.Option("--down", help="Take the cluster down when it is idle.")] = False,
    hedge: options.Hedge = 2,
    retry_until_up: Annotated[bool, typer.Option("--retry-until-up", "-r", help="Ask until a place gives.")] = False,
    yes: options.Yes = False,
    detach: options.Detach = False,
    dryrun: options.Dryrun = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dryrun: the plan as data.")] = False,
) -> None:
    """Bring a cluster up and run a task on it."""
    context = Context()
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
    autostop = one.resources[0].autostop
    if idle is not None or down:
        autostop = Autostop(idle_minutes=0 if idle is None else idle, is_down=down)
    _check_cluster(context, wanted, plan, autostop, yes=yes)
    (one,) = fill_buckets([one])
    try:
        with show_wait(f"bringing up `{wanted}`", is_told=False) as bar:
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
    """What to do with a cluster whose task has nothing to run."""
    print_note(
        f"the task has no `run:`, so nothing runs; `broker ssh {name}` opens a shell, "
        f"`broker exec {name} TASK.yaml` runs a task, `broker down {name}` ends the cluster"
    )


def _name_cluster(task: Task, owner: str) -> str:
    """The same for every launch of the task here; a task may be called what a cluster cannot."""
    name = task.name or "broker"
    if not name[0].isalpha():
        name = f"broker-{name}"
    return f"{name[:58].rstrip('-_.')}-{owner[:4]}"


def _check_cluster(context: Context, name: str, plan: Plan, autostop: Autostop | None, *, yes: bool) -> None:
    """That it can be called so and end so, and that its price is wanted; one that is up is paid for already."""
    if not CLUSTER_NAME.admits(name):
        near = CLUSTER_NAME.suggest(name)
        hints = [f"a cluster's name is {CLUSTER_NAME.expected}", *([near] if near else [])]
        raise UsageError(f"`{name}` cannot be a cluster's name", hints=hints)
    context.check_autostop(autostop, {each.placement.offer.cloud for each in plan.estimates})
    known = context.store.get_cluster(name)
    if known is None or known.status is not ClusterStatus.UP:
        check_access(context, plan)
        note_copies(context, [plan])
        confirm_price([plan], yes=yes)


def check_access(context: Context, plan: Plan) -> None:
    """Whether nodes will reach the task's buckets. Raises AuthError, InvalidRequestError before anything is paid."""
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
            f"cluster `{name}` has {show_count(len(cluster.nodes), 'node')}, the task asks for {task.num_nodes}",
            hints=["choose another name with `-c`"],
        )
    print_note(f"cluster `{name}` is up: {show_count(len(cluster.nodes), 'node')}")
    bar.describe(f"sending files to `{name}`" if task.workdir or task.file_mounts else f"starting the run on `{name}`")
    task = add_mounts(task)  # before the look for something to run: mounts are made in `setup`
    run_id = None
    if task.run is None and task.setup is None:
        await _prepare(context, cluster, task)
    else:
        run_id = await submit(context, cluster, task)
    if autostop or run_id is None:  # a node whose agent was never asked anything ends itself as unclaimed
        await context.gang.set_autostop(cluster, autostop)
    await context.provisioner.finish()  # nobody would wait for it later: this process may be the only one
    return run_id


def tell_what_is_left(context: Context, name: str) -> None:
    """After Ctrl-C: what was begun and goes on costing, and the command that ends it."""
    from broker.provision.failover import describe

    begun = [intent.request.placement for intent in context.store.list_open_intents(name)]
    cluster = context.store.get_cluster(name)
    if cluster is not None and cluster.status is ClusterStatus.UP:
        lines = [f"interrupted; cluster `{name}` is up at {show_usd(cluster.placement.usd_hour)} USD/h"]
        lines += [f"  and {describe(each)} is being given back; `broker gc` ends it" for each in begun]
        lines.append(f"`broker down {name}` ends it, `broker exec {name} TASK.yaml` runs something on it")
    elif begun:
        at_stake_usd = sum(each.usd_hour for each in begun)
        lines = [
            f"interrupted; this was asked for, and may cost up to {show_usd(at_stake_usd)} USD/h until it is ended:"
        ]
        lines += [f"  {describe(each)}" for each in begun]
        lines.append(f"`broker down {name}` ends it, the same launch with `-c {name}` goes on")
    else:
        lines = ["interrupted; nothing was begun"]
    for line in lines:
        print_note(line)


async def submit(context: Context, cluster: Cluster, task: Task) -> int:
    from broker.config import find_checkpoint_url
    from broker.jobs.checkpoints import find_checkpoint_dir, settle_tasks
    from broker.runtime.reserving import find_reservation

    if task.run is None and task.setup is None:
        raise UsageError("the task has nothing to run", hints=["give it `run:`"])
    find_reservation(task, cluster)  # before anything is sent: what no node has is refused
    (task,) = settle_tasks([task], find_checkpoint_url(context.config))
    run_id = context.store.next_run_id(cluster.name)
    envs = {"SKYPILOT_TASK_ID": f"broker-{cluster.name}-{run_id}"}
    if place := find_checkpoint_dir(context.config, task, cluster, name=cluster.name):
        envs["BROKER_CHECKPOINT_DIR"] = place
    await _prepare(context, cluster, task)
    await context.gang.start(cluster, task, run_id=run_id, envs=envs)
    return run_id


async def _prepare(context: Context, cluster: Cluster, task: Task) -> None:
    """As soon as the nodes can be reached: one that its cloud calls running may still be booting."""
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
                f"{error.message}; {'it may still boot' if isinstance(error, UnreachedError) else 'trying again'}"
            )
            await context.clock.sleep(POLL_S)


def explain_unreachable(
    context: Context, cluster: Cluster, lost: Sequence[Node], error: TransientError
) -> TransientError:
    """What to look at, what goes on costing, and how it is ended."""
    usd_hour = sum(node.usd_hour for node in cluster.nodes if node.state is not NodeState.TERMINATED)
    end = f"`broker down {cluster.name}` ends the cluster; until then it costs {show_usd(usd_hour)} USD/h"
    if lost:
        message = f"{len(lost)} of {len(cluster.nodes)} nodes ended ({lost[0].reason})"
        return TransientError(message, hints=[end, *error.hints])
    console = context.provisioner.hint_console(cluster, error.node_id) if isinstance(error, UnreachedError) else None
    hints = [
        *([console] if console else []),
        "a node accepts ssh from this machine's public address only: is a proxy or VPN in between?",
        f"{end}; the same launch with `-c {cluster.name}` goes on waiting",
    ]
    return TransientError(f"{error.message}, for {BOOT_S_MAX / 60:g} minutes", hints=[*hints, *error.hints])


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
    """Run a task on a cluster that is up; its `setup` is not run again.

    A task that asks for accelerators reserves them and runs beside others; any other has the whole cluster.
    """
    from dataclasses import replace

    context = Context()
    found = find_up(context, cluster)
    overrides = options.Overrides(
        name=name, workdir=workdir, gpus=gpus, env=env or (), env_file=env_file, secret=secret or ()
    )
    one = options.read_task(entrypoint, overrides)
    if any(each.accelerator for each in one.resources):
        one = context.resolve(one)
    options.check_notices([one], is_launch=True)
    run_id = asyncio.run(submit(context, found, replace(one, setup=None)))
    follow_unless(context, cluster, run_id, detach=detach)
