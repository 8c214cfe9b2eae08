"""Reach a user's own machine with OpenSSH: their keys, their configuration, their known hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from broker.errors import AuthError, CloudError, TransientError
from broker.frozen import frozen
from broker.sites.openssh import (
    ALIVE_COUNT_MAX,
    ALIVE_INTERVAL_S,
    CONNECT_S,
    PERSIST_S,
    Completed,
    call,
    escape,
    explain,
    find_program,
    make_control_folder,
)
from broker.task.tables import Section

SSH_FAILED = 255  # ssh's own exit code; ours are lower
TOO_MANY = b"Too many authentication failures"
REFUSALS = (
    *(b"Permission denied", b"Host key verification failed", b"HOST IDENTIFICATION HAS CHANGED"),
    TOO_MANY,
)
KEY_HINT = "the SSH agent offers more keys than the host accepts: name the right one as `identity_file`"
MARGIN_S = 10.0
BEGIN = "broker-output"  # in any shell, precedes the output: `~/.bashrc` on the host may print


@frozen
class SshLogin:
    """The login to one machine. None leaves a field to the user's OpenSSH configuration."""

    host: str
    user: str | None = None
    port: int | None = None
    identity_file: Path | None = None
    known_hosts: Path | None = None
    ssh_config: Path | None = None

    def make_argv(self, *options: str) -> list[str]:
        """Return the ssh command up to the host; the remote command follows as one word."""
        pairs = {
            "BatchMode": "yes",
            "ConnectTimeout": str(CONNECT_S),
            "ServerAliveInterval": str(ALIVE_INTERVAL_S),
            "ServerAliveCountMax": str(ALIVE_COUNT_MAX),
            "ControlMaster": "auto",
            "ControlPersist": str(PERSIST_S),
            "ControlPath": escape(self._name_control()),
            "StrictHostKeyChecking": "yes",  # no trust on first use
            "LogLevel": "ERROR",
        }
        if self.known_hosts:
            pairs |= {"UserKnownHostsFile": escape(self.known_hosts), "GlobalKnownHostsFile": "/dev/null"}
        if self.identity_file:
            pairs |= {"IdentityFile": escape(self.identity_file), "IdentitiesOnly": "yes"}
        words = [find_program("ssh"), *(("-F", str(self.ssh_config)) if self.ssh_config else ())]
        for name, value in pairs.items():
            words += ["-o", f"{name}={value}"]
        words += ["-l", self.user] if self.user else []
        words += ["-p", str(self.port)] if self.port else []
        return [*words, *options, "--", self.host]

    async def run(self, command: str, *, stdin: bytes = b"", timeout_s: float) -> Completed:
        """Run a shell command. Raises AuthError if the login is refused, TransientError if the host does not answer."""
        argv = [*self.make_argv("-T"), f"echo {BEGIN}; {command}"]
        done = await call(argv, stdin=stdin, timeout_s=timeout_s + MARGIN_S, what=f"host `{self.host}`")
        if done.returncode == SSH_FAILED:
            raise self._explain(done.stderr)
        _, _, stdout = done.stdout.partition(BEGIN.encode() + b"\n")
        return Completed(returncode=done.returncode, stdout=stdout, stderr=done.stderr)

    def _explain(self, stderr: bytes) -> CloudError:
        text = f"host `{self.host}` cannot be reached{explain(stderr)}"
        if any(each in stderr for each in REFUSALS):
            target = f"{self.user}@{self.host}" if self.user else self.host
            hint = f"log in by hand once to check the key and the host key: `ssh {target}`"
            return AuthError(text, hints=(KEY_HINT if TOO_MANY in stderr else hint,))
        return TransientError(text)

    def _name_control(self) -> Path:
        text = "\0".join(str(each) for each in (self.host, self.user, self.port, self.identity_file, self.ssh_config))
        return make_control_folder() / f"own-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def read_login(host: str, section: Section, base: Section | None = None) -> SshLogin:
    """Make a login from the fields of a section; missing ones come from `base`."""

    def get(name: str) -> str | None:
        value: str | None = section.get(name) or (base.get(name) if base else None)
        return value

    paths: Mapping[str, Path | None] = {
        name: Path(text).expanduser() if (text := get(name)) else None
        for name in ("identity_file", "known_hosts", "ssh_config")
    }
    port = get("port")
    return SshLogin(host=host, user=get("user"), port=int(port) if port else None, **paths)
