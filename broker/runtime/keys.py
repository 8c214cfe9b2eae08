"""Make and store the SSH keys of each gang: one login key, and one host key for its nodes."""

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
    """A key pair in the format of `ssh-keygen`."""

    private: str
    public: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


@dataclass(frozen=True, kw_only=True)
class GangKeys:
    """The folder with the keys of one token, and the alias of its nodes in `known_hosts`."""

    folder: Path
    alias: str

    @property
    def login_path(self) -> Path:
        """Return the private key for logging in to the gang's nodes."""
        return self.folder / LOGIN

    @property
    def known_hosts(self) -> Path:
        """Return the file that pins the gang's host key."""
        return self.folder / "known_hosts"

    def read(self, name: str) -> KeyPair:
        """Return a key pair. Raises FileNotFoundError once the cluster has ended."""
        return KeyPair(private=(self.folder / name).read_text(), public=(self.folder / f"{name}.pub").read_text())


class Keys:
    """One folder per token below `root` (0700). All nodes of a token share a host key, like their boot script."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, cluster: str, token: str) -> GangKeys | None:
        """Return the keys of this token; None if this installation has none."""
        keys = self._name(cluster, token)
        return keys if keys.known_hosts.exists() else None

    def ensure(self, cluster: str, token: str) -> GangKeys:
        """Create the keys on the first call, and return the same ones later. An interrupted call leaves none.

        Raises StateError if `ssh-keygen` is missing or fails, or if the keys cannot be written.
        """
        keys = self._name(cluster, token)
        try:
            return keys if keys.known_hosts.exists() else self._make(keys)
        except OSError as error:
            raise StateError(
                f"cannot write the keys of `{cluster}` to {self._root}: {error.strerror or error}",
                hints=(f"check that {self._root} is a writable folder and that its disk is not full",),
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
            if not keys.known_hosts.exists():  # otherwise another process was faster, and its keys apply
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return keys

    def forget(self, *, but: Iterable[tuple[str, str]]) -> int:
        """Remove the keys of all gangs but these (cluster, token) pairs; return how many were removed."""
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
    """Create an Ed25519 key pair at `path` and `path.pub`. Raises StateError."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    hints = ("install OpenSSH's client (`apt-get install openssh-client`)",)
    try:
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=KEYGEN_S)
    except FileNotFoundError:
        raise StateError("creating a gang's keys requires `ssh-keygen`", hints=hints) from None
    except subprocess.TimeoutExpired:
        raise StateError(f"`ssh-keygen` did not finish within {KEYGEN_S:g} s") from None
    if process.returncode:
        raise StateError(f"`ssh-keygen` failed: {process.stderr.decode(errors='replace').strip()}", hints=hints)


def write_private(path: Path, text: str) -> None:
    """Create a file of mode 0600. Raises FileExistsError if it exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
