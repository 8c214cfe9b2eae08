"""Find the changes of `setup` below the home folder, and its dependencies. Standard library only.

`scan` lists the home folder before `setup`; `list_changes` compares it with the home folder afterwards. A change that
an archive could not restore on another node raises `NotCacheable`: an archive is complete, or there is none.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

CHUNK_BYTES = 1 << 20
OURS = ".broker"  # keys, leases, runs and their secrets: never in an archive
OURS_KEPT = ".broker/python"  # where `trainers.setup` installs
SKIPPED = (".cache/pip", ".local/share/Trash")  # nothing that runs needs them
# Files that tools keep logins in. A setup that writes one is not cached: the archive would contain it.
PRIVATE = (
    ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".netrc", "_netrc", ".pgpass", ".pypirc", ".npmrc", ".boto",
    ".s3cfg", ".git-credentials", ".config/gcloud", ".config/gh", ".config/rclone", ".config/git/credentials",
    ".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".huggingface/token", ".bash_history",
)  # fmt: skip
# Where package managers and administrators install; a change there would be missing on the next node.
SYSTEM = ("/etc", "/opt", "/srv", "/usr", "/var/lib/dpkg/status", "/var/lib/rpm")
# What a system itself writes in its first minutes: names, addresses, host keys, the mounts of snaps.
BOOT = (
    "apparmor.d", "cloud", "fstab", "hostname", "hosts", "machine-id", "mtab", "netplan", "resolv.conf", "ssh",
    "systemd",
)  # fmt: skip
PACKAGES = ("/var/lib/dpkg/status", "/var/lib/rpm/rpmdb.sqlite", "/lib/apk/db/installed")
LIBRARIES = ("/usr/lib", "/usr/local/lib", "/opt/*/lib", "/opt/*/envs/*/lib")
FINE_S = 0.02  # the kernel stamps files with a clock that ticks at most every 10 ms


# Types of changes: a file, another name of a file, a symbolic link, a folder, a removal.
FILE, HARD, LINK, FOLDER, REMOVED = "file", "hard", "link", "folder", "removed"


class NotCacheable(Exception):
    """The result of a setup cannot be kept; the reason is reported as one line in the run's log."""


class FileState(NamedTuple):
    """Properties that identify a file's state. Times of folders are left out: they change with their content."""

    mode: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class Change(NamedTuple):
    """One change of a path below the home folder; `target` is that of a link, or the first name of the same file."""

    path: str
    type: str
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    target: str = ""


def scan(home: Path, skipped: Iterable[str] = ()) -> dict[str, FileState]:
    """Return the state of everything below `home` on its own disk; links are not followed."""
    return {path: _describe(found) for path, found in _walk(home, skipped)}


def list_changes(
    home: Path, before: Mapping[str, FileState], skipped: Iterable[str] = ()
) -> tuple[list[Change], dict[str, FileState]]:
    """Return the changes since `before`, removals first and folders before their content, and the present state.

    Raises NotCacheable for what cannot be restored elsewhere: files of other users, and files that hold logins.
    """
    after: dict[str, FileState] = {}
    entries: list[Change] = []
    first_of: dict[tuple[int, int], str] = {}  # inode -> the first of several names
    for path, found in _walk(home, skipped):
        seen = after[path] = _describe(found)
        if before.get(path) == seen:
            continue
        if is_private(path):
            raise NotCacheable(f"setup wrote ~/{path}, where tools keep logins")
        if found.st_uid != os.getuid():
            raise NotCacheable(f"setup wrote ~/{path} as another user")
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISDIR(found.st_mode):
            entries.append(Change(path, FOLDER, mode))
        elif stat.S_ISLNK(found.st_mode):
            entries.append(Change(path, LINK, target=os.readlink(str(home / path))))
        elif stat.S_ISREG(found.st_mode):
            first = first_of.setdefault((found.st_dev, found.st_ino), path) if found.st_nlink > 1 else path
            size, target = (found.st_size, "") if first == path else (0, first)
            entries.append(Change(path, HARD if target else FILE, mode, size, found.st_mtime_ns, target))
    removed = sorted(set(before) - set(after), reverse=True)
    return [Change(path, REMOVED) for path in removed] + entries, after


def is_private(path: str) -> bool:
    """Return whether a path below the home folder is one where tools keep logins."""
    return any(path == each or path.startswith(f"{each}/") for each in PRIVATE)


def find_system_change(since_s: float, roots: Iterable[str] = SYSTEM) -> str:
    """Return a path outside the home folder that changed since then, by its change time, which no program can set."""
    for root in roots:
        try:
            if root != "/etc" and os.lstat(root).st_ctime >= since_s - FINE_S:
                return root
            for path, found in _walk(Path(root), BOOT if root == "/etc" else ()):
                if found.st_ctime >= since_s - FINE_S:
                    return f"{root}/{path}"
        except OSError:
            continue  # this system has no such folder
    return ""


def digest_tree(path: Path) -> str:
    """Return a digest of a file, or of names, contents, links and executable bits of a folder."""
    digest = hashlib.blake2b(digest_size=32)
    if path.is_file():
        _add_file(digest, path)
        return digest.hexdigest()
    for name, found in _walk(path, ()) if path.is_dir() else ():
        kind = stat.S_IFMT(found.st_mode) | (found.st_mode & stat.S_IXUSR if stat.S_ISREG(found.st_mode) else 0)
        digest.update(f"\0{kind:o}\0".encode() + os.fsencode(name) + b"\0")
        if stat.S_ISLNK(found.st_mode):
            digest.update(os.fsencode(os.readlink(str(path / name))))
        elif stat.S_ISREG(found.st_mode):
            digest.update(str(found.st_size).encode() + b"\0")
            _add_file(digest, path / name)
    return digest.hexdigest()


def describe_node(before: Iterable[str] = ()) -> dict[str, str]:
    """Return what a setup's result depends on: system, processor, packages, Python, accelerators with their driver.

    `before`: the paths in the home folder, of which installed Python packages count.
    """
    packages = [_digest_file(path) for path in PACKAGES]
    libraries = sorted(
        str(each) for pattern in LIBRARIES for each in Path("/").glob(f"{pattern[1:]}/python3*/*-packages/*-info")
    )
    own = sorted(path for path in before if path.endswith((".dist-info", ".egg-info")))
    return {
        "system": _read("/etc/os-release"),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "level": describe_processor(_read("/proc/cpuinfo")),
        "python": f"{sys.version} {os.path.realpath(sys.executable)}",
        "packages": hashlib.sha256("\n".join([*packages, *libraries, *own]).encode("utf-8", "replace")).hexdigest(),
        "accelerators": describe_accelerators(),
        "user": str(os.getuid()),
    }


def describe_processor(text: str) -> str:
    """Return the x86-64 level of /proc/cpuinfo (System V ABI, "Micro-architecture levels"); elsewhere all features."""
    flags: set[str] = set()
    for name, _, value in (line.partition(":") for line in text.splitlines()):
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        return "v4"
    if {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"} <= flags:
        return "v3"
    return "v2" if "sse4_2" in flags else " ".join(sorted(flags))


def describe_accelerators() -> str:
    """Return models and driver of this node's accelerators from the kernel's files, without calling a driver."""
    gpus = sorted(
        {_find_line(_read(str(path)), "Model:") for path in Path("/proc/driver/nvidia/gpus").glob("*/information")}
    )
    version = re.search(r"(\d+)\.\d+", _read("/proc/driver/nvidia/version"))
    found = [*gpus, f"nvidia {version[1]}"] if version else gpus
    found += [f"amdgpu {_read('/sys/module/amdgpu/version').strip()}"] if os.path.exists("/dev/kfd") else []  # noqa: PTH110
    found += ["tpu"] if os.path.exists("/dev/accel0") else []  # noqa: PTH110
    return ", ".join(found)


def _walk(top: Path, skipped: Iterable[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield paths below `top` in sorted order within each folder, parents first; without ours and other disks."""
    without = {OURS, *SKIPPED, *skipped}
    device = os.lstat(str(top)).st_dev
    stack = [OURS_KEPT, ""] if (top / OURS_KEPT).is_dir() else [""]
    while stack:
        folder = stack.pop()
        try:
            with os.scandir(str(top / folder)) as listing:
                found = sorted(listing, key=lambda each: each.name)
        except OSError:
            continue  # its owner differs, which its own entry shows, or it is gone
        inner = []
        for each in found:
            path = f"{folder}/{each.name}" if folder else each.name
            try:
                state = each.stat(follow_symlinks=False)
            except OSError:
                continue
            if path in without or state.st_dev != device:
                continue
            yield path, state
            if stat.S_ISDIR(state.st_mode):
                inner.append(path)
        stack += reversed(inner)


def _describe(found: os.stat_result) -> FileState:
    if stat.S_ISDIR(found.st_mode):
        return FileState(found.st_mode, 0, 0, 0, 0)
    return FileState(found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _add_file(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)


def _digest_file(path: str) -> str:
    digest = hashlib.sha256()
    try:
        _add_file(digest, Path(path))
    except OSError:
        return ""
    return digest.hexdigest()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _find_line(text: str, name: str) -> str:
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(name)), "")
