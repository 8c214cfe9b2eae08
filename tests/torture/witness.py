"""Runs a job's program on a node and writes down when it lived: `witness.py EVIDENCE [--fail-first N] -- PROGRAM...`

Standard library only; it runs on nodes. EVIDENCE is a folder outside the nodes, one for each job:

- `attempt-N.lock` is locked by every rank of attempt N and by the program it started, until both are dead. A rank that
  starts while another attempt's lock is held has found two attempts alive at once, and writes `overlap`.
- `log.jsonl` gets `begin`, `end`, `overlap`, `redone` and `finish` with time, attempt, rank and process id.
- `finished.json` is created with O_EXCL by the first rank of the attempt that finishes. It is the job's one effect.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

EXIT_OF_FAILURE = 9  # of a program that was asked to fail


class Witness:
    """One rank of one attempt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempt = int(os.environ["BROKER_ATTEMPT"])
        self.rank = int(os.environ["SKYPILOT_NODE_RANK"])

    def record(self, event: str, **fields: object) -> None:
        """Append one line in one write."""
        about = {"event": event, "attempt": self.attempt, "rank": self.rank, "pid": os.getpid()}
        line = json.dumps({"time_s": time.time(), **about, **fields})
        with (self.folder / "log.jsonl").open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")

    def hold(self) -> int:
        """Lock this attempt's file and look for a live rank of another attempt; returns the lock's descriptor."""
        with (self.folder / "probe.lock").open("ab") as mutex:
            fcntl.flock(mutex, fcntl.LOCK_EX)  # one probe at a time: two would take each other for live ranks
            lock = os.open(self.folder / f"attempt-{self.attempt}.lock", os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(lock, fcntl.LOCK_SH)
            for path in sorted(self.folder.glob("attempt-*.lock")):
                if path.name != f"attempt-{self.attempt}.lock" and is_held(path):
                    self.record("overlap", other=int(path.stem.partition("-")[2]))
        return lock

    def count_failures(self) -> int:
        """Return how often this job's first rank has failed on request."""
        try:
            lines = (self.folder / "log.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        return sum(1 for line in lines if json.loads(line)["event"] == "fail")

    def finish(self) -> None:
        """Make the job's one effect. Where an earlier attempt has made it, only report that."""
        try:
            descriptor = os.open(self.folder / "finished.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            self.record("redone")
            return
        os.write(descriptor, json.dumps({"attempt": self.attempt, "pid": os.getpid()}).encode())
        os.close(descriptor)
        self.record("finish")


def is_held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def run_program(command: list[str], lock: int, umask: int) -> int:
    """Run the program and let it hold the lock too, since it may outlive this process.

    SIGTERM is left to it: the whole group gets it.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    code = subprocess.Popen(command, pass_fds=[lock], umask=umask).wait()
    return code if code >= 0 else 128 - code


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    split = arguments.index("--")
    options, command = arguments[1:split], arguments[split + 1 :]
    umask = os.umask(0)  # hosts of the test-bed write here as another user
    folder.mkdir(parents=True, exist_ok=True)
    witness = Witness(folder)
    lock = witness.hold()
    witness.record("begin")
    failures_wanted = int(options[options.index("--fail-first") + 1]) if "--fail-first" in options else 0
    is_head = witness.rank == 0
    if is_head and not (folder / "repaired").exists() and witness.count_failures() < failures_wanted:
        witness.record("fail")
        return EXIT_OF_FAILURE
    code = run_program(command, lock, umask)
    if code == 0 and is_head:
        witness.finish()
    witness.record("end", code=code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
