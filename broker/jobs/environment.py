"""The environment of a managed job's program: which job and attempt it is, and where its state outlives it."""

from __future__ import annotations

from collections.abc import Mapping

from broker.config import Config
from broker.jobs.checkpoints import find_checkpoint_dir, name_job_folder
from broker.types import Attempt, Cluster, Job


def make_envs(
    config: Config, job: Job, attempt: Attempt, cluster: Cluster, *, advice: Mapping[str, str]
) -> dict[str, str]:
    """Variables by name. `advice` says what preemptions to expect there, and how often to save."""
    folders = {"BROKER_CHECKPOINT_DIR": name_job_folder(job)}
    if job.pipeline:  # where its tasks leave what the next ones need
        folders["BROKER_PIPELINE_DIR"] = job.pipeline
    places = {key: find_checkpoint_dir(config, job.task, cluster, name=name) for key, name in folders.items()}
    return {
        "BROKER_JOB_ID": str(job.id),
        "BROKER_ATTEMPT": str(attempt.number),
        "SKYPILOT_TASK_ID": f"broker-{job.stem}",
        **advice,
        **{key: place for key, place in places.items() if place is not None},
    }
