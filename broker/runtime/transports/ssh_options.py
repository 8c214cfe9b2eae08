"""How `ssh` is called: one kept connection a host, our own keys and host keys, nothing taken on trust."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from broker.errors import StateError
from broker.runtime.keys import GangKeys

CONNECT_S = 5
# A host that loses power says nothing: three unanswered seconds end the connection.
ALIVE_INTERVAL_S, ALIVE_COUNT_MAX = 1, 3
PERSIST_S = 600
# The default exchange (post-quantum sntrup761) takes 0.4 s instead of 0.17 s a connection on a small machine.
KEX = "curve25519-sha256,curve25519-sha256@libssh.org,sntrup761x25519-sha512@openssh.com"
HANDLE = re.compile(r"ssh://(?P<user>\w[\w.-]*)@(?P<host>\[[0-9a-fA-F:.]+\]|\w[\w.-]*)(?::(?P<port>\d+))?")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a node listens."""

    user: str
    host: str
    port: int = 22


@dataclass(frozen=True, kw_only=True)
class Route:
    """How ssh gets there: its options, the host by the name that they know, the kept connection's socket.

    `connect_s_max`: for a host that accepts and then says nothing. `mark`: a file that is there once the host was
    reached, so that later processes do not take its silence for booting.
    """

    options: tuple[str, ...]
    host: str
    control: Path
    connect_s_max: float = CONNECT_S + 10.0
    mark: Path | None = None


def parse_handle(handle: str) -> Place:
    """`ssh://user@host:port`, an IPv6 host in brackets. Raises StateError."""
    found = HANDLE.fullmatch(handle)
    if not found:
        raise StateError(f"`{handle}` does not say where a node listens", hints=("it is `ssh://USER@HOST:PORT`",))
    return Place(user=found["user"], host=found["host"].strip("[]"), port=int(found["port"] or 22))


def make_options(keys: GangKeys, place: Place, control: Path) -> list[str]:
    """For ssh and for rsync's ssh alike. The user's own configuration is left aside: a node is ours, not theirs."""
    pairs = {
        "BatchMode": "yes",
        "IdentityFile": escape(keys.login_path),
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "UserKnownHostsFile": escape(keys.known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "HostKeyAlias": keys.alias,
        "HostKeyAlgorithms": "ssh-ed25519",
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "CheckHostIP": "no",
        "KexAlgorithms": KEX,
        "PreferredAuthentications": "publickey",
        "ForwardAgent": "no",
        "ConnectTimeout": str(CONNECT_S),
        "ServerAliveInterval": str(ALIVE_INTERVAL_S),
        "ServerAliveCountMax": str(ALIVE_COUNT_MAX),
        "ControlPath": escape(control),
        "LogLevel": "ERROR",
        "Port": str(place.port),
    }
    words = ["-F", "none", "-l", place.user]
    for name, value in pairs.items():
        words += ["-o", f"{name}={value}"]
    return words


def escape(path: Path) -> str:
    """As ssh reads a path in its configuration: quoted, `%` doubled."""
    text = str(path).replace("%", "%%")
    return f'"{text}"' if " " in text else text


def name_control(keys: GangKeys, place: Place) -> Path:
    """The kept connection's socket: a short name, for a Unix socket's path has at most 104 bytes (macOS)."""
    text = f"{keys.folder}\0{place.user}\0{place.host}\0{place.port}"
    return make_control_folder() / f"ssh-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def make_control_folder() -> Path:
    """Ours alone, or none at all: who can open the socket can log in."""
    base = tempfile.gettempdir()
    folder = Path(base if len(base) < 40 else "/tmp") / f"broker-ssh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StateError(f"`{folder}` is not a private folder of yours", hints=(f"remove `{folder}`",))
    return folder
