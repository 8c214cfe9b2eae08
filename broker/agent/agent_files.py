"""What the agent keeps below ~/.broker, and how it writes it: private, atomic, durable. Standard library only."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOME = Path(os.environ.get("HOME") or Path.home())
STATE = HOME / ".broker"
RUNS = STATE / "runs"
CREDENTIAL = "gang.pem"  # in a run's folder: the certificate and key by which its nodes know each other
HEARD = "heard.json"
# Without a word from the broker, before it counts as away. One that is there renews the lease each minute; once the
# program has ended, it reads the log and takes the node down itself.
QUIET_S = 300.0
TERMINAL = ("SUCCEEDED", "FAILED", "FAILED_SETUP", "CANCELLED")


def run_folder(run_id: int) -> Path:
    return RUNS / str(int(run_id))


def list_run_ids() -> list[int]:
    if not RUNS.exists():
        return []
    return sorted(
        int(entry.name) for entry in RUNS.iterdir() if entry.name.isdigit() and (entry / "spec.json").exists()
    )


def make_private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def write_text(path: Path, text: str, *, is_durable: bool = True) -> None:
    """All or nothing, and on the disk when it returns unless it need not survive a power cut."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    fd = os.open(str(aside), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if is_durable:
            os.fsync(file.fileno())
    aside.replace(path)


def write_json(path: Path, value: dict[str, Any], *, is_durable: bool = True) -> None:
    write_text(path, json.dumps(value), is_durable=is_durable)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_boot() -> str:
    """Another text after each boot; always the same where the system has none to give."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def read_uptime_s() -> float:
    """Seconds since this boot, with the time that the machine slept (Linux): a wall clock may be set back or ahead."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def read_of_this_boot(path: Path) -> dict[str, Any] | None:
    """What was written in an earlier boot counts no more: a stopped node that starts again must not end at once."""
    value = read_json(path)
    return value if value and value.get("boot") == read_boot() else None


def note_heard() -> None:
    """The broker, or another command of the user, has just asked for something."""
    try:
        write_json(STATE / HEARD, {"at_s": read_uptime_s(), "boot": read_boot()}, is_durable=False)
    except OSError:
        pass  # a full disk must not keep the node from answering


def measure_quiet_s() -> float:
    heard = read_of_this_boot(STATE / HEARD)
    return read_uptime_s() - float(heard["at_s"]) if heard else 0.0


def try_lock(path: Path) -> int | None:
    """The lock's descriptor, or None while somebody else holds it."""
    fd = os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def wait_lock(path: Path) -> int:
    fd = os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def is_locked(path: Path) -> bool:
    """Whether somebody holds it; a shared look, so that two who look do not see each other."""
    try:
        fd = os.open(str(path), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def describe_run(run_id: int) -> dict[str, Any]:
    """A run as its files and its runner's lock show it; a runner that vanished means FAILED."""
    folder = run_folder(run_id)
    is_live = is_locked(folder / "runner.lock")
    report = {"id": run_id, "status": "PENDING", "returncode": None, "started_s": 0.0, "ended_s": None, "reason": ""}
    report.update(read_json(folder / "state.json") or {})
    outcome = read_json(folder / "outcome.json")
    if outcome:
        report.update(outcome)
    elif not is_live:
        report.update(status="FAILED", reason="the runner died", ended_s=(folder / "spec.json").stat().st_mtime)
    report["progress"] = read_progress(folder / "progress.jsonl")
    return report


def is_over(run_id: int) -> bool:
    """Whether nothing of the run is left: where its runner was killed, the watcher ends its programs first."""
    folder = run_folder(run_id)
    has_ended = (folder / "outcome.json").exists() or not (folder / "state.json").exists()
    return has_ended and describe_run(run_id)["status"] in TERMINAL


def read_progress(path: Path) -> dict[str, Any] | None:
    """The newest whole line that is a JSON object."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            value = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return None


def find_marked(mark: str) -> Iterator[int]:
    """Processes with exactly this `NAME=value` in their environment (Linux; elsewhere none are found)."""
    proc = Path("/proc")
    for entry in proc.iterdir() if proc.exists() else ():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)
            except OSError:
                continue
