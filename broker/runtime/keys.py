"""The SSH keys of each gang, made by us: one to log in with, one that its nodes show as their own."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from broker.errors import StateError

LOGIN, HOST = "login", "host"
KEYGEN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """Text as `ssh-keygen` writes it."""

    private: str
    public: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


@dataclass(frozen=True, kw_only=True)
class GangKeys:
    """Where the keys of one token lie, and by which name its nodes stand in `known_hosts`."""

    folder: Path
    alias: str

    @property
    def login_path(self) -> Path:
        return self.folder / LOGIN

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def read(self, name: str) -> KeyPair:
        return KeyPair(private=(self.folder / name).read_text(), public=(self.folder / f"{name}.pub").read_text())


class Keys:
    """A folder a token below `root` (0700); all nodes of one token share a host key, as they share a boot script."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, cluster: str, token: str) -> GangKeys | None:
        """The keys that were made for this token; None where this installation made none."""
        keys = self._name(cluster, token)
        return keys if keys.known_hosts.exists() else None

    def ensure(self, cluster: str, token: str) -> GangKeys:
        """Make them on the first call; the same ones on every later call, whatever was cut short before.

        Raises StateError without a working `ssh-keygen`, and where they cannot be written.
        """
        keys = self._name(cluster, token)
        try:
            return keys if keys.known_hosts.exists() else self._make(keys)
        except OSError as error:
            raise StateError(
                f"the keys of `{cluster}` cannot be written to {self._root}: {error.strerror or error}",
                hints=(f"Check that {self._root} is a writable folder and its disk not full.",),
            ) from error

    def _make(self, keys: GangKeys) -> GangKeys:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = self._root / f".new-{secrets.token_hex(8)}"
        aside.mkdir(mode=0o700)
        try:
            for name in (LOGIN, HOST):
                make_pair(aside / name, comment=keys.alias)
            kind, blob = (aside / f"{HOST}.pub").read_text().split()[:2]
            write_private(aside / "known_hosts", f"{keys.alias} {kind} {blob}\n")
            aside.rename(keys.folder)
        except OSError:
            if not keys.known_hosts.exists():  # else somebody was faster, and theirs are the keys
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return keys

    def forget(self, *, but: Iterable[tuple[str, str]]) -> int:
        """Remove the keys of gangs that are gone: all but those of these (cluster, token); returns how many."""
        kept = {self._name(cluster, token).folder.name for cluster, token in but}
        folders = self._root.iterdir() if self._root.exists() else ()
        gone = [path for path in folders if path.name not in kept and not path.name.startswith(".")]
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)
        return len(gone)

    def _name(self, cluster: str, token: str) -> GangKeys:
        digest = hashlib.sha256(token.encode()).hexdigest()[:12]
        return GangKeys(folder=self._root / f"{cluster}-{digest}", alias=f"broker-{digest}")


def make_pair(path: Path, *, comment: str) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    hints = ("install OpenSSH's client (`apt-get install openssh-client`)",)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=KEYGEN_S)
    except FileNotFoundError:
        raise StateError("there is no `ssh-keygen` to make a gang's keys with", hints=hints) from None
    except subprocess.TimeoutExpired:
        raise StateError(f"`ssh-keygen` did not end within {KEYGEN_S:g} s") from None
    if done.returncode:
        raise StateError(f"`ssh-keygen` failed: {done.stderr.decode(errors='replace').strip()}", hints=hints)


def write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
