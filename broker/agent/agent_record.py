"""Record the state and the outcome of a run, also on a full disk. Standard library only.

A program that fills the disk often fails because of that, and its outcome must still be recorded: without one, the
broker only learns that the runner is gone. So a runner reserves some space before its program starts.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from broker.agent import agent_checkpoints, agent_files, agent_health, agent_lease
else:
    import agent_checkpoints
    import agent_files
    import agent_lease

FILE, STATE = "outcome.json", "state.json"
RESERVE = "reserve"
RESERVE_BYTES = 1 << 16  # more than the largest outcome and the block of a folder
TRIES, PAUSE_S = 30, 1.0  # the space of a program that was killed may not be free at once


def write_state(folder: Path, status: str, **fields: Any) -> None:
    """Replace the status of a run, and some of the fields beside it."""
    old = agent_files.read_json(folder / STATE) or {"started_s": time.time()}
    agent_files.write_json(folder / STATE, {**old, "status": status, **fields})


def note_state(folder: Path, status: str, **fields: Any) -> None:
    """Write the state if possible: a full disk must not end a program that runs."""
    try:
        write_state(folder, status, **fields)
    except OSError as error:
        print(f"the state {status} was not recorded: {error}", file=sys.stderr)


def reserve(folder: Path) -> None:
    """Reserve space for the outcome in the run's folder. Raises OSError on a full disk."""
    (folder / RESERVE).write_bytes(b"\0" * RESERVE_BYTES)


def describe_outcome(
    verdict: Mapping[str, Any],
    *,
    own_returncode: int | None,
    failed_rank: int | None,
    fault: agent_health.HealthFinding | None,
    envs: Mapping[str, str],
) -> dict[str, Any]:
    """Return the outcome: the gang's verdict, and what this node adds to it."""
    outcome = {key: verdict.get(key) for key in ("status", "returncode", "reason", "unflushed")}
    # The reader must know the lease: a node whose lease was about to expire may have ended the program.
    outcome.update(own_returncode=own_returncode, ended_s=time.time(), lease_left_s=agent_lease.measure_left_s())
    outcome["failed_rank"] = failed_rank
    if fault:
        outcome["fault"] = {"reason": fault.fault, "serials": fault.serials}
    if outcome["status"] == "FAILED" and failed_rank is not None:  # a program failed by itself
        outcome["checkpoints"] = agent_checkpoints.find_checkpoints(envs)
    return outcome


def write_outcome(folder: Path, outcome: dict[str, Any]) -> None:
    """Write the outcome; on a full disk into the reserved space. Raises OSError if every try fails."""
    place = folder / RESERVE
    for left in reversed(range(TRIES)):
        try:
            agent_files.write_json(folder / FILE, outcome)
            break
        except OSError:
            if not left:
                raise
            if not release(place):
                time.sleep(PAUSE_S)
    release(place)


def release(place: Path) -> bool:
    """Delete the reserved space; return whether there was any."""
    try:
        place.unlink()
    except OSError:
        return False
    return True
