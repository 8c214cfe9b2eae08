"""Store the bucket access that the broker grants to a run: files of mode 0600 in its folder, renewed while it runs.

Standard library only. Each renewal rewrites the files as a whole; programs find them through the variables in
`envs.json`, and AWS's libraries reload their file when a session is about to expire.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from broker.agent import agent_delivery as delivery
    from broker.agent import agent_files as files
    from broker.agent import agent_flush as flush
else:
    import agent_delivery as delivery
    import agent_files as files
    import agent_flush as flush

FOLDER = "access"
PLACEHOLDER = "{access}"  # in variables and files: replaced by the path of their folder
ENVS = "envs.json"
SCOPE = "scope"
MAIN = "BROKER_ACCESS_DIR"


def find_folder(run_id: int) -> Path:
    """Return the folder of a run's short-lived credentials."""
    return files.run_folder(run_id) / FOLDER


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """Write `files` and `envs` of `scope` for `run_id`, or for every unfinished run here that has access.

    Older runs of the same scope get the files too, because later runs use their mounts.
    """
    granted = [other for other in files.list_run_ids() if (find_folder(other) / ENVS).exists()]
    if "run_id" in request:
        run_id = int(request["run_id"])
        files.make_private(files.run_folder(run_id))
        run_ids = [*(other for other in granted if other != run_id and read_scope(other) == request["scope"]), run_id]
    else:
        run_ids = [other for other in granted if not has_ended(other)]
    for run_id in run_ids:
        write(run_id, request)
    return {"runs": run_ids}


def write(run_id: int, request: dict[str, Any]) -> None:
    """Replace each file atomically: a program may be reading it. The variables, which name the files, come last."""
    folder = files.make_private(find_folder(run_id))
    for name, text in request["files"].items():
        path = folder / name
        assert path.parent == folder, "a plain name"
        # On a full disk, too: the session would expire, and checkpoints could not be written to their bucket.
        files.write_or_overwrite(path, str(text).replace(PLACEHOLDER, str(folder)))
    envs = {name: str(value).replace(PLACEHOLDER, str(folder)) for name, value in request["envs"].items()}
    files.write_or_overwrite(folder / SCOPE, str(request.get("scope") or ""))
    files.write_or_overwrite(folder / ENVS, json.dumps({**envs, MAIN: str(folder)}))


def read_envs(run_id: int) -> dict[str, str]:
    """Return the variables for the run's program; empty without a grant."""
    return {name: str(value) for name, value in (files.read_json(find_folder(run_id) / ENVS) or {}).items()}


def read_scope(run_id: int) -> str:
    """Return the scope of the access that a run has; "" without any."""
    path = find_folder(run_id) / SCOPE
    return path.read_text(encoding="utf-8") if path.exists() else ""


def has_ended(run_id: int) -> bool:
    """Return whether the run has a terminal status."""
    return files.describe_run(run_id)["status"] in files.TERMINAL


def forget_used() -> None:
    """Delete the files of managed runs once they are no longer needed.

    They are no longer needed once all runs here have ended, and the head's results and the files written to mounts are
    in the bucket. A cluster's mounts outlive its runs, so its files stay as long as the node.
    """
    run_ids = files.list_run_ids()
    if not any(find_folder(run_id).exists() for run_id in run_ids) or not (files.STATE / "lease.json").exists():
        return
    if all(has_ended(run_id) and not delivery.is_due(run_id) for run_id in run_ids) and not flush.list_pending():
        for run_id in run_ids:
            shutil.rmtree(str(find_folder(run_id)), ignore_errors=True)
