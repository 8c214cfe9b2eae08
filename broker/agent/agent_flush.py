"""Waits until what programs wrote to mounted buckets lies there. Standard library only.

rclone keeps written files on the node's disk and uploads them later; whatever is not uploaded is lost with the node.
Each mount that `node_mount.py` makes is described in `~/.broker/mounts`: `{"url", "cache", "socket"}`. Which files are
still to be uploaded is told by rclone's cache (a JSON file for each, with `Dirty`), which outlives rclone itself; how
many bytes are on their way, by its remote control (`core/stats`), where it has one.
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

MOUNTS = "mounts"
# How long the node is kept while nothing arrives in the bucket. rclone itself tries again at distances up to 5 min.
HOLD_S = 1800.0
HOLD_VARIABLE = "BROKER_FLUSH_HOLD_S"  # among a task's `envs`, in seconds
LOOK_S = 0.5
ANSWER_S = 5.0
RETRY_S = 60.0  # without a byte, until a mount whose rclone is dead is made again: its cache is still there


class Pending(NamedTuple):
    """Files of one mount that are not in its bucket yet."""

    url: str
    file_count: int
    size_bytes: int


def read_hold_s(envs: dict[str, str]) -> float:
    try:
        hold_s = float(envs.get(HOLD_VARIABLE, HOLD_S))
    except ValueError:
        return HOLD_S
    return hold_s if hold_s >= 0 else HOLD_S  # also of nan


def list_mounts() -> list[Path]:
    folder = files.STATE / MOUNTS
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def has_mounts() -> bool:
    return bool(list_mounts())


def list_pending() -> list[Pending]:
    """Of every mount with something to upload."""
    found = (find_pending(mount) for mount in read_mounts())
    return [each for each in found if each.file_count]


def read_mounts() -> list[dict[str, Any]]:
    return [mount for mount in map(files.read_json, list_mounts()) if mount]


def find_pending(mount: dict[str, Any]) -> Pending:
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
            is_dirty, entry_size = True, 0  # being written, or of a form we do not know: not known to be uploaded
        count, size = count + is_dirty, size + (entry_size if is_dirty else 0)
    return Pending(str(mount["url"]), count, size)


def make_retry_script() -> str:
    """Bash that mounts again what is not mounted any more, as `setup` did; rclone then uploads what its cache holds."""
    program = files.STATE / "node_mount.py"
    lines = []
    for mount in read_mounts():
        if mount.get("mode") and mount.get("target"):  # older mounts have no mode
            words = ["python3", str(program), str(mount["mode"]), str(mount["url"]), str(mount["target"])]
            lines.append(" ".join(map(shlex.quote, words)))
    return "\n".join(lines)


class Sent(NamedTuple):
    """What a mount's rclone has sent, and how often it failed to."""

    size_bytes: int
    error_count: int


def read_sent() -> Sent:
    """Of all mounts, as far as they tell."""
    found = [ask_sent(str(mount.get("socket") or "")) for mount in read_mounts()]
    return Sent(sum(each.size_bytes for each in found), sum(each.error_count for each in found))


def ask_sent(path: str) -> Sent:
    """Nothing where rclone is too old for a remote control on a socket, or gone."""
    if not path:
        return Sent(0, 0)
    import http.client  # heavy, and few nodes have mounts

    connection = http.client.HTTPConnection("localhost", timeout=ANSWER_S)
    try:
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(ANSWER_S)
        connection.sock.connect(path)
        connection.request("POST", "/core/stats", body="{}", headers={"Content-Type": "application/json"})
        stats = json.loads(connection.getresponse().read())
        return Sent(int(stats["bytes"]), int(stats["errors"]))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return Sent(0, 0)
    finally:
        connection.close()


class Flush:
    """One wait for all mounts. It lasts as long as something arrives, and `hold_s` longer."""

    def __init__(self, *, hold_s: float = HOLD_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._hold_s, self._now_s = hold_s, now_s
        self._sent: Sent | None = None
        self._error_count = 0  # when a file arrived last
        self._moved_s = self._tried_s = now_s()
        self.pending: list[Pending] = []

    def look(self) -> str:
        """ "clean", "waiting" or "failed"."""
        pending, sent = list_pending(), read_sent()
        if not pending:
            self.pending = []
            return "clean"
        if pending != self.pending:
            self.pending, self._error_count, self._moved_s = pending, sent.error_count, self._now_s()
        elif sent != self._sent and sent.error_count == self._error_count:
            # A large file is on its way. After an error the same bytes are sent again and again: they count no more.
            self._moved_s = self._now_s()
        self._sent = sent
        return "failed" if self._now_s() - self._moved_s >= self._hold_s else "waiting"

    def is_retry_due(self) -> bool:
        """Whether nothing has arrived for a while, nor has this been asked for as long."""
        now_s = self._now_s()
        is_due = now_s - max(self._moved_s, self._tried_s) >= min(RETRY_S, self._hold_s / 30)
        if is_due:
            self._tried_s = now_s
        return is_due

    def describe(self) -> str:
        """Without figures that change at every look: said once, not once a file."""
        urls = ", ".join(f"`{each.url}`" for each in self.pending)
        return (
            f"written files are not in {urls} yet; this node is kept until they are, or until nothing has arrived "
            f"for {self._hold_s / 60:.3g} min"
        )

    def describe_failure(self) -> str:
        caches = {str(mount["url"]): str(mount["cache"]) for mount in read_mounts()}
        left = ", ".join(
            f"{each.file_count} files ({each.size_bytes / 1e9:.3f} GB) for `{each.url}`, which lie in "
            f"`{caches.get(each.url, '')}` on the node"
            for each in self.pending
        )
        return f"written files did not arrive: {left}; nothing was uploaded for {self._hold_s / 60:.3g} min"
