"""Build the environment of a managed job's program: its job and attempt IDs, and its durable folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    members: Sequence[Job] = (),
) -> dict[str, str]:
    """Return variables by name. `advice` has the expected preemptions there and the checkpoint interval.

    `find_job` finds the first job in a series of retries, whose folders the later jobs share; `members` are all
    jobs of its pipeline.
    """
    folders = {"BROKER_CHECKPOINT_DIR": name_job_folder(job)}
    if job.pipeline:  # its tasks write the input of later tasks there
        first = find_job(job.resumes) if job.resumes else None
        folders["BROKER_PIPELINE_DIR"] = (first or job).pipeline
    places = {key: find_checkpoint_dir(config, job.task, cluster, name=name) for key, name in folders.items()}
    return {
        "BROKER_JOB_ID": str(job.id),
        "BROKER_ATTEMPT": str(attempt.number),
        **_make_ids(job, members),
        "TRACEPARENT": job.task.envs.get("TRACEPARENT", make_traceparent(job, attempt.number)),
        **advice,
        **{key: place for key, place in places.items() if place is not None},
    }


def _make_ids(job: Job, members: Sequence[Job]) -> dict[str, str]:
    """Return SkyPilot's variables that identify the job. One started without `--num-jobs` is job 0 of 1 there, too."""
    replaced = {each.resumes for each in members}
    current = [each for each in members if each.id not in replaced] or [job]
    envs = job.task.envs
    return {
        "SKYPILOT_TASK_ID": f"broker-{job.stem}",
        "SKYPILOT_TASK_IDS": "\n".join(
            f"broker-{each.stem}" for each in sorted(current, key=lambda each: each.resumes or each.id)
        ),
        "SKYPILOT_MANAGED_JOB_ID": str(job.id),
        "SKYPILOT_JOB_RANK": envs.get("SKYPILOT_JOB_RANK", "0"),
        "SKYPILOT_NUM_JOBS": envs.get("SKYPILOT_NUM_JOBS", "1"),
    }
