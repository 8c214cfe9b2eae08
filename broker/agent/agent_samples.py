"""Sample the resource usage of a node: CPU, memory, disk, network and GPUs. Standard library only.

A thread of the watcher takes a sample every EVERY_S into a bounded file, which sessions with the broker read. On
systems without /proc there are no samples. Values that cannot be read are left out.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.agent import agent_files, agent_gpus, agent_limits, agent_ring
else:
    import agent_files
    import agent_gpus
    import agent_limits
    import agent_ring

EVERY_S = 10.0
FIRST_S = 1.0  # delay of the first sample, so that a short program has one
SECTOR_BYTES = 512  # the unit of /proc/diskstats, regardless of the disk's own sector size
PARTS = ("loop", "ram", "zram", "dm-", "md", "sr", "nbd")  # devices built on others, or without a disk


class Counters(NamedTuple):
    """Monotonic counters at one moment; a rate comes from the difference of two."""

    at_s: float
    cpu_busy_s: float  # sum over the processors that we may use
    disk: tuple[int, int] | None  # bytes read and written
    network: tuple[int, int] | None  # bytes received and sent


class Sampler:
    """Take samples of this node; `proc` and `groups` are /proc and /sys/fs/cgroup."""

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        groups: Path = Path("/sys/fs/cgroup"),
        disk: Path | None = None,
        cpus: set[int] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc, self._now_s = proc, now_s
        self._groups = agent_limits.Groups(proc, groups)
        self._disk = disk or agent_files.HOME
        found = _find_cpus(proc)
        # LXC's /proc renumbers the processors of a container, so the kernel's own numbers may not occur in it.
        self._cpus = found & (cpus if cpus is not None else os.sched_getaffinity(0)) or found
        self._gpus = agent_gpus.Gpus()
        self._last = self._count()

    def take(self) -> dict[str, Any]:
        """Return a sample; its rates are means since the last one."""
        last, self._last = self._last, self._count()
        cpu = self._groups.read_cpu()
        cpu_count = min(float(len(self._cpus)), cpu.processors if cpu else float("inf"))
        elapsed_s = self._last.at_s - last.at_s
        busy = (self._last.cpu_busy_s - last.cpu_busy_s) / (elapsed_s * cpu_count) if elapsed_s > 0 else 0.0
        sample = {
            "time_s": round(time.time(), 1),
            "cpu_ratio": round(min(1.0, max(0.0, busy)), 4),
            "cpu_count": round(cpu_count, 3),
            **self._read_memory(),
            **_read_disk(self._disk),
            **_make_rates("disk", ("read", "written"), last.disk, self._last.disk, elapsed_s),
            **_make_rates("network", ("received", "sent"), last.network, self._last.network, elapsed_s),
        }
        return {**sample, **agent_gpus.describe(self._gpus)}

    def _count(self) -> Counters:
        cpu = self._groups.read_cpu()
        # A quota may be shared by all processors, so only the group knows how much of it was used.
        busy_s = (
            cpu.used_s if cpu is not None and cpu.processors < len(self._cpus) else _read_busy_s(self._proc, self._cpus)
        )
        return Counters(self._now_s(), busy_s, count_disk(self._proc), count_network(self._proc))

    def _read_memory(self) -> dict[str, int]:
        fields = {}
        for line in _read_lines(self._proc / "meminfo"):
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024 if rest.split() else 0
        total = fields.get("MemTotal", 0)
        limit = self._groups.read_memory()
        if limit is not None and limit.limit_bytes < total:
            return {"memory_used_bytes": limit.used_bytes, "memory_bytes": limit.limit_bytes}
        used = total - fields.get("MemAvailable", fields.get("MemFree", 0))
        return {"memory_used_bytes": used, "memory_bytes": total} if total else {}


def _find_cpus(proc: Path) -> set[int]:
    names = (line.split()[0] for line in _read_lines(proc / "stat") if line.startswith("cpu"))
    return {int(name[3:]) for name in names if name != "cpu"}


def _read_busy_s(proc: Path, cpus: set[int]) -> float:
    """Return the processor time that was used on some processors since boot."""
    ticks = 0
    for line in _read_lines(proc / "stat"):
        name, *fields = line.split() or [""]
        if name.startswith("cpu") and name != "cpu" and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, *interrupts = [int(field) for field in fields[:8]]
            ticks += user + nice + system + sum(interrupts)  # and time taken by the hypervisor
    return float(ticks) / os.sysconf("SC_CLK_TCK")


def _read_disk(folder: Path) -> dict[str, int]:
    try:
        status = os.statvfs(str(folder))
    except OSError:
        return {}
    # As `df` does: blocks that are reserved for root are neither used nor free.
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    return {"disk_used_bytes": used, "disk_bytes": used + status.f_bavail * status.f_frsize}


def count_disk(proc: Path) -> tuple[int, int] | None:
    """Count the bytes read from and written to whole disks since boot; in a container, those of the host."""
    rows = [line.split() for line in _read_lines(proc / "diskstats")]
    names = [row[2] for row in rows if len(row) >= 10 and not row[2].startswith(PARTS)]
    read = written = 0
    for row in rows:
        if len(row) >= 10 and row[2] in names and not _is_partition(row[2], names):
            read, written = read + int(row[5]) * SECTOR_BYTES, written + int(row[9]) * SECTOR_BYTES
    return (read, written) if names else None


def _is_partition(name: str, names: list[str]) -> bool:
    """Return whether `sda1` or `nvme0n1p1` belongs to a disk in the list."""
    whole = name.rstrip("0123456789")
    return whole != name and (whole in names or (whole.endswith("p") and whole[:-1] in names))


def count_network(proc: Path) -> tuple[int, int] | None:
    """Count the bytes received and sent since boot by network cards, or by all interfaces where there is no card.

    Traffic of containers passes a bridge and a card, and must not be counted twice. A container has no card of its own.
    """
    rows = [line.partition(":") for line in _read_lines(proc / "net" / "dev")[2:]]
    pairs = [(name.strip(), fields.split()) for name, colon, fields in rows if colon]
    known = {name: (int(fields[0]), int(fields[8])) for name, fields in pairs if name != "lo" and len(fields) >= 9}
    cards = [name for name in known if Path("/sys/class/net", name, "device").exists()]
    chosen = [known[name] for name in cards or known]
    return (sum(pair[0] for pair in chosen), sum(pair[1] for pair in chosen)) if chosen else None


def _make_rates(
    name: str, parts: tuple[str, str], old: tuple[int, int] | None, new: tuple[int, int] | None, elapsed_s: float
) -> dict[str, int]:
    if old is None or new is None or elapsed_s <= 0:
        return {}
    # A counter that was reset (an interface was removed) must not give a negative rate.
    return {
        f"{name}_{part}_bytes_s": round(max(0, after - before) / elapsed_s)
        for part, before, after in zip(parts, old, new)
    }


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def sample_forever() -> None:
    """Take samples until the process ends; a thread of the watcher."""
    if not Path("/proc/stat").exists():
        return
    sampler, wait_s = Sampler(), FIRST_S
    while True:
        time.sleep(wait_s)
        wait_s = EVERY_S
        try:
            agent_ring.append(agent_files.STATE / agent_ring.NAME, [sampler.take()])
        except Exception:  # a full disk or a damaged /proc must not end the thread: the next sample may succeed
            continue
