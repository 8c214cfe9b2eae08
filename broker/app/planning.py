"""Read, check and plan tasks: the first half of every launch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.app.container import Context, load_entry
from broker.app.extras import find_missing_extra, write_install
from broker.app.known_starts import plan_with_known_starts
from broker.config import find_checkpoint_url, find_home
from broker.errors import NoOfferError, UnknownNameError, UsageError
from broker.formatting import format_count
from broker.types import Notice, Origin, Plan, Task

if TYPE_CHECKING:
    from broker.clouds.base import ExplainMissingImage
    from broker.types import Cluster

SMALL_GIB = 2.0  # below, pip and apt are often killed
TaskLike = Task | Mapping[str, Any] | str | Path


def read_task(task: TaskLike) -> Task:
    """Read a single task, as `read_tasks` does. Raises UsageError for a pipeline of several tasks."""
    found = read_tasks(task)
    if len(found) > 1:
        raise UsageError(f"expected one task, found a pipeline of {len(found)}", hints=["plan the tasks one at a time"])
    return found[0]


def read_tasks(task: TaskLike) -> Sequence[Task]:
    """Read tasks from a file, from YAML text, or from a mapping with the content of a file. Raises TaskError.

    A Path, or a string of one line, names a file; a string of several lines is YAML text.
    """
    if isinstance(task, Task):
        from broker.task.checking import check_task

        return [check_task(task)]
    from broker.task.loader import load_tasks, load_tasks_text

    if isinstance(task, Mapping):
        return load_tasks_text(_write_yaml(task), "task")
    if isinstance(task, str) and "\n" in task:
        return load_tasks_text(task, "task")
    return load_tasks(Path(task))


def _write_yaml(task: Mapping[str, Any]) -> str:
    """Write the task as JSON, adapted to YAML.

    YAML differs from JSON in two ways: it does not combine escaped surrogate pairs, and it accepts C1 controls only
    escaped. Raises UsageError for values that JSON cannot represent.
    """
    import json
    import re

    try:
        text = json.dumps(task, indent=1, default=str, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"invalid task: {error}") from None
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def anchor(task: Task) -> Task:
    """Make paths absolute because the daemon that reads them later runs in another folder, and targets on nodes too."""
    from broker.task.mounts import locate_target

    def fix(path: str) -> str:
        return path if "://" in path else str(Path(path).expanduser().absolute())

    mounts = {locate_target(target): fix(source) for target, source in task.file_mounts.items()}
    storage = tuple(replace(each, target=locate_target(each.target)) for each in task.storage_mounts)
    workdir = fix(task.workdir) if task.workdir else None
    return replace(task, workdir=workdir, file_mounts=mounts, storage_mounts=storage)


def apply_checkpoint_default(home: Path, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Write the user's default checkpoint location into tasks that set none: it is part of what a job costs."""
    if (url := find_checkpoint_url(home)) is None:
        return tuple(tasks)
    from broker.jobs.checkpoints import apply_default_checkpoints

    return apply_default_checkpoints(tasks, url)


def plan_launch(context: Context, task: Task, *, is_dryrun: bool = False) -> Plan:
    """Plan on the clouds that are set up, or on all clouds for a dry run."""
    if is_dryrun:
        return context.plan(task)
    named = {each.cloud for each in task.resources}
    if None not in named:  # avoid loading the adapters of other clouds
        usable_clouds = frozenset(name for name in named if name and name in context.clouds)
        with suppress(NoOfferError):  # raised below with an explanation that includes the offers of other clouds
            history, is_refused = context.read_history(), context.find_refused()
            rank = partial(context.market.rank, usable_clouds=usable_clouds, history=history, is_refused=is_refused)
            return plan_with_known_starts(context, task, rank)
    try:
        return context.plan(task, usable_clouds=frozenset(context.clouds))
    except UnknownNameError:
        raise
    except NoOfferError as error:
        usable = ", ".join(f"`{name}`" for name in context.clouds) or "no cloud"
        # A server has no local cloud unless its operator allows it.
        here = ", or run on this machine with `--infra local`" if "local" in context.clouds else ""
        hint = f"usable: {usable}; plan on every cloud with `--dryrun`{here}"
        enable = "see how to enable more clouds with `broker check`"
        hints = [*_list_installs(named - {None, *context.clouds}), hint, enable, *error.hints]
        raise NoOfferError(error.message, hints=hints) from None


def _list_installs(clouds: Collection[str | None]) -> list[str]:
    """List the commands that install the missing libraries of requested clouds."""
    extras = {cloud: find_missing_extra(cloud) for cloud in sorted(filter(None, clouds))}
    return [f"`{cloud}` requires its library: `{write_install(extra)}`" for cloud, extra in extras.items() if extra]


def check_notices(tasks: Sequence[Task], *, is_launch: bool, note: Callable[[str], None]) -> None:
    """Note unsupported fields. Raises TaskError if a launch would not run the task as described."""
    for task in tasks:
        _report_notices([each for each in task.notices if each.cloud is None], is_launch=is_launch, note=note)


def check_place(task: Task, clouds: Collection[str], *, is_launch: bool, note: Callable[[str], None]) -> None:
    """Note or refuse, like `check_notices`, fields that some of `clouds`, where the task may run, do not support."""
    found = [each for each in task.notices if each.cloud in clouds]
    if "local" in clouds:
        found += _list_outside(task)
    _report_notices(found, is_launch=is_launch, note=note)


def _list_outside(task: Task) -> list[Notice]:
    """List the targets of files and buckets that local nodes do not have: they share this machine's root folder."""
    places = {each.target: each.origin for each in task.storage_mounts}
    return [
        Notice(
            origin=places.get(target) or task.origin or Origin(file="command line", line=0, column=0),
            field="file_mounts",
            message=f"`file_mounts` on local: `{target}` is outside the home folders of nodes",
            hint=f"use a target below `~/`, such as `~{target}`",
            blocks_launch=True,
        )
        for target in (*task.file_mounts, *places)
        if target.startswith("/")
    ]


def check_plans(plans: Sequence[Plan], *, home: Path | None, is_launch: bool, note: Callable[[str], None]) -> None:
    """Check the chosen cloud for a plan, and the clouds of all estimates for a launch, which may use any of them.

    `home` is the state folder with the clouds' settings.
    """
    for each in plans:
        estimates = each.estimates if is_launch else each.estimates[:1]
        clouds = {one.placement.offer.cloud for one in estimates}
        check_place(each.task, clouds, is_launch=is_launch, note=note)
        for warning in (warn_of_small_memory(each), warn_of_missing_image(each, find_home(home))):
            if warning:
                note(f"note: {warning}")


def warn_of_more_nodes(task: Task, cluster: Cluster) -> str | None:
    """Warn about a run on more nodes than its task requests: SkyPilot would start it on as many as requested."""
    if len(cluster.nodes) <= task.num_nodes:
        return None
    nodes = format_count(len(cluster.nodes), "node")
    return f"the run uses all {nodes} of cluster `{cluster.name}`; the task requests {task.num_nodes}"


def warn_of_small_memory(plan: Plan) -> str | None:
    """Warn about a machine with too little memory for most programs, if the task requests no amount.

    It has been chosen only because no larger one fits (`ORDINARY_GIB`).
    """
    placement = plan.choice.placement
    offer, resources = placement.offer, placement.get_resources(plan.task)
    is_requested = resources.memory_gib or resources.memory_gib_per_vcpu or resources.instance_type or offer.accelerator
    if is_requested or offer.cloud == "local" or offer.memory_gib >= SMALL_GIB:
        return None
    where = f"{resources.origin}: " if resources.origin else ""
    memory = f"{offer.memory_gib:g} GiB"
    return f"{where}without `memory`, the cheapest machine has {memory}; request more, for example `memory: 8+`"


def warn_of_missing_image(plan: Plan, home: Path) -> str | None:
    """Warn that a launch of the choice would be refused because the cloud has no image for the machine.

    A container does not help: it runs on the cloud's image.
    """
    from broker.clouds import MISSING_IMAGES

    placement = plan.choice.placement
    offer, resources = placement.offer, placement.get_resources(plan.task)
    is_named = resources.image_id and not resources.container
    if is_named or offer.cloud not in MISSING_IMAGES:
        return None
    explain: ExplainMissingImage = load_entry(MISSING_IMAGES[offer.cloud])
    why = explain(offer, home)
    where = f"{resources.origin}: " if resources.origin else ""
    return f"{where}a launch requires `image_id`: {why}" if why else None


def check_programs(context: Context, plans: Sequence[Plan]) -> None:
    """Raise StateError if this machine lacks a program to connect to nodes of a cloud that the plans may use."""
    from broker.clouds.base import NeedsPrograms
    from broker.sites.openssh import find_program

    for name in {each.placement.offer.cloud for plan in plans for each in plan.estimates}:
        cloud = context.clouds.get(name)
        programs: tuple[str, ...] = cloud.programs if isinstance(cloud, NeedsPrograms) else ()
        for program in programs:
            find_program(program)


def _report_notices(notices: Sequence[Notice], *, is_launch: bool, note: Callable[[str], None]) -> None:
    if not notices:
        return
    from broker.task.notices import refuse_blocking, render_notice

    if is_launch:
        refuse_blocking(notices)
    for notice in notices:
        note(render_notice(notice))
