"""Brings what a run leaves from the head to the bucket, again and again until all is there. Standard library only.

The outcome goes first: it is small, and the node may be preempted at any moment. `delivery.json` in the run's folder
says what has arrived, so that a watcher that was started again continues.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.agent import agent_files
else:
    import agent_files

LOOK_S = 1.0
RETRY_S, RETRY_S_MAX = 2.0, 300.0
PARTS = ("outcome", "log")
KEEP_LOG_S = 600.0  # between two copies of the log of a run that works while its broker is away


def load_bucket() -> Any:
    """Import `agent_bucket` when it is first used: urllib and email are half of what a verb of the agent takes."""
    import agent_bucket  # type: ignore[import-not-found]  # beside us on the node

    return agent_bucket


def has_bucket(spec: dict[str, Any]) -> bool:
    envs = spec.get("envs") or {}
    if "://" not in str(envs.get("BROKER_CHECKPOINT_DIR", "")):
        return False
    agent_bucket = load_bucket()
    return bool(agent_bucket.find_url(envs, agent_bucket.name_outcome))


def is_delivered(run_id: int) -> bool:
    state = agent_files.read_json(agent_files.run_folder(run_id) / "delivery.json") or {}
    return all(state.get(part) for part in PARTS)


def is_due(run_id: int) -> bool:
    """A run that this node is the head of has ended, and not all of it is in the bucket."""
    folder = agent_files.run_folder(run_id)
    if not (folder / "outcome.json").exists() or is_delivered(run_id):
        return False
    spec = agent_files.read_json(folder / "spec.json") or {}
    return int(spec.get("rank", -1)) == 0 and has_bucket(spec)


def deliver(run_id: int) -> str:
    """One try at what is missing. Returns why it failed; empty when all is there, or another process is at it."""
    folder = agent_files.run_folder(run_id)
    lock = agent_files.try_lock(folder / "delivery.lock")
    if lock is None:
        return ""
    refused = load_bucket().Refused
    try:
        state = agent_files.read_json(folder / "delivery.json") or {}
        for part in PARTS:
            if not state.get(part):
                send(run_id, part)
                state = {**state, part: True, "error": ""}
                agent_files.write_json(folder / "delivery.json", state)
        return ""
    except (refused, OSError) as error:
        agent_files.write_json(folder / "delivery.json", {**state, "error": str(error)})
        return str(error)
    finally:
        os.close(lock)


def send(run_id: int, part: str) -> None:
    """Raises Refused."""
    agent_bucket = load_bucket()
    folder = agent_files.run_folder(run_id)
    spec = agent_files.read_json(folder / "spec.json") or {}
    granted = agent_files.read_json(folder / "access" / "envs.json") or {}
    variables = {**os.environ, **granted, **spec["envs"], **spec["secrets"]}
    if part == "log":
        agent_bucket.leave_log(folder / "log", variables)
        return
    outcome = agent_files.read_json(folder / "outcome.json") or {}
    progress = agent_files.read_progress(folder / "progress.jsonl")
    agent_bucket.leave_outcome({**outcome, "progress": progress}, variables)


def keep_log(run_id: int, known_bytes: int) -> int:
    """While the broker is away the log exists on this node only, and a preemption would take it along: leave what there
    is of it now. Returns its size; `known_bytes` where there is nothing to do. Raises Refused."""
    folder = agent_files.run_folder(run_id)
    spec = agent_files.read_json(folder / "spec.json") or {}
    if agent_files.measure_quiet_s() < agent_files.QUIET_S or int(spec.get("rank", -1)) or not has_bucket(spec):
        return known_bytes
    size = (folder / "log").stat().st_size if (folder / "log").exists() else 0
    if size == known_bytes or (folder / "outcome.json").exists():
        return known_bytes
    send(run_id, "log")
    return size


def deliver_forever() -> None:
    """A thread of the watcher. Each run that is due is tried until all of it is in the bucket, at growing distances."""
    kept: dict[int, int] = {}  # run -> bytes of its log in the bucket
    kept_s = time.monotonic()
    waits: dict[int, tuple[float, float]] = {}  # run -> not before (monotonic), and how long to wait after that
    while True:
        for run_id in agent_files.list_run_ids():
            not_before_s, wait_s = waits.get(run_id, (0.0, RETRY_S))
            if time.monotonic() < not_before_s or not is_due(run_id):
                continue
            try:
                error = deliver(run_id)
            except Exception as fault:  # whatever it is, the thread must live: nothing else brings the outcome out
                error = repr(fault)
            if error:
                waits[run_id] = (time.monotonic() + wait_s, min(RETRY_S_MAX, 2 * wait_s))
        if time.monotonic() - kept_s >= KEEP_LOG_S:
            kept_s = time.monotonic()
            for run_id in agent_files.list_run_ids():
                try:
                    kept[run_id] = keep_log(run_id, kept.get(run_id, 0))
                except Exception:  # next time
                    continue
        time.sleep(LOOK_S)
