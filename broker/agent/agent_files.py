"""Read and write the agent's state below ~/.broker: private, atomic, durable. Standard library only."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

TYPE_CHECKING = False  # `typing` would take a tenth of the time of a request
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, Any

HOME = Path(os.environ.get("HOME") or Path.home())
STATE = HOME / ".broker"
RUNS = STATE / "runs"
CREDENTIAL = "gang.pem"  # in a run's folder: the certificate and key with which its nodes authenticate each other
HEARD = "heard.json"
MOUNTS = "mounts"  # has a record of each cached mount
NETWORK_REPORT = "network.json"  # in the head's run folder: how fast its nodes reach each other
SETUP_REPORT = "setup_cache.json"  # in a run's folder: the outcome of its setup's archive
# Seconds without a request after which the broker counts as unavailable. A running broker renews the lease every
# minute; once the program has ended, it reads the log and terminates the node itself.
QUIET_S = 300.0
POLL_S_MAX = 10.0
TERMINAL = ("SUCCEEDED", "FAILED", "FAILED_SETUP", "CANCELLED")


def run_folder(run_id: int) -> Path:
    """Return the folder of a run's files on this node."""
    return RUNS / str(int(run_id))


def list_run_ids() -> list[int]:
    """Return the ids of all runs that were requested on this node, in ascending order."""
    if not RUNS.exists():
        return []
    return sorted(
        int(entry.name) for entry in RUNS.iterdir() if entry.name.isdigit() and (entry / "spec.json").exists()
    )


def make_private(folder: Path) -> Path:
    """Create the folder with mode 0700, and return it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def write_text(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Write atomically; once this returns, the text survives a power loss, unless `is_durable` is False."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    fd = os.open(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink()  # each try on a full disk would leave one more
        raise
    if is_durable:
        flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Write the names in a folder to the disk; no effect on file systems that refuse it."""
    fd = os.open(str(folder), os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def write_json(path: Path, value: dict[str, Any], *, is_durable: bool = True) -> None:
    """Replace the file atomically by the JSON text of `value`."""
    write_text(path, json.dumps(value), is_durable=is_durable)


def note_json(path: Path, value: dict[str, Any]) -> bool:
    """Write like `write_json`, for data that a run can do without; return False on a failure, such as a full disk."""
    try:
        write_json(path, value)
    except OSError:
        return False
    return True


def write_or_overwrite(path: Path, text: str) -> None:
    """Write like `write_text`; on a full disk, replace the content of the file in the space that it has already.

    A reader may then find it damaged for a moment. Raises OSError if there is no file, or it is too small.
    """
    try:
        write_text(path, text)
    except OSError:
        if not path.exists():
            raise
        with path.open("r+b") as file:
            file.write(text.encode("utf-8"))
            file.truncate()


def append_log(file: IO[bytes], data: bytes) -> None:
    """Append to a log. On a full disk the data is lost: the program must not block on its output because of that."""
    try:
        file.write(data)
    except OSError:
        pass


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in the file; None if it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_boot() -> str:
    """Return an id that changes with each boot; constant on systems without one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def read_uptime_s() -> float:
    """Return the seconds since boot, on Linux including suspend; unlike a wall clock it cannot be set."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def read_of_this_boot(path: Path) -> dict[str, Any] | None:
    """Read a file, ignoring earlier boots: a stopped node that restarts must not shut down at once."""
    value = read_json(path)
    return value if value and value.get("boot") == read_boot() else None


def record_contact() -> None:
    """Record that the broker, or another command of the user, has just sent a request."""
    try:
        write_json(STATE / HEARD, {"at_s": read_uptime_s(), "boot": read_boot()}, is_durable=False)
    except OSError:
        pass  # a full disk must not keep the node from answering


def measure_quiet_s() -> float:
    """Return the seconds since the last request in this boot; 0 if there was none."""
    heard = read_of_this_boot(STATE / HEARD)
    return read_uptime_s() - float(heard["at_s"]) if heard else 0.0


def try_lock(path: Path) -> int | None:
    """Return the lock's descriptor, or None while another process holds it."""
    fd = os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def take_lock(path: Path) -> int:
    """Take a lock that other processes hold only for a moment, to test it (`is_locked`). Raises OSError otherwise."""
    give_up_s = time.monotonic() + POLL_S_MAX
    while (fd := try_lock(path)) is None:
        if time.monotonic() > give_up_s:
            raise OSError(f"another process holds {path}")
        time.sleep(0.01)
    return fd


def wait_lock(path: Path, *, is_shared: bool = False) -> int:
    """Wait for the lock, and return its file descriptor. Closing it releases the lock."""
    fd = os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
    return fd


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock; tested with a shared lock, so that testers do not affect each other."""
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
    """Describe a run by its files and its runner's lock; a dead runner means FAILED."""
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
    """Return whether no process of the run is left; if its runner was killed, the watcher kills its programs first."""
    folder = run_folder(run_id)
    has_ended = (folder / "outcome.json").exists() or not (folder / "state.json").exists()
    return has_ended and describe_run(run_id)["status"] in TERMINAL


def read_progress(path: Path) -> dict[str, Any] | None:
    """Return the newest complete line that is a JSON object."""
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
    """Yield the processes with exactly this `NAME=value` in their environment (Linux only; elsewhere none)."""
    assert "=" in mark, "an empty mark would match every process of the machine"
    proc = Path("/proc")
    for entry in proc.iterdir() if proc.exists() else ():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)
            except OSError:
                continue


def find_session(session: int) -> Iterator[int]:
    """Yield the processes of a session, but no zombies (Linux only; elsewhere none)."""
    proc = Path("/proc")
    for entry in proc.iterdir() if proc.exists() else ():
        if entry.name.isdigit():
            try:
                state, _, _, number = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:4]  # proc(5)
            except (OSError, ValueError):
                continue
            if int(number) == session and state != b"Z":
                yield int(entry.name)
