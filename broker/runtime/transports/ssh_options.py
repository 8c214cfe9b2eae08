"""Build ssh's options: one persistent connection per host, our own keys and host keys, no trust on first use."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from broker.errors import StateError
from broker.runtime.keys import GangKeys
from broker.sites.openssh import ALIVE_COUNT_MAX, ALIVE_INTERVAL_S, CONNECT_S, escape, make_control_folder

# The default key exchange (post-quantum sntrup761) takes 0.4 s instead of 0.17 s per connection on a small machine.
# ssh refuses to start if it does not know one of them, so all are known to OpenSSH 7.4 (2016).
KEX = "curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256"
HANDLE = re.compile(r"ssh://(?P<user>\w[\w.-]*)@(?P<host>\[[0-9a-fA-F:.]+\]|\w[\w.-]*)(?::(?P<port>\d+))?")


@dataclass(frozen=True, kw_only=True)
class SshAddress:
    """The address of a node's sshd."""

    user: str
    host: str
    port: int = 22


@dataclass(frozen=True, kw_only=True)
class SshRoute:
    """The ssh options, the host name for them, and the shared connection's socket.

    `connect_s_max`: limit for a host that accepts a connection and then stays silent. `mark`: a file that exists once
    the host was reached, so that later processes do not mistake its silence for booting.
    """

    options: tuple[str, ...]
    host: str
    control: Path
    connect_s_max: float = CONNECT_S + 10.0
    mark: Path | None = None


def parse_handle(handle: str) -> SshAddress:
    """Parse `ssh://user@host:port`, an IPv6 host in brackets. Raises StateError."""
    match = HANDLE.fullmatch(handle)
    if not match:
        raise StateError(f"invalid node handle `{handle}`", hints=("the format is `ssh://USER@HOST:PORT`",))
    return SshAddress(user=match["user"], host=match["host"].strip("[]"), port=int(match["port"] or 22))


def make_options(keys: GangKeys, place: SshAddress, control: Path) -> list[str]:
    """Return the options for ssh and rsync's ssh.

    The user's own ssh configuration is ignored because the nodes are ours.
    """
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


def name_control(keys: GangKeys, place: SshAddress) -> Path:
    """Return the path of the shared connection's socket; short, because macOS limits it to 104 bytes."""
    text = f"{keys.folder}\0{place.user}\0{place.host}\0{place.port}"
    return make_control_folder() / f"ssh-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
