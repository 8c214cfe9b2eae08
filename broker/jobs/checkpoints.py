"""Where checkpoints go: to the bucket that task or user name, else, for nodes on this machine, to a folder here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from broker.config import Config
from broker.errors import UsageError
from broker.types import CheckpointSpec, Cluster, Job, Plan, Task

BUCKET_SCHEMES = ("s3://", "gs://", "az://")
HERE = "local"  # the cloud whose nodes see the state folder
# What says that a program keeps its state where it is told to: it names the variable, or is one of our trainers.
SAVES = re.compile(r"\bBROKER_CHECKPOINT_DIR\b|-m\s+trainers\.(?!setup\b)")


def find_checkpoint_dir(config: Config, task: Task, cluster: Cluster, *, name: str) -> str | None:
    """BROKER_CHECKPOINT_DIR of what goes by `name`; None where nothing outlives the nodes.

    In a bucket, which may serve several people, the installation's id is part of it.
    """
    if task.checkpoint.to is not None:
        return f"{task.checkpoint.to.rstrip('/')}/{config.owner}-{name}"
    return str(config.checkpoints / name) if is_here(cluster) else None


def name_job_folder(job: Job) -> str:
    """A job that was submitted again goes on with the first one's checkpoints."""
    return job.folder


def is_here(cluster: Cluster) -> bool:
    """Whether its nodes are processes of this machine: their handles are folders."""
    return all("://" not in node.handle for node in cluster.nodes)


def settle_tasks(tasks: Iterable[Task], default: str | None) -> tuple[Task, ...]:
    """Each with its place for checkpoints written down: where it goes may not change while a job lives."""
    return tuple(
        each if each.checkpoint.to or not default else replace(each, checkpoint=replace(each.checkpoint, to=default))
        for each in tasks
    )


def check_checkpoints(plans: Sequence[Plan]) -> Sequence[str]:
    """Sentences for the user about jobs that would begin anew after each preemption.

    Raises UsageError where the task shows that it saves its state, and may run where that would be lost.
    """
    found = []
    for plan in plans:
        task = plan.task
        clouds = sorted({each.placement.offer.cloud for each in plan.estimates} - {HERE})
        if not clouds or task.checkpoint.to or keeps_its_own(task):
            continue
        name = f"`{task.name}`" if task.name else "the task"
        if is_saving(task):
            place = f"{task.origin}: " if task.origin else ""
            raise UsageError(
                f"{place}{name} may run on {' or '.join(clouds[:3])}, where its checkpoints would end with its nodes",
                hints=(
                    "write `checkpoint: {to: s3://BUCKET/FOLDER}`; gs://, az:// and shared folders do as well",
                    'or for all tasks: `checkpoints = "s3://BUCKET/FOLDER"` in `config.toml` in the state folder',
                ),
            )
        found.append(
            f"{name} names no place for checkpoints: after a preemption it begins anew (`checkpoint: {{to: ...}}`)"
        )
    return found


def is_saving(task: Task) -> bool:
    """Whether the task counts on BROKER_CHECKPOINT_DIR, as far as its file shows."""
    return replace(task.checkpoint, to=None) != CheckpointSpec() or names_our_folder(task)


def names_our_folder(task: Task) -> bool:
    return any(SAVES.search(text) for text in (task.setup, task.run) if text)


def keeps_its_own(task: Task) -> bool:
    """SkyPilot's way: the program writes into a bucket that it sees as a folder."""
    is_mounted = any(each.mode in ("MOUNT", "MOUNT_CACHED") for each in task.storage_mounts)
    return is_mounted and not names_our_folder(task)
