"""`broker launch` and what people do with a cluster that is up: exec, status, logs, queue, cancel."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Annotated

import typer

from broker.cli import options
from broker.cli.context import Context
from broker.cli.copies import note_copies
from broker.cli.plan import show_plan
from broker.cli.refreshing import raise_unasked, refresh_clusters
from broker.cli.render import clean, plain, print_json, print_line, print_note, print_table, show_duration, show_usd
from broker.cli.uploads import fill_buckets
from broker.errors import NoOfferError, RunFailedError, TransientError, UnreachedError, UsageError
from broker.types import Autostop, Cluster, ClusterStatus, Node, NodeState, Plan, RunStatus, Task

POLL_S = 0.3
BOOT_S_MAX = 300.0  # large GPU machines and images take minutes until somebody answers
CLUSTER_NAME = r"[A-Za-z]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"  # it becomes tags, folders and host names
ClusterName = Annotated[str, typer.Argument(help="The cluster's name.", show_default=False)]


def plan_launch(context: Context, task: Task, *, is_dryrun: bool) -> Plan:
    """A plan among the clouds that can launch; a dry run plans among all."""
    if is_dryrun:
        return context.plan(task)
    try:
        return context.plan(task, usable_clouds=frozenset(context.clouds))
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
    cluster: Annotated[str | None, typer.Option("--cluster", "-c", help="The cluster's name.")] = None,
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
    if cluster is not None and not re.fullmatch(CLUSTER_NAME, cluster):
        raise UsageError(
            f"`{cluster}` cannot be a cluster's name", hints=["letters, digits, `-`, `_`, `.`; at most 63"]
        )
    wanted = cluster or f"{one.name or 'broker'}-{context.config.owner[:4]}"
    autostop = one.resources[0].autostop
    if idle is not None or down:
        autostop = Autostop(idle_minutes=0 if idle is None else idle, is_down=down)
    context.check_autostop(autostop, {each.placement.offer.cloud for each in plan.estimates})
    known = context.store.get_cluster(wanted)
    if known is None or known.status is not ClusterStatus.UP:
        note_copies(context, [plan])
        confirm_price([plan], yes=yes)
    (one,) = fill_buckets([one])
    try:
        asyncio.run(_launch(context, wanted, one, plan, autostop, hedge=hedge, is_patient=retry_until_up))
    except KeyboardInterrupt:
        tell_what_is_left(context, wanted)
        raise typer.Exit(130) from None
    follow_unless(context, wanted, context.store.newest_run_id(wanted), detach=detach)


async def _launch(
    context: Context, name: str, task: Task, plan: Plan, autostop: Autostop | None, *, hedge: int, is_patient: bool
) -> None:
    from broker.storage.mounts import add_mounts

    cluster = await context.provisioner.up(
        name, plan, autostop=autostop, on_event=print_note, hedge=hedge, retry_until_up=is_patient
    )
    if len(cluster.nodes) < task.num_nodes:
        raise UsageError(
            f"cluster `{name}` has {len(cluster.nodes)} nodes, the task asks for {task.num_nodes}",
            hints=["choose another name with `-c`"],
        )
    print_note(f"cluster `{name}` is up: {len(cluster.nodes)} nodes")
    await _submit(context, cluster, add_mounts(task))
    if autostop:
        await context.gang.set_autostop(cluster, autostop)
    await context.provisioner.finish()  # nobody would wait for it later: this process may be the only one


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


async def _submit(context: Context, cluster: Cluster, task: Task) -> int:
    from broker.config import find_checkpoint_url
    from broker.jobs.checkpoints import find_checkpoint_dir, settle_tasks

    if task.run is None and task.setup is None:
        raise UsageError("the task has nothing to run", hints=["give it `run:`"])
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
        "a node lets in by ssh who launched it, from the address of that moment: is this another network?",
        f"{end}; the same launch with `-c {cluster.name}` goes on waiting",
    ]
    return TransientError(f"{error.message}, for {BOOT_S_MAX / 60:g} minutes", hints=[*hints, *error.hints])


def exec_(
    cluster: ClusterName,
    entrypoint: options.Entrypoint,
    name: options.Name = None,
    workdir: options.Workdir = None,
    env: options.Env = None,
    env_file: options.EnvFile = None,
    secret: options.Secret = None,
    detach: options.Detach = False,
) -> None:
    """Run a task on a cluster that is up; its `setup` is not run again."""
    from dataclasses import replace

    context = Context()
    found = find_up(context, cluster)
    overrides = options.Overrides(name=name, workdir=workdir, env=env or (), env_file=env_file, secret=secret or ())
    one = options.read_task(entrypoint, overrides)
    options.check_notices([one], is_launch=True)
    run_id = asyncio.run(_submit(context, found, replace(one, setup=None)))
    follow_unless(context, cluster, run_id, detach=detach)


def find_up(context: Context, name: str) -> Cluster:
    """A cluster that can take work."""
    cluster = context.find_cluster(name)
    if cluster.status is ClusterStatus.STOPPED:
        raise UsageError(f"cluster `{name}` is stopped", hints=[f"`broker start {name}`"])
    if cluster.status is not ClusterStatus.UP:
        raise UsageError(f"cluster `{name}` is {cluster.status.value}", hints=["`broker status`"])
    return cluster


def follow_unless(context: Context, name: str, run_id: int, *, detach: bool) -> None:
    come_back = f"`broker logs {name} {run_id}` shows its output, `broker down {name}` ends the cluster"
    if detach:
        print_note(f"run {run_id} is submitted; {come_back}")
        return
    try:
        asyncio.run(_follow(context, context.find_cluster(name), run_id, is_following=True))
    except KeyboardInterrupt:
        print_note(f"\ndetached; the run goes on. {come_back}")


async def _follow(context: Context, cluster: Cluster, run_id: int, *, is_following: bool) -> None:
    """Print the merged log; a failed run is this command's failure."""
    offset, rest = 0, b""
    while True:
        report = await context.gang.poll(cluster, run_id)
        if report.unreachable and len(report.unreachable) == len(cluster.nodes):
            raise UsageError(f"no node of `{cluster.name}` answers", hints=["`broker status --refresh`"])
        chunk, offset = await context.gang.read_log(cluster, run_id, offset=offset)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            print_line(clean(line.decode(errors="replace")))
        if not chunk and (report.status.is_terminal or not is_following):
            break
        if not chunk:
            await context.clock.sleep(POLL_S)
    if rest:
        print_line(clean(rest.decode(errors="replace")))
    if report.status.is_terminal:
        print_note(f"run {run_id} on `{cluster.name}` ended {report.status.value}")
        if report.status is not RunStatus.SUCCEEDED:
            code = "" if report.returncode is None else f" with exit code {report.returncode}"
            raise RunFailedError(f"run {run_id} ended {report.status.value}{code}", returncode=report.returncode or 1)


def logs(
    cluster: ClusterName,
    run_id: Annotated[int | None, typer.Argument(help="Which run; the newest without it.", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Go on until the run ends.")] = True,
) -> None:
    """Show what a run prints."""
    context = Context()
    found = find_up(context, cluster)
    wanted = run_id or context.store.newest_run_id(cluster)
    if not wanted:
        raise UsageError(f"nothing has run on `{cluster}`", hints=[f"`broker exec {cluster} TASK.yaml`"])
    try:
        asyncio.run(_follow(context, found, wanted, is_following=follow))
    except KeyboardInterrupt:
        print_note(f"\ndetached; `broker logs {cluster} {wanted}` comes back")


def queue(cluster: ClusterName, as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False) -> None:
    """List the runs of a cluster."""
    context = Context()
    runs = asyncio.run(context.gang.list_runs(find_up(context, cluster)))
    if as_json:
        print_json(plain(list(runs)))
        return
    now_s = context.clock.now_s()
    rows = [
        [str(run.id), run.name or "-", run.status.value, show_duration((run.ended_s or now_s) - run.started_s),
         "-" if run.returncode is None else str(run.returncode)]
        for run in sorted(runs, key=lambda run: -run.id)
    ]  # fmt: skip
    print_table(["ID", "NAME", "STATUS", "TIME", "EXIT CODE"], rows, right=("ID", "TIME", "EXIT CODE"))


def cancel(
    cluster: ClusterName,
    run_ids: Annotated[list[int] | None, typer.Argument(help="Which runs; all live ones with --all.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Every live run.")] = False,
) -> None:
    """End runs of a cluster."""
    context = Context()
    found = find_up(context, cluster)

    async def end() -> list[int]:
        live = [run.id for run in await context.gang.list_runs(found) if not run.status.is_terminal]
        wanted = live if everything else [each for each in run_ids or [] if each in live]
        for run_id in wanted:
            await context.gang.cancel(found, run_id)
        return wanted

    ended = asyncio.run(end())
    for run_id in ended:
        print_line(f"run {run_id} is cancelled")
    if not ended:
        print_line("nothing to cancel")


def status(
    refresh: Annotated[bool, typer.Option("--refresh", "-r", help="Ask the clouds first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False,
) -> None:
    """Show clusters, managed jobs and what they have cost."""
    context = Context()
    known = context.store.list_clusters()
    clusters, failures = asyncio.run(refresh_clusters(context, known)) if refresh else (known, {})
    now_s = context.clock.now_s()
    spent = {each.name: context.store.spend_usd(cluster=each.name, now_s=now_s) for each in clusters}
    jobs = context.store.list_live_job_ids()
    if jobs:
        context.ensure_daemon()
    if as_json:
        print_json(
            {
                "clusters": [{**plain(each), "spent_usd": spent[each.name]} for each in clusters],
                "live_jobs": list(jobs),
                "spent_usd": context.store.spend_usd(now_s=now_s),
                "not_asked": {name: error.message for name, error in failures.items()},
            }
        )
        raise_unasked(failures)
        return
    rows = []
    for each in clusters:
        offer = each.placement.offer
        lost = sum(1 for node in each.nodes if node.state == "TERMINATED")
        state = each.status.value + (f" ({lost} lost)" if lost else "")
        where = f"{offer.cloud} {offer.zone or offer.region}"
        rate = "-" if each.status is ClusterStatus.STOPPED else show_usd(each.placement.usd_hour)
        rows.append(
            [each.name, state, f"{each.placement.node_count} x {offer.instance_type}", where,
             show_duration(now_s - each.created_s), rate, show_usd(spent[each.name])]
        )  # fmt: skip
    if rows:
        columns = ["CLUSTER", "STATUS", "NODES", "WHERE", "AGE", "USD/h", "USD"]
        print_table(columns, rows, right=("AGE", "USD/h", "USD"))
    else:
        print_line("No clusters; `broker launch TASK.yaml` makes one")
    if jobs:
        print_line(f"{len(jobs)} managed job{'s' if len(jobs) > 1 else ''} live; `broker jobs queue` shows them")
    print_line(f"Spent so far: {show_usd(context.store.spend_usd(now_s=now_s))} USD")
    raise_unasked(failures)
