"""Run a job's `setup`, or restore the archive of an earlier one. Standard library only.

The broker requests it through BROKER_SETUP_CACHE, a JSON object (`CacheOrder`). On a miss, `setup` runs as usual; if
its result can be kept completely and that pays, the first node uploads it in the background while the program runs. The
steps are in `agent_setup_steps.py`.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from broker.agent import agent_files
else:
    import agent_files

VARIABLE = "BROKER_SETUP_CACHE"
MISSED = 75  # sysexits.h: EX_TEMPFAIL; any other code of a restore means the same
BEFORE = "setup_before.json"  # in the run's folder


class CacheOrder(NamedTuple):
    """The request of the broker.

    `place`: a bucket URL or folder. `setup_chars`: the length of the task's own `setup`, which follows the steps that
    mount buckets. `starts`: the starts still expected, at `usd_hour` for the gang. A GiB costs `usd_gib_kept` until the
    archive expires, and `usd_gib_read` for each start. `mounts`: the targets of `file_mounts`. `is_fresh`: use no
    archive, as the last program failed.
    """

    place: str
    setup_chars: int
    starts: float
    usd_hour: float
    usd_gib_kept: float
    usd_gib_read: float
    mounts: list[str]
    checks_system: bool
    is_fresh: bool


def read_order(spec: Mapping[str, Any]) -> CacheOrder | None:
    """Return the order; None if there is none, if it is invalid, or if the run is in a container.

    A container keeps what `setup` installs outside the home folder, which an archive would lack.
    """
    try:
        order = CacheOrder(**json.loads(str(spec["envs"].get(VARIABLE) or "null")))
        has_text = 0 < int(order.setup_chars) <= len(str(spec.get("setup") or ""))
        return order if has_text and spec.get("setup_digest") and not spec.get("image") else None
    except (ValueError, TypeError, KeyError):
        return None


def set_up(spec: Mapping[str, Any], folder: Path, run_phase: Callable[[str], int]) -> int:
    """Set up the node and return the exit code. `run_phase` runs a script; the spec's `setup` if it is empty."""
    order = read_order(spec)
    if order is None:
        return run_phase("")
    text = str(spec["setup"])
    mounts, own = text[: len(text) - order.setup_chars], text[len(text) - order.setup_chars :]
    if mounts and (returncode := run_phase(mounts)):
        return returncode
    if run_phase(make_script("restore", folder)) == 0:
        return 0
    start_s = time.monotonic()
    returncode = run_phase(own)
    if returncode == 0 and (folder / BEFORE).exists():
        run_phase(make_script("keep", folder, f"{time.monotonic() - start_s:.3f}"))
    return returncode


def make_script(*arguments: object) -> str:
    """Return the script of one step; the task's own variables cannot redirect it to another home folder."""
    agent = Path(__file__).resolve().with_name("agent.py")
    argv = [sys.executable, "-I", "-S", str(agent), "_setup", *map(str, arguments)]
    return f"HOME={shlex.quote(str(agent_files.HOME))} exec {shlex.join(argv)}"
