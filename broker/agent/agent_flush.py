"""Wait until files that programs wrote to mounted buckets are uploaded. Standard library only.

rclone keeps written files on the node's disk and uploads them later; files that are not uploaded are lost with the
node. Each mount that `node_mount.py` makes is described in `~/.broker/mounts`: `{"url", "cache", "socket"}`. rclone's
cache, which outlives rclone, shows which files are pending (a JSON file for each, with `Dirty`). Its remote control
(`core/stats`), if it has one, shows how many bytes it has sent.
"""

from __future__ import annotations

import json
import shlex
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.agent import agent_files as files
else:
    import agent_files as files

# How long the node is kept while no upload makes progress. rclone itself retries at intervals of up to 5 min.
HOLD_S = 1800.0
HOLD_VARIABLE = "BROKER_FLUSH_HOLD_S"  # among a task's `envs`, in seconds
POLL_S = 0.5
ANSWER_S = 5.0
RETRY_S = 60.0  # without progress, before a mount whose rclone is dead is mounted again; its cache still exists


class Pending(NamedTuple):
    """Files of one mount that are not in its bucket yet."""

    url: str
    file_count: int
    size_bytes: int


def read_hold_s(envs: dict[str, str]) -> float:
    """Return how long a node waits for uploads without progress, in seconds; the default if the variable is invalid."""
    try:
        hold_s = float(envs.get(HOLD_VARIABLE, HOLD_S))
    except ValueError:
        return HOLD_S
    return hold_s if hold_s >= 0 else HOLD_S  # also of nan


def list_mounts() -> list[Path]:
    """Return the record of each cached mount on this node."""
    folder = files.STATE / files.MOUNTS
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def has_mounts() -> bool:
    """Return whether the node has mounted buckets."""
    return bool(list_mounts())


def list_pending() -> list[Pending]:
    """Return the pending files of every mount that has any."""
    pending = (find_pending(mount) for mount in read_mounts())
    return [files_left for files_left in pending if files_left.file_count]


def read_mounts() -> list[dict[str, Any]]:
    """Return the records of all mounts; unreadable ones are skipped."""
    return [mount for mount in map(files.read_json, list_mounts()) if mount]


def find_pending(mount: dict[str, Any]) -> Pending:
    """Return the number and size of files in the mount's cache that are not uploaded yet."""
    count, size = 0, 0
    for path in Path(str(mount["cache"]), "vfsMeta").rglob("*"):
        if path.is_dir():
            continue
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            is_dirty, entry_size = bool(entry["Dirty"]), int(entry["Size"])
        except FileNotFoundError:  # removed meanwhile
            continue
        except (OSError, ValueError, KeyError, TypeError):
            is_dirty, entry_size = True, 0  # being written, or of an unknown format: treated as pending
        count, size = count + is_dirty, size + (entry_size if is_dirty else 0)
    return Pending(str(mount["url"]), count, size)


def report() -> dict[str, Any] | None:
    """Return the pending files of each mount and the bytes sent so far; None on a node without cached mounts."""
    if not has_mounts():
        return None
    return {"pending": [pending._asdict() for pending in list_pending()], "sent_bytes": read_sent().size_bytes}


def make_retry_script() -> str:
    """Return a Bash script that restores lost mounts as `setup` made them; rclone then uploads its cached files."""
    program = files.STATE / "node_mount.py"
    lines = []
    for mount in read_mounts():
        if mount.get("mode") and mount.get("target"):  # older mounts have no mode
            words = [str(program), str(mount["mode"]), str(mount["url"]), str(mount["target"])]
            access = [str(mount["access"])] if mount.get("access") else []
            lines.append(shlex.join(["python3", *words, *access]))
    return "\n".join(lines)


class UploadStatistics(NamedTuple):
    """Upload statistics of a mount's rclone."""

    size_bytes: int
    error_count: int


def read_sent() -> UploadStatistics:
    """Return the sum over all mounts that report statistics."""
    stats = [read_upload_statistics(str(mount.get("socket") or "")) for mount in read_mounts()]
    return UploadStatistics(sum(sent.size_bytes for sent in stats), sum(sent.error_count for sent in stats))


def read_upload_statistics(path: str) -> UploadStatistics:
    """Return the statistics of one rclone; zeros if it is gone or too old for remote control through a socket."""
    if not path:
        return UploadStatistics(0, 0)
    import http.client  # heavy, and few nodes have mounts

    connection = http.client.HTTPConnection("localhost", timeout=ANSWER_S)
    try:
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(ANSWER_S)
        connection.sock.connect(path)
        connection.request("POST", "/core/stats", body="{}", headers={"Content-Type": "application/json"})
        stats = json.loads(connection.getresponse().read())
        return UploadStatistics(int(stats["bytes"]), int(stats["errors"]))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return UploadStatistics(0, 0)
    finally:
        connection.close()


class Flush:
    """Wait for all mounts as long as data arrives, and `hold_s` longer."""

    def __init__(self, *, hold_s: float = HOLD_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._hold_s, self._now_s = hold_s, now_s
        self._sent: UploadStatistics | None = None
        self._error_count = 0  # when the last file arrived
        self._moved_s = self._tried_s = now_s()
        self.pending: list[Pending] = []

    def poll(self) -> str:
        """Return "clean", "waiting" or "failed"."""
        pending, sent = list_pending(), read_sent()
        if not pending:
            self.pending = []
            return "clean"
        if pending != self.pending:
            self.pending, self._error_count, self._moved_s = pending, sent.error_count, self._now_s()
        elif sent != self._sent and sent.error_count == self._error_count:
            # A large file is being sent. After an error the same bytes are sent repeatedly and no longer count.
            self._moved_s = self._now_s()
        self._sent = sent
        return "failed" if self._now_s() - self._moved_s >= self._hold_s else "waiting"

    def is_retry_due(self) -> bool:
        """Return whether nothing has arrived, and no retry was due, for a while."""
        now_s = self._now_s()
        is_due = now_s - max(self._moved_s, self._tried_s) >= min(RETRY_S, self._hold_s / 30)
        if is_due:
            self._tried_s = now_s
        return is_due

    def describe(self) -> str:
        """Describe the pending uploads without changing figures, so that the text is logged once."""
        urls = ", ".join(f"`{mount.url}`" for mount in self.pending)
        return (
            f"written files are not in {urls} yet; this node is kept until they are, or until nothing has arrived "
            f"for {self._hold_s / 60:.3g} min"
        )

    def describe_failure(self) -> str:
        """Name the files that were not uploaded, their bucket, and the cache folder on the node that still has them."""
        caches = {str(mount["url"]): str(mount["cache"]) for mount in read_mounts()}
        left = ", ".join(
            f"{mount.file_count} files ({mount.size_bytes / 1e9:.3f} GB) for `{mount.url}`, which are in "
            f"`{caches.get(mount.url, '')}` on the node"
            for mount in self.pending
        )
        return f"written files did not arrive: {left}; nothing was uploaded for {self._hold_s / 60:.3g} min"
