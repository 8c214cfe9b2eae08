"""Choose where checkpoints go: the bucket set by task or user, else a local folder if the nodes are local."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from broker.config import Config
from broker.errors import UsageError
from broker.types import CheckpointSpec, Cluster, Job, Plan, Task

BUCKET_SCHEMES = ("s3://", "gs://", "az://")
HERE = "local"  # the cloud whose nodes can access the state folder
# Signs that a program saves its state in our folder: it uses the variable, or is one of the bundled trainers.
TRAINS = r"-m\s+trainers\.(?!setup\b)"
SAVES = re.compile(rf"\bBROKER_CHECKPOINT_DIR\b|{TRAINS}")


def find_checkpoint_dir(config: Config, task: Task, cluster: Cluster, *, name: str) -> str | None:
    """Return BROKER_CHECKPOINT_DIR for `name`; None if no storage outlives the nodes.

    A bucket may be shared by several users, so the folder name contains the installation's ID.
    """
    if task.checkpoint.to is not None:
        return f"{task.checkpoint.to.rstrip('/')}/{config.owner}-{name}"
    return str(config.checkpoints / name) if is_here(cluster) else None


def name_job_folder(job: Job) -> str:
    """Return the folder of the job's checkpoints; a retried job shares the original job's folder."""
    return job.folder


def is_here(cluster: Cluster) -> bool:
    """Return whether the nodes are processes on this machine, whose handles are folders."""
    return all("://" not in node.handle for node in cluster.nodes)


def apply_default_checkpoints(tasks: Iterable[Task], default: str | None) -> tuple[Task, ...]:
    """Return the tasks with an explicit checkpoint location, so that a changed default does not affect live jobs.

    A task with neither a program nor a goal, such as that of a cluster for later, has nothing to save, and its machines
    need no access to the location.
    """
    return tuple(
        replace(task, checkpoint=replace(task.checkpoint, to=default))
        if default and (task.run or task.goal) and not task.checkpoint.to
        else task
        for task in tasks
    )


def check_checkpoints(plans: Sequence[Plan]) -> Sequence[str]:
    """Return notices about jobs that would start from scratch after each preemption.

    Raises UsageError for a task that saves its state but may run where the state would be lost.
    """
    notices = []
    for plan in plans:
        task = plan.task
        clouds = sorted({estimate.placement.offer.cloud for estimate in plan.estimates} - {HERE})
        if not clouds or task.checkpoint.to:
            continue
        name = f"`{task.name}`" if task.name else "the task"
        if task.recovery.caches_setup:
            notices.append(f"`cache_setup` of {name} has no effect without `checkpoint: {{to: ...}}`")
        if keeps_its_own(task):
            continue
        if is_saving(task):
            place = f"{task.origin}: " if task.origin else ""
            raise UsageError(
                f"{place}{name} may run on {' or '.join(clouds[:3])}, where checkpoints would be lost with the nodes",
                hints=(
                    "add `checkpoint: {to: s3://BUCKET/FOLDER}`; gs://, az:// and shared folders work too",
                    'or, for all tasks, set `checkpoints = "s3://BUCKET/FOLDER"` in `config.toml` in the state folder',
                ),
            )
        notices.append(
            f"{name} has no checkpoint location: after a preemption it starts from scratch (`checkpoint: {{to: ...}}`)"
        )
    return notices


def is_saving(task: Task) -> bool:
    """Return whether the task file shows that the program uses BROKER_CHECKPOINT_DIR."""
    return replace(task.checkpoint, to=None) != CheckpointSpec() or names_our_folder(task)


def names_our_folder(task: Task) -> bool:
    """Return whether `setup` or `run` mentions the checkpoint folder, a sign that the program saves its state."""
    return any(SAVES.search(text) for text in (task.setup, task.run) if text)


def runs_bundled_trainer(task: Task) -> bool:
    """Return whether `run` starts one of the bundled trainers, which resume on any number of ranks."""
    return task.run is not None and re.search(TRAINS, task.run) is not None


def keeps_its_own(task: Task) -> bool:
    """Return whether the program saves in a mounted bucket, as SkyPilot tasks do."""
    is_mounted = any(each.mode in ("MOUNT", "MOUNT_CACHED") and not each.is_read_only for each in task.storage_mounts)
    return is_mounted and not names_our_folder(task)
