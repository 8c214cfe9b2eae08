"""Forward the progress of a job to an experiment tracker, as its own program would report it.

A tracker receives each progress line that is observed: `loss`, `tokens_per_s` and `checkpoint_step` by step. The
run in MLflow is identified by a tag with the job's unique name, so a restarted forwarder continues it.
https://mlflow.org/docs/latest/rest-api.html
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from broker.environment import read_mlflow_variables
from broker.errors import BrokerError, UsageError
from broker.redirects import NoRedirect
from broker.types import Job, JobStatus, Progress

ANSWER_S = 30.0
JOB_TAG = "broker.job"
ENDS = {JobStatus.SUCCEEDED: "FINISHED", JobStatus.CANCELLED: "KILLED"}  # in MLflow; other ends are FAILED


def list_metrics(progress: Progress) -> Mapping[str, float]:
    """Return the values of a progress line by the names used in trackers."""
    values = {
        "loss": progress.loss,
        "tokens_per_s": progress.tokens_per_s,
        "checkpoint_step": progress.checkpoint_step,
    }
    return {name: float(value) for name, value in values.items() if value is not None}


class Tracker(Protocol):
    """Receive the progress of one job. Both methods raise BrokerError if the tracker refuses or does not respond."""

    def send(self, progress: Progress, *, now_s: float) -> None:
        """Report one progress line; `now_s` is the time at which it was observed."""
        ...

    def end(self, job: Job, *, now_s: float) -> None:
        """Report the end of the job."""
        ...


class Webhook:
    """POSTs each progress line, and the end of the job, as JSON to a URL."""

    def __init__(self, url: str, job: Job) -> None:
        self._url = check_url(url, "--url")
        self._about = {"job": job.stem, "name": job.name}

    def send(self, progress: Progress, *, now_s: float) -> None:
        """Post the line with the job's ID and name. Raises as `post` does."""
        line = {"step": progress.step, "total": progress.total, **list_metrics(progress)}
        post(self._url, {**self._about, "time_s": now_s, **line})

    def end(self, job: Job, *, now_s: float) -> None:
        """Post the job's final status. Raises as `post` does."""
        post(self._url, {**self._about, "time_s": now_s, "status": job.status.value})


class Mlflow:
    """Logs to a run of an MLflow server: a named run, or the job's own, which is created at first use."""

    def __init__(self, url: str, job: Job, *, experiment: str, run_id: str | None, now_s: float) -> None:
        self._base = f"{check_url(url, '--mlflow').rstrip('/')}/api/2.0/mlflow"
        self._headers = make_login(read_mlflow_variables())
        self.run_id = run_id or self._find_run(job, experiment, now_s)

    def send(self, progress: Progress, *, now_s: float) -> None:
        """Log the metrics of the line at its step, in one call of `runs/log-batch`."""
        metrics = [
            {"key": name, "value": value, "timestamp": round(now_s * 1000), "step": progress.step}
            for name, value in list_metrics(progress).items()
        ]
        if metrics:
            self._call("runs/log-batch", {"run_id": self.run_id, "metrics": metrics})

    def end(self, job: Job, *, now_s: float) -> None:
        """Set the run's status: FINISHED, KILLED or FAILED."""
        status = ENDS.get(job.status, "FAILED")
        self._call("runs/update", {"run_id": self.run_id, "status": status, "end_time": round(now_s * 1000)})

    def _find_run(self, job: Job, experiment: str, now_s: float) -> str:
        experiment_id = self._find_experiment(experiment)
        wanted = {"experiment_ids": [experiment_id], "filter": f"tags.`{JOB_TAG}` = '{job.stem}'", "max_results": 1}
        if runs := self._call("runs/search", wanted).get("runs"):
            return str(runs[0]["info"]["run_id"])
        tags = [{"key": JOB_TAG, "value": job.stem}]
        body = {"experiment_id": experiment_id, "run_name": job.name, "start_time": round(now_s * 1000), "tags": tags}
        return str(self._call("runs/create", body)["run"]["info"]["run_id"])

    def _find_experiment(self, name: str) -> str:
        found = self._call("experiments/search", {"filter": f"name = '{name}'", "max_results": 1}).get("experiments")
        experiment = found[0] if found else self._call("experiments/create", {"name": name})
        return str(experiment["experiment_id"])

    def _call(self, path: str, request: Mapping[str, object]) -> dict[str, Any]:
        return post(f"{self._base}/{path}", request, self._headers)


def make_login(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return the header for MLflow's own variables: MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD."""
    if token := variables.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if user := variables.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{user}:{variables.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode('ascii')}"}
    return {}


def check_url(url: str, flag: str) -> str:
    """Return the URL. Raises UsageError for one that is not http or https."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"`{flag}` must be an http or https URL, not `{url}`", hints=["such as http://localhost:5000"])
    return url


def post(url: str, content: Mapping[str, object], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """POST JSON, and return the response if it is a JSON object. Raises BrokerError."""
    given = {"Content-Type": "application/json", "User-Agent": "intercloud-broker", **(headers or {})}
    request = urllib.request.Request(url, data=json.dumps(content).encode(), headers=given)
    where = urlsplit(url)._replace(query="", fragment="").geturl()
    try:
        # A redirect would take the login along, and turn the POST into a GET.
        with urllib.request.build_opener(NoRedirect).open(request, timeout=ANSWER_S) as answer:
            text = answer.read(1 << 20)
    except urllib.error.HTTPError as error:
        raise BrokerError(
            f"{where} refused the progress: HTTP {error.code} {error.reason}",
            hints=["check the URL, and MLFLOW_TRACKING_TOKEN if the server requires a login"],
        ) from None
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise BrokerError(f"cannot reach {where}: {reason}", hints=["check that the tracker is running"]) from None
    try:
        found = json.loads(text or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
