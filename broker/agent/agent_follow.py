"""Serve a persistent session of the agent: push changes on its node, and answer requests. Standard library only.

Both directions carry one JSON object per line. From the broker: first `{"run_id", "pace_s"}`; then requests `{"id",
"verb", "request"}`, a new `{"pace_s"}`, or an empty line as a heartbeat. To the broker: `{"status", "log_bytes"}` at
once and after each change, `{"id", "answer"}` or `{"id", "error"}`, and every BEAT_S `{}`, which the broker answers.
A heartbeat carries the samples of the node that this session has not sent yet: `{"samples"}`.
A change of status is pushed at the next poll, progress and growth of the log at most every `pace_s`.

The session ends with its connection: at the end of its input, when a write fails, when the broker has been silent for
SILENCE_S (a machine that lost power closes nothing), and when newer agent files replace the running ones.
"""

from __future__ import annotations

import base64
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.agent import agent_files as files
    from broker.agent import agent_head, agent_ring

    Verb = Callable[[dict[str, Any]], dict[str, Any]]
    Stamp = tuple[int | None, int | None]
else:
    import agent_files as files
    import agent_head
    import agent_ring

POLL_S = 0.25
BEAT_S = 10.0
FIRST_BEAT_S = 2.0  # by then, a sampler that has just started has a sample
SILENCE_S = 120.0  # the broker answers each heartbeat
PACE_S = 1.0
LINE_BYTES_MAX = 1 << 20
SAMPLES_MAX = 60  # per heartbeat, the newest: ten minutes
LOG_BYTES_MAX = 1 << 18  # per answer: it must fit a line of the broker's reader


def read_log(request: dict[str, Any]) -> dict[str, Any]:
    """Return the merged log from `offset`, in base64 because it need not be text."""
    path = files.run_folder(int(request["run_id"])) / "log"
    try:
        with path.open("rb") as file:
            file.seek(int(request["offset"]))
            return {"data": base64.b64encode(file.read(LOG_BYTES_MAX)).decode()}
    except FileNotFoundError:
        return {"data": ""}


class Follower:
    """A session. `report_status` and `verbs` are the agent's own; only idempotent verbs are offered."""

    def __init__(self, report_status: Verb, verbs: dict[str, Verb]) -> None:
        self._report_status = report_status
        self._verbs = {"log": read_log, **verbs}
        self._digest = str(Path(__file__).resolve().with_name("digest"))
        self._agent = read_stamp(self._digest)
        self._rest = b""
        self._run_id: int | None = None
        self._marks: FileStamps | None = None
        self._pace_s = PACE_S
        self._urgent: object = None
        self._usual: object = None
        self._sampled_s = 0.0  # the time of the newest sample that was sent
        self._pushed_s = self._heard_s = time.monotonic()
        self._beat_s = self._heard_s - max(0.0, BEAT_S - FIRST_BEAT_S)

    def run(self) -> None:
        """Push changes until the session ends or a newer agent takes over."""
        try:
            while self._read() and not self._is_over():
                if self._run_id is not None and self._marks is not None:
                    self._push(self._run_id, self._marks)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the broker, or the connection to it, is gone

    def _is_over(self) -> bool:
        is_replaced = read_stamp(self._digest) != self._agent
        return is_replaced or time.monotonic() - self._heard_s > SILENCE_S

    def _read(self) -> bool:
        """Wait for input, at most until the next poll. Return False at its end."""
        if not select.select([0], [], [], POLL_S)[0]:
            return True
        chunk = os.read(0, 1 << 16)
        if not chunk or len(self._rest) > LINE_BYTES_MAX:
            return False
        self._heard_s = time.monotonic()
        files.record_contact()  # the node counts as attended
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line:
                self._handle(json.loads(line))
        return True

    def _handle(self, message: dict[str, Any]) -> None:
        self._pace_s = float(message.get("pace_s", self._pace_s))
        if "run_id" in message:
            self._run_id = int(message["run_id"])
            self._marks = FileStamps(self._run_id)
            self._urgent = None
        if "id" not in message:
            return
        answer: dict[str, Any]
        try:
            answer = {"answer": self._verbs[message["verb"]](message["request"])}
        except (OSError, KeyError, TypeError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}  # like a failed call; the session stays open
        self._write({"id": message["id"], **answer})

    def _push(self, run_id: int, marks: FileStamps) -> None:
        now_s = time.monotonic()
        urgent, usual = marks.read()
        if urgent != self._urgent or (usual != self._usual and now_s - self._pushed_s >= self._pace_s):
            self._urgent, self._usual, self._pushed_s = urgent, usual, now_s
            status = self._report_status({"run_id": run_id})
            # The length is read after the status: a run that has ended writes no more, so this is its whole log.
            self._write({"status": status, "log_bytes": read_stamp(str(files.run_folder(run_id) / "log"))[0] or 0})
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self._beat()

    def _beat(self) -> None:
        samples = agent_ring.read(files.STATE / agent_ring.NAME, after_s=self._sampled_s)[-SAMPLES_MAX:]
        if samples:
            self._sampled_s = float(samples[-1]["time_s"])
        self._write({"samples": samples} if samples else {})

    def _write(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(1, data) :]


class FileStamps:
    """Stamps of a run's files, equal while nothing changes. Cheap to poll: opens no file and caches paths."""

    def __init__(self, run_id: int) -> None:
        folder = files.run_folder(run_id)
        names = ("outcome.json", "state.json", "progress.jsonl", "log", files.SETUP_REPORT)
        head = (folder / agent_head.GANG, folder / agent_head.FOLLOWED)
        node = files.STATE / "rebalance", files.STATE / "preemption"
        self._paths = [str(path) for path in (*(folder / name for name in names), *node, *head)]
        self._lock = folder / "runner.lock"

    def read(self) -> tuple[object, object]:
        """Return the stamp of changes to push at once, and of changes that can wait."""
        outcome, state, progress, log, setup, *signs = map(read_stamp, self._paths)
        is_running = outcome[0] is None and files.is_locked(self._lock)
        return (outcome, is_running, state, setup, bool(progress[0]), signs), (progress, log)


def read_stamp(path: str) -> Stamp:
    """Return length and modification time; None if there is no file."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None, None
    return status.st_size, status.st_mtime_ns


def main(report_status: Verb, verbs: dict[str, Verb]) -> None:
    """Follow runs until the session ends, and answer the broker's requests."""
    sys.stdout.flush()
    Follower(report_status, verbs).run()
