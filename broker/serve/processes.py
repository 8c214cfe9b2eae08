"""Start a process that outlives this one, in its own session."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from broker.config import Config, has_json_logs
from broker.errors import UsageError
from broker.state.faults import explain_os_error

_STARTED: dict[Path, subprocess.Popen[bytes]] = {}


def launch_process(argv: Sequence[str], log_path: Path) -> bool:
    """Start `argv`, with its output appended to the log; return False if the last one with this log is still starting.

    Raises StateError.
    """
    for path in [path for path, each in _STARTED.items() if each.poll() is not None]:  # reaps those that ended
        del _STARTED[path]
    if log_path in _STARTED:
        return False
    try:
        log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
    except OSError as error:
        raise explain_os_error(error, default=log_path) from error
    _STARTED[log_path] = process
    return True


def wants_json_logs(config: Config) -> bool:
    """Return whether background processes log JSON; an unknown `log_format`, which the daemon refuses, means text.

    A typo there must stop neither a service nor the updates of prices.
    """
    try:
        return has_json_logs(config)
    except UsageError:
        return False
