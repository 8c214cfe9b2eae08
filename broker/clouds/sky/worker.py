"""Runs in SkyPilot's own interpreter: one JSON line in is one call of its SDK, one JSON line out is the answer.

In: {"id", "verb", "arguments"}; out: {"id", "value"} or {"id", "fault": {"type", "message", "history"}}. Nothing of
broker is imported here. Output printed by SkyPilot goes to stderr; the program ends when its stdin closes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

THREADS = 8
MESSAGE_MAX = 2000  # characters of an error; SkyPilot's may contain whole logs
SSH_S = 120.0
GRACE_S = 10.0
LAUNCHES = ("launch", "start")
# One line for the envelope and one for each cause in the text of an Azure error
# (`azure.core.exceptions.ODataV4Format`): SkyPilot passes on only the exception's text.
AZURE_CODE = re.compile(r"^\s*Code: (\w+)\s*$", re.MULTILINE)
PLACE = ("infra", "instance_type", "accelerators", "cpus", "memory", "use_spot")


class NotForSaleError(ValueError):
    """SkyPilot's catalog lacks this machine at this place: another offer may work."""


def main() -> None:
    """Serve requests. The real stdout is set aside first, so that nothing printed mixes with the answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != Path(__file__).resolve().parent]
    lock = threading.Lock()

    def answer(call: dict[str, Any]) -> None:
        try:
            reply = {"id": call["id"], "value": VERBS[call["verb"]](**call["arguments"])}
        except BaseException as error:  # SystemExit too: `sky.check` raises it
            reply = {"id": call["id"], "fault": describe(error)}
        with lock:
            answers.write(json.dumps(reply, default=str) + "\n")

    with ThreadPoolExecutor(THREADS) as pool:
        for line in sys.stdin:
            pool.submit(answer, json.loads(line))
        # The client is gone: calls in progress get a little time, waits for a launch get none.
        end = threading.Timer(GRACE_S, os._exit, (0,))
        end.daemon = True
        end.start()


def describe(error: BaseException) -> dict[str, Any]:
    """Describe an error by the types and codes on which the client decides.

    `history` has the error of each place tried.
    """
    codes = [str(each.get("code", "")) for each in getattr(error, "errors", None) or () if isinstance(each, dict)]
    kind = getattr(error, "error_type", None)
    if getattr(error, "cloud_provider", None) == "azure":
        codes += reversed(AZURE_CODE.findall(str(error)))  # causes come last
    return {
        "type": type(error).__name__,
        "module": type(error).__module__,
        "message": str(error)[:MESSAGE_MAX],
        "codes": [*codes, *([str(kind)] if kind else [])],
        "history": [describe(each) for each in getattr(error, "failover_history", None) or ()],
    }


def hello() -> dict[str, str]:
    """Return version and url; raise the health check's error if no server responds. Does not start one."""
    import sky
    from sky.server import common

    common.check_server_healthy()
    return {"version": str(sky.__version__), "url": str(common.redact_url_password(common.get_server_url()))}


def list_enabled() -> list[str]:
    """List names in lower case, as of the server's last check."""
    from sky.client import sdk

    return sorted(str(name).lower() for name in sdk.get(sdk.enabled_clouds()))


def check(cloud: str) -> dict[str, Any]:
    """Check with the cloud; `text` is the output of `sky check`."""
    from sky.client import sdk

    text = io.StringIO()
    enabled = sdk.stream_and_get(sdk.check((cloud,), verbose=False), output_stream=text)
    able = {name.lower(): list(can) for clouds in (enabled or {}).values() for name, can in clouds.items()}
    return {"is_enabled": "compute" in able.get(cloud, ()), "text": text.getvalue()}


def launch(name: str, task: dict[str, Any], *, is_dry: bool = False) -> str:
    """Return the request's id once the server has accepted it. Raises NotForSaleError if only the place is refused."""
    import sky
    from sky.client import sdk

    place = {key: value for key, value in task["resources"].items() if key in PLACE}  # SkyPilot empties it
    try:
        return str(sdk.launch(sky.Task.from_yaml_config(task), cluster_name=name, dryrun=is_dry))
    except ValueError as error:
        if is_valid({"resources": place}):
            raise
        raise NotForSaleError(str(error)) from error


def is_valid(task: dict[str, Any]) -> bool:
    """Validate with the server, whose catalog is authoritative."""
    import sky
    from sky.client import sdk
    from sky.utils import dag_utils

    try:
        sdk.validate(dag_utils.convert_entrypoint_to_dag(sky.Task.from_yaml_config(task)))
    except ValueError:
        return False
    return True


def fetch_state(prefix: str, request_ids: Sequence[str]) -> dict[str, Any]:
    """Return the clusters and live requests whose cluster name has the prefix.

    Also return the status of these requests, and the account.
    """
    from sky.client import sdk

    clusters = [read_cluster(each) for each in sdk.get(sdk.status()) if each["name"].startswith(prefix)]
    live = [read_request(each) for each in sdk.api_status() if (each.cluster_name or "").startswith(prefix)]
    live_ids = {each["id"] for each in live}
    missing_ids = [each for each in request_ids if each not in live_ids]
    ended = [read_request(each) for each in sdk.api_status(request_ids=missing_ids)] if missing_ids else []
    return {"clusters": clusters, "requests": live + ended, "account": name_account()}


def name_account() -> str:
    """Return the API server and the user whose clusters `sky status` shows; another login changes both or one."""
    from sky.server import common
    from sky.utils import common_utils

    return f"{str(common.redact_url_password(common.get_server_url())).rstrip('/')} as {common_utils.get_user_hash()}"


def read_cluster(record: Any) -> dict[str, Any]:
    """Convert a record of `sky status` to JSON-ready data."""
    return {
        "name": record["name"],
        "status": record["status"].value,
        "cloud": str(record["cloud"] or "").lower(),
        "region": record["region"] or "",
        "nodes": record["nodes"],
        "labels": dict(record["labels"] or {}),
        "launched_at": float(record["launched_at"] or 0),
        "addresses": list(getattr(record["handle"], "cached_internal_ips", None) or ()),
        "why": str(record["init_status_reason"] or "")[:MESSAGE_MAX],
    }


def read_request(request: Any) -> dict[str, Any]:
    """Convert a record of `sky api status` to JSON-ready data."""
    return {
        "id": request.request_id,
        "verb": request.name.rpartition(".")[2],
        "cluster": request.cluster_name or "",
        "status": request.status,
    }


def refresh(names: Sequence[str]) -> str:
    """Start querying the clouds; the table shows the result later."""
    from sky.client import sdk
    from sky.utils import common

    return str(sdk.status(list(names), refresh=common.StatusRefreshMode.FORCE))


def fetch(request_id: str) -> None:
    """Wait until a request ends; raise its error."""
    from sky.client import sdk

    sdk.get(request_id)


def end(name: str) -> None:
    """Cancel launches in progress and start taking the cluster down. Already gone is success."""
    from sky import exceptions
    from sky.client import sdk

    live = [read_request(each) for each in sdk.api_status() if each.cluster_name == name]
    launches = [each["id"] for each in live if each["verb"] in LAUNCHES]
    if launches:
        sdk.get(sdk.api_cancel(launches, silent=True))
    if any(each["verb"] == "down" for each in live):
        return
    with contextlib.suppress(exceptions.ClusterDoesNotExist):
        sdk.down(name)


def stop(name: str) -> None:
    """Stop a cluster and wait for it. Raises SkyPilot's errors."""
    from sky.client import sdk

    sdk.get(sdk.stop(name))


def write_ssh(name: str) -> str:
    """Have SkyPilot's command line write the ssh configuration; return the file."""
    command = [sys.executable, "-c", "from sky.client.cli.command import cli; cli()", "status", name]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=SSH_S, check=False)
    path = Path("~/.sky/generated/ssh").expanduser() / name
    return str(path) if path.is_file() else ""


VERBS: dict[str, Callable[..., Any]] = {
    "hello": hello,
    "list_enabled": list_enabled,
    "check": check,
    "launch": launch,
    "fetch_state": fetch_state,
    "refresh": refresh,
    "fetch": fetch,
    "end": end,
    "stop": stop,
    "write_ssh": write_ssh,
}

if __name__ == "__main__":
    main()
