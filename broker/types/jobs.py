"""Managed jobs, which run to completion over as many attempts as necessary."""

from __future__ import annotations

from enum import StrEnum

from broker.frozen import frozen
from broker.types.market import Placement
from broker.types.outcomes import Outcome, OutcomeKind
from broker.types.task import Task


class JobStatus(StrEnum):
    """States of a managed job, named as in SkyPilot. The last seven are terminal and never change."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    FAILED_PRECHECKS = "FAILED_PRECHECKS"
    FAILED_NO_RESOURCE = "FAILED_NO_RESOURCE"
    FAILED_CONTROLLER = "FAILED_CONTROLLER"

    @property
    def is_terminal(self) -> bool:
        """Whether the job has ended, so that no controller acts on it any more."""
        return self not in (
            JobStatus.PENDING,
            JobStatus.STARTING,
            JobStatus.RUNNING,
            JobStatus.RECOVERING,
            JobStatus.CANCELLING,
        )


class WaitReason(StrEnum):
    """The reasons why a job has no machines yet. The values are shown by `--json`."""

    LIMIT = "limit"  # the number of live jobs has reached `max_live_jobs` or the project's limit
    CAPACITY = "capacity"  # clouds have refused, and will be called again later
    NEEDS = "needs"  # jobs that it depends on have not ended
    START = "start"  # the daemon has not begun starting it


@frozen
class JobWait:
    """The reason why a job waits. `position` counts from 1, and is set only if the job waits for the limit."""

    reason: WaitReason
    position: int | None = None
    limit: int | None = None
    until_s: float | None = None  # for capacity: time of the next request
    project: str = ""  # the project whose own limit the job waits for


@frozen
class GangHead:
    """The node that coordinates a gang. `epoch` grows with each move, to distinguish earlier heads."""

    epoch: int = 0
    rank: int = 0


@frozen
class ObservedCheckpoints:
    """The checkpoints in the folder of a program that failed, as `agent_checkpoints.observe` reports them.

    `number`: the highest number in a name, 0 without one. `unnumbered_s`, `time_s`: modification times (POSIX) of the
    newest file without a number, 0 without one, and of the newest file.
    """

    number: int = 0
    unnumbered_s: float = 0.0
    time_s: float = 0.0


@frozen
class Attempt:
    """One attempt at a job on one cluster. `number` counts from 1 and only grows."""

    job_id: int
    number: int
    cluster: str
    placement: Placement
    started_s: float
    running_s: float | None = None  # when the program was started
    resumed_s: float | None = None  # when it first reported a step
    lost_s: float | None = None  # when its first node was lost, or its program failed
    ended_s: float | None = None
    outcome: Outcome | None = None
    usd: float = 0.0
    kept_until_s: float | None = None  # its nodes are kept until then for the next attempt; None: released
    silent_s: float = 0.0  # observed silence of the nodes, for a controller that restarts
    generation: int = 1  # of its job group: number of starts of the group from the beginning
    ready_s: float | None = None  # in a job group: when its nodes were set up, so that `run` may start
    released_s: float | None = None  # in a job group: when `run` was allowed to start
    head: GangHead = GangHead()
    port: int | None = None  # in a job group: a free port of its first node, for its own service
    saved_s: float | None = None  # when it last reported a checkpoint of a later step than all before
    checkpoints: ObservedCheckpoints | None = None  # saved since the job was submitted, when its program failed

    @property
    def returncode(self) -> int | None:
        """The exit code of a program that failed by itself; otherwise None."""
        if self.outcome is None or self.outcome.kind is not OutcomeKind.PROGRAM_FAILED:
            return None
        return self.outcome.exit_code


@frozen
class Progress:
    """The newest line of BROKER_PROGRESS_FILE."""

    step: int = 0
    total: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    checkpoint_step: int | None = None
    time_s: float = 0.0
    busy_s: float | None = None  # no new step is expected for this time: the program is restoring or compiling
    is_diverged: bool = False  # the loss is NaN or infinite, which the store cannot hold: `loss` is None


@frozen
class Job:
    """A managed job, which either finishes or reports the reason why it could not."""

    id: int
    name: str
    status: JobStatus
    task: Task
    submitted_s: float
    ended_s: float | None = None
    attempts: tuple[Attempt, ...] = ()
    progress: Progress | None = None
    failure: str = ""  # for people; `outcome_kind` is for code
    outcome_kind: OutcomeKind | None = None  # None while live
    cancel_requested: bool = False
    needs: tuple[int, ...] = ()  # jobs that must have succeeded before this one starts
    pipeline: str = ""  # name of the pipeline that it is part of
    resumes: int | None = None  # the ended job whose checkpoints and attempt numbers it continues
    first_attempt: int = 1
    displaced_by: int | None = None  # the waiting job of higher priority to which it must return its slot
    hedge: int = 2  # maximum number of places requested at once
    uid: str = ""  # random, so that names are not reused after a state folder is lost; a retry keeps the first job's

    @property
    def stem(self) -> str:
        """The prefix of the names of its clusters and files."""
        return name_job(self.id, self.uid)

    @property
    def folder(self) -> str:
        """The name of its checkpoint folder; a retry uses the first job's folder."""
        return name_job(self.resumes or self.id, self.uid)

    def name_cluster(self, attempt: int) -> str:
        """Return the name of an attempt's cluster. The job's random part makes names unique across state folders."""
        return f"{self.stem}-{attempt}"

    @property
    def next_attempt(self) -> int:
        """The number of the next attempt. Numbers only grow, even across retries: they fence the checkpoints."""
        return self.first_attempt + len(self.attempts)


def name_job(job_id: int, uid: str) -> str:
    """Return a job's name: `job-3-k7wq2`, or `job-3` for an old job without a uid."""
    return f"job-{job_id}-{uid}" if uid else f"job-{job_id}"
