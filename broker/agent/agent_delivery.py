"""Upload a run's outcome and log from the head to the bucket, with retries until both are there. Standard library only.

The outcome goes first: it is small, and the node may be preempted at any moment. `delivery.json` in the run's folder
records which parts have arrived, so that a restarted watcher continues.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # `typing` would take a tenth of the time of a request
if TYPE_CHECKING:
    from typing import Any

    from broker.agent import agent_files, agent_head
else:
    import agent_files
    import agent_head

POLL_S = 1.0
RETRY_S, RETRY_S_MAX = 2.0, 300.0
PARTS = ("outcome", "log")
NOTICED_S = 1.0  # time between two uploads of the log after a preemption notice
SHARE_MAX = 0.2  # maximum share of the time that these uploads take: the program may be saving a checkpoint
KEEP_LOG_S = 600.0  # time between two uploads of a running program's log while broker is unavailable


def load_bucket() -> Any:
    """Import `agent_bucket` on first use: urllib and email take half of the start-up time of the agent."""
    import agent_bucket  # type: ignore[import-not-found]  # next to this file on the node

    return agent_bucket


def has_bucket(spec: dict[str, Any]) -> bool:
    """Return whether the run's checkpoint folder is a bucket that the node can write to."""
    envs = spec.get("envs") or {}
    if "://" not in str(envs.get("BROKER_CHECKPOINT_DIR", "")):
        return False
    agent_bucket = load_bucket()
    return bool(agent_bucket.find_url(envs, agent_bucket.name_outcome))


def is_delivered(run_id: int) -> bool:
    """Return whether every part of the run's result is in the bucket."""
    state = agent_files.read_json(agent_files.run_folder(run_id) / "delivery.json") or {}
    return all(state.get(part) for part in PARTS)


def is_due(run_id: int) -> bool:
    """Return whether a run that this node heads has ended and is not completely in the bucket."""
    folder = agent_files.run_folder(run_id)
    if not (folder / "outcome.json").exists() or is_delivered(run_id):
        return False
    spec = agent_files.read_json(folder / "spec.json") or {}
    return agent_head.is_head(folder, spec) and has_bucket(spec)


def deliver(run_id: int, *, is_waiting: bool = False) -> str:
    """Try to upload the missing parts; return why it failed, or "" if all are there or another process uploads them.

    With `is_waiting`, wait for the other process: it may be uploading a log that has grown since.
    """
    folder = agent_files.run_folder(run_id)
    path = folder / "delivery.lock"
    lock = agent_files.wait_lock(path) if is_waiting else agent_files.try_lock(path)
    if lock is None:
        return ""
    refused = load_bucket().Refused
    state: dict[str, Any] = {}
    try:
        state = agent_files.read_json(folder / "delivery.json") or {}
        is_recorded = True
        for part in PARTS:
            if not state.get(part):
                send(run_id, part)
                state = {**state, part: True, "error": ""}
                # A full disk must not keep the next part from its bucket: the log may say that the disk is full.
                is_recorded = agent_files.note_json(folder / "delivery.json", state)
        return "" if is_recorded else "what has arrived could not be recorded"
    except (refused, OSError) as error:
        agent_files.note_json(folder / "delivery.json", {**state, "error": str(error)})
        return str(error)
    finally:
        os.close(lock)


def send(run_id: int, part: str) -> None:
    """Upload one part. Raises Refused."""
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


def is_noticed(run_id: int) -> bool:
    """Return whether a preemption notice reached the gang of this run."""
    return (agent_files.run_folder(run_id) / "preemption").exists()


def keep_log(run_id: int, kept_bytes: int) -> int:
    """Upload the log so far after a preemption notice, or while broker is unavailable: this may be the only copy.

    Return its size, or `kept_bytes` if there is nothing to do. Raises Refused.
    """
    folder = agent_files.run_folder(run_id)
    is_alone = is_noticed(run_id) or agent_files.measure_quiet_s() >= agent_files.QUIET_S
    spec = agent_files.read_json(folder / "spec.json") or {}
    if not is_alone or not agent_head.is_head(folder, spec) or not has_bucket(spec):
        return kept_bytes
    lock = agent_files.wait_lock(folder / "delivery.lock")  # the whole log of an ended run must arrive last
    try:
        size = (folder / "log").stat().st_size if (folder / "log").exists() else 0
        if size == kept_bytes or (folder / "outcome.json").exists():
            return kept_bytes
        send(run_id, "log")
        return size
    finally:
        os.close(lock)


class LogKeeper:
    """Upload the logs of running programs: rarely while broker is unavailable, at once after a preemption notice."""

    def __init__(self) -> None:
        self._kept: dict[int, int] = {}  # run -> bytes of its log in the bucket
        self._tried: dict[int, tuple[float, float]] = {}  # run -> the end (monotonic) and the length of the last upload

    def upload_log_if_due(self, run_id: int) -> None:
        """Upload the log of a run if that is due. Raises Refused."""
        start_s = time.monotonic()
        tried_s, took_s = self._tried.setdefault(run_id, (start_s, 0.0))
        is_urgent = is_noticed(run_id)
        wait_s = max(NOTICED_S, took_s / SHARE_MAX) if is_urgent else KEEP_LOG_S
        if start_s - tried_s < wait_s and not (is_urgent and run_id not in self._kept):
            return
        try:
            self._kept[run_id] = keep_log(run_id, self._kept.get(run_id, 0))
        finally:
            end_s = time.monotonic()
            self._tried[run_id] = end_s, end_s - start_s


def deliver_forever() -> None:
    """Retry each finished run's uploads, with growing intervals, until all are done; a thread of the watcher."""
    keeper = LogKeeper()
    waits: dict[int, tuple[float, float]] = {}  # run -> earliest next try (monotonic), and the wait after it
    while True:
        for run_id in agent_files.list_run_ids():
            not_before_s, wait_s = waits.get(run_id, (0.0, RETRY_S))
            if time.monotonic() < not_before_s:
                continue
            try:
                error = deliver(run_id) if is_due(run_id) else ""
            except Exception as fault:  # the thread must survive any error: nothing else uploads the outcome
                error = repr(fault)
            if error:
                waits[run_id] = (time.monotonic() + wait_s, min(RETRY_S_MAX, 2 * wait_s))
        for run_id in agent_files.list_run_ids():
            try:
                keeper.upload_log_if_due(run_id)
            except Exception:  # retried next time
                continue
        time.sleep(POLL_S)
