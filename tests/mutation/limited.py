"""Runs of a program until it ends, exceeds its processor time, or stalls; nothing that it started outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.apart import set_apart

POLL_S = 0.05
MEASURE_S = 1.0  # between two scans of all processes of the machine
STILL_S = 45.0  # without a tick of processor time: a deadlock
WALL_FACTOR = 20.0  # on a machine shared with others a program may get a twentieth of a processor
TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a program. `returncode` None: a limit ended it."""

    returncode: int | None
    output: str
    cpu_s: float


def adopt_orphans() -> None:
    """Adopt, on Linux, orphans of our children, so that they can be found and ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_limited(
    command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], output: Path, cpu_s_max: float
) -> Ended:
    others = frozenset(_list_descendants())  # of the caller: they are neither measured nor ended
    before_s = _measure_children_s()
    begun_s = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            set_apart(command), cwd=cwd, env=dict(environment), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    used_s, moved_s, measured_s = 0.0, begun_s, begun_s
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            now_s = time.monotonic()
            if now_s - measured_s < MEASURE_S:
                continue
            measured_s, total_s = now_s, _measure_children_s() + _measure_live_s(others) - before_s
            if total_s > used_s:
                used_s, moved_s = total_s, now_s
            is_still = now_s - moved_s > STILL_S
            if used_s > cpu_s_max or is_still or now_s - begun_s > WALL_FACTOR * cpu_s_max:
                break
    finally:
        returncode = process.poll()
        _end_all(process, others)
    text = output.read_text(errors="replace")
    return Ended(returncode=returncode, output=text, cpu_s=max(used_s, _measure_children_s() - before_s))


def measure_descendants_s() -> float:
    """Measure the processor time of all descendants that run now, and of the children that they have waited for."""
    return _measure_live_s(frozenset())


def _measure_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _measure_live_s(others: Set[int]) -> float:
    ticks = 0
    for pid in _list_descendants(others):
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(each) for each in fields[11:15])
    return ticks / TICKS


def _list_descendants(but: Set[int] = frozenset()) -> Iterator[int]:
    """List descendants of this process, except some and what they started; none where there is no /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    waiting = list(parents.get(os.getpid(), ()))
    while waiting:
        pid = waiting.pop()
        if pid in but:
            continue
        yield pid
        waiting.extend(parents.get(pid, ()))


def _end_all(process: subprocess.Popen[bytes], others: Set[int]) -> None:
    """End all until none is left: one that is ended may just have started another."""
    for _ in range(100):
        left = list(_list_descendants(others))  # before its parents die, for those that have a session of their own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left and process.returncode is not None:
            return
        time.sleep(0.02)
