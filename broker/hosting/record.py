"""Keep the record of this installation's server in the state folder; it is written before anything is created."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path

import msgspec

from broker.errors import StateError
from broker.frozen import frozen

FOLDER = "hosted"  # below the state folder, mode 0700


class HostedStatus(StrEnum):
    """The states of a server. If STARTING or ENDING is interrupted, the next command completes it."""

    STARTING = "STARTING"
    UP = "UP"
    ENDING = "ENDING"


@frozen
class MachineLogin:
    """The login of a server's machine on its cloud.

    `name`: an instance profile, or the email of a service account; "" for none. `is_own`: broker created it, and
    deletes it with the server. `buckets` are those that it may use.
    """

    name: str = ""
    is_own: bool = False
    buckets: tuple[str, ...] = ()


@frozen
class HostedServer:
    """A server that `broker server up` set up. `folder` is on its machine; `cluster` is the one it runs on, if any."""

    infra: str
    folder: str
    port: int
    status: HostedStatus
    options: tuple[str, ...] = ()  # of `broker server start`
    config: str = ""  # content of the server's `config.toml`
    python: str | None = None
    extras: tuple[str, ...] = ()
    cluster: str | None = None
    login: MachineLogin = MachineLogin()
    ssh_config: str | None = None
    restore_from: str | None = None
    url: str = ""
    fingerprint: str | None = None
    version: str = ""

    @property
    def cloud(self) -> str:
        """The first part of `infra`: a cloud, if there is a cluster."""
        return self.infra.partition("/")[0]


class HostedRecord:
    """Reads and replaces the record, and the server's token and key, which only this user may read."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER

    @property
    def token_path(self) -> Path:
        """The file with the administrator's token."""
        return self._folder / "admin.token"

    @property
    def key_path(self) -> Path:
        """The file with the key of the server's backups."""
        return self._folder / "secret.key"

    def read(self) -> HostedServer | None:
        """Return the record; None if there is no server. Raises StateError for a damaged file."""
        path = self._folder / "server.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=HostedServer)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StateError(
                f"the record of the server in {path} cannot be read: {error}",
                hints=("look for the server by its cluster `broker-server` in `broker status`, then remove the file",),
            ) from None

    def write(self, server: HostedServer) -> None:
        """Replace the record durably."""
        self.write_private("server.json", json.dumps(msgspec.to_builtins(server), indent=1))

    def write_private(self, name: str, text: str) -> None:
        """Replace a file of mode 0600 atomically and durably."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = self._folder / f".{name}-{os.getpid()}"
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._folder / name)

    def forget(self) -> None:
        """Delete the record and the token; already gone is success. The key stays because backups need it."""
        self.token_path.unlink(missing_ok=True)
        (self._folder / "server.json").unlink(missing_ok=True)
