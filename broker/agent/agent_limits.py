"""Find the limits of this process's control groups, its usage of them, and OOM kills; raise the limit of open files.

Standard library only.

In a container, /proc describes the whole host; the control groups limit what the container may use. Version 2 of the
kernel's interface has one folder for each group, version 1 one for each group and controller.
https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


DESCRIPTORS = 65536


class Memory(NamedTuple):
    """Memory in use, without caches that can be freed at any time, and the limit."""

    used_bytes: int
    limit_bytes: int


class Cpu(NamedTuple):
    """Processor time used by a group since it began, and the processors that it may use at once."""

    used_s: float
    processors: float


def allow_descriptors() -> None:
    """Raise the limit of open files of this process and its programs, as far as the system allows.

    It is 1,024 in a session of sshd: too few for the workers of PyTorch's data loaders, and for the head of a large
    gang. SkyPilot raises it as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            pass


def count_oom_kills(proc: Path = Path("/proc")) -> int | None:
    """Return how many processes the kernel has killed for lack of memory since boot; None if it does not say.

    The counter covers the whole machine and every control group on it.
    """
    return _read_fields(proc / "vmstat").get("oom_kill")


def explain_kill(returncode: int, before: int | None, proc: Path = Path("/proc")) -> str:
    """Say whether the kernel's OOM killer may have ended a failed program; "" if the counter does not show it.

    `before` is `count_oom_kills()` when the program started.
    """
    after = count_oom_kills(proc)
    if returncode == 0 or before is None or after is None:
        return ""
    if count := after - before:
        ended = f"{count} process{'es' * (count > 1)}"
        return f"broker: the kernel's OOM killer ended {ended} on this machine while the program ran\n"
    if returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "broker: the kernel's OOM killer ended no process on this machine: SIGKILL came from another process\n"
    return ""


class Groups:
    """The control groups of this process. `proc` and `root` are /proc and /sys/fs/cgroup."""

    def __init__(self, proc: Path, root: Path) -> None:
        self._is_unified = (root / "cgroup.controllers").exists()
        own = _read_own(proc / "self" / "cgroup")
        self._folders = {
            controller: list(_list_folders(root if self._is_unified else root / controller, path))
            for controller in ("memory", "cpu")
            for path in [own.get("" if self._is_unified else controller, "/")]
        }
        self._root = root

    def read_memory(self) -> Memory | None:
        """Return the tightest memory limit; None without any."""
        limit, used = ("memory.max", "memory.current") if self._is_unified else (
            "memory.limit_in_bytes", "memory.usage_in_bytes"
        )  # fmt: skip
        cache = "inactive_file" if self._is_unified else "total_inactive_file"
        found = []
        for folder in self._folders["memory"]:
            limit_bytes, used_bytes = _read_number(folder / limit), _read_number(folder / used)
            if limit_bytes is not None and used_bytes is not None:
                freeable = _read_fields(folder / "memory.stat").get(cache, 0)
                found.append(Memory(max(0, used_bytes - freeable), limit_bytes))
        return min(found, key=lambda memory: memory.limit_bytes, default=None)

    def read_cpu(self) -> Cpu | None:
        """Return the tightest limit of processor time; None without any."""
        found = [cpu for folder in self._folders["cpu"] for cpu in [self._read_quota(folder)] if cpu is not None]
        return min(found, key=lambda cpu: cpu.processors, default=None)

    def _read_quota(self, folder: Path) -> Cpu | None:
        if self._is_unified:
            words = _read_text(folder / "cpu.max").split()
            used = _read_fields(folder / "cpu.stat").get("usage_usec")
            if len(words) != 2 or not words[0].isdigit() or used is None:
                return None
            return Cpu(used / 1e6, int(words[0]) / int(words[1]))
        quota, period = (_read_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        accounts = self._root / "cpuacct" / folder.relative_to(self._root / "cpu")
        used = _read_number(accounts / "cpuacct.usage")
        return Cpu(used / 1e9, quota / period) if quota and period and used is not None else None


def _read_own(path: Path) -> dict[str, str]:
    """Return the path of our group by controller; that of version 2 has the name "" ."""
    own = {}
    for line in _read_text(path).splitlines():
        _, controllers, folder = line.split(":", 2)
        own.update({controller: folder for controller in controllers.split(",")})
    return own


def _list_folders(root: Path, path: str) -> Iterator[Path]:
    """Yield the folders of a group and of the groups above it, whose limits apply as well.

    In a container without a namespace of its own, the path is that of the host, and only the root exists.
    """
    folder = root / path.strip("/")
    if not folder.is_dir() or ".." in folder.parts:
        folder = root
    yield folder
    while folder != root:
        folder = folder.parent
        yield folder


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None for "max" or a negative number (no limit), or if there is no file."""
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_fields(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read_text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
