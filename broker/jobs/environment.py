"""Build the environment of a managed job's program: its job and attempt IDs, and its durable folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from broker.config import Config
from broker.jobs.checkpoints import find_checkpoint_dir, name_job_folder
from broker.jobs.trace_ids import make_traceparent
from broker.types import Attempt, Cluster, Job


def make_envs(
    config: Config,
    job: Job,
    attempt: Attempt,
    cluster: Cluster,
    *,
    advice: Mapping[str, str],
    find_job: Callable[[int], Job | None] = lambda job_id: None,
) -> dict[str, str]:
    """Return variables by name. `advice` has the expected preemptions there and the checkpoint interval.

    `find_job` finds the first job in a series of retries, whose folders the later jobs share.
    """
    folders = {"BROKER_CHECKPOINT_DIR": name_job_folder(job)}
    if job.pipeline:  # its tasks write the input of later tasks there
        first = find_job(job.resumes) if job.resumes else None
        folders["BROKER_PIPELINE_DIR"] = (first or job).pipeline
    places = {key: find_checkpoint_dir(config, job.task, cluster, name=name) for key, name in folders.items()}
    return {
        "BROKER_JOB_ID": str(job.id),
        "BROKER_ATTEMPT": str(attempt.number),
        "SKYPILOT_TASK_ID": f"broker-{job.stem}",
        "TRACEPARENT": job.task.envs.get("TRACEPARENT", make_traceparent(job, attempt.number)),
        **advice,
        **{key: place for key, place in places.items() if place is not None},
    }
