"""`broker jobs forward`: report the progress of a job to an experiment tracker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.verbs.jobs import show_job
from broker.cli.context import make_session
from broker.cli.jobs_show import JobName
from broker.cli.render import print_line, print_note
from broker.clock import pause
from broker.errors import BrokerError, UsageError
from broker.formatting import format_count
from broker.types import Job

if TYPE_CHECKING:
    from broker.app.forwarding import Tracker
    from broker.types import Progress

POLL_S = 1.0

MlflowOption = Annotated[str | None, typer.Option("--mlflow", metavar="URL", help="Log to this MLflow server.")]
RunOption = Annotated[
    str | None, typer.Option("--run-id", metavar="ID", help="Run in MLflow (default: a new run for the job).")
]
ExperimentOption = Annotated[str, typer.Option("--experiment", metavar="NAME", help="Experiment in MLflow.")]
TensorBoardOption = Annotated[
    Path | None, typer.Option("--tensorboard", metavar="FOLDER", help="Write an event file for TensorBoard.")
]
UrlOption = Annotated[str | None, typer.Option("--url", metavar="URL", help="POST each progress line as JSON.")]


def forward(
    job: JobName,
    mlflow: MlflowOption = None,
    run_id: RunOption = None,
    experiment: ExperimentOption = "broker",
    tensorboard: TensorBoardOption = None,
    url: UrlOption = None,
) -> None:
    """Forward the progress of a job to experiment trackers.

    Reads the progress once a second, across recoveries, until the job ends. Lines are lost while a tracker does not
    respond; the job is not affected. Ctrl-C stops only the forwarding.
    """
    if mlflow is None and tensorboard is None and url is None:
        raise UsageError("no tracker is named", hints=["pass `--mlflow URL`, `--tensorboard FOLDER` or `--url URL`"])
    session = make_session()
    found = session.call(show_job, job=job).job
    trackers = make_trackers(
        found, mlflow=mlflow, run_id=run_id, experiment=experiment, tensorboard=tensorboard, url=url,
        now_s=session.clock.now_s(),
    )  # fmt: skip
    sent: Progress | None = None
    count = 0
    try:
        while True:
            found = session.call(show_job, job=str(found.id)).job
            if found.progress is not None and found.progress != sent:
                sent, count = found.progress, count + 1
                send_to_trackers(trackers, found, sent, now_s=session.clock.now_s())
            if found.status.is_terminal:
                break
            pause(POLL_S)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    send_to_trackers(trackers, found, None, now_s=session.clock.now_s())
    lines = format_count(count, "progress line")
    print_line(f"Job {found.id} ended with status {found.status.value}; forwarded {lines}")


def make_trackers(
    job: Job,
    *,
    mlflow: str | None,
    run_id: str | None,
    experiment: str,
    tensorboard: Path | None,
    url: str | None,
    now_s: float,
) -> Sequence[Tracker]:
    """Make the trackers that were named. Raises BrokerError if MLflow does not answer."""
    from broker.app.forwarding import Mlflow, Webhook
    from broker.app.tensorboard import EventFile

    found: list[Tracker] = []
    if mlflow is not None:
        run_id = run_id or job.task.envs.get("MLFLOW_RUN_ID")
        run = Mlflow(mlflow, job, experiment=experiment, run_id=run_id, now_s=now_s)
        print_note(f"run {run.run_id} in {mlflow}")
        found.append(run)
    if tensorboard is not None:
        found.append(EventFile(tensorboard, job, now_s=now_s))
    if url is not None:
        found.append(Webhook(url, job))
    return found


def send_to_trackers(trackers: Sequence[Tracker], job: Job, progress: Progress | None, *, now_s: float) -> None:
    """Send a progress line, or the end of the job, to every tracker; one that fails is reported."""
    for tracker in trackers:
        try:
            if progress is None:
                tracker.end(job, now_s=now_s)
            else:
                tracker.send(progress, now_s=now_s)
        except (BrokerError, OSError) as error:
            print_note(f"warning: {error}")
