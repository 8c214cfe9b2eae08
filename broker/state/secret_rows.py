"""The secrets of live jobs in a shared database: one encrypted row per job, deleted when the job ends.

AES-256-GCM with a random nonce; the job's name is authenticated too, so a row cannot be moved to another job. The
key is 32 bytes in base64, from `BROKER_SECRET_KEY` or the file `secret.key`, and is never in the database.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from broker.config import read_secret_key
from broker.errors import DamagedRowError, StateError
from broker.state.base import Database
from broker.state.faults import explain_os_error
from broker.types.jobs import name_job

KEY_BYTES = 32
NONCE_BYTES = 12
KNOWN_KEY = "secret_key"  # in `meta`: a fingerprint of the key, so that a process with a different key does not write


def load_key(home: Path) -> bytes:
    """Return the key from the environment, else from `secret.key`, which is generated if it is missing.

    Raises StateError for an invalid key.
    """
    path = home / "secret.key"
    text = read_secret_key()
    source = "BROKER_SECRET_KEY"
    try:
        if text is None:
            source = str(path)
            text = path.read_text() if path.exists() else _write_key(path)
    except OSError as error:
        raise explain_os_error(error, default=path) from error
    return read_key(text, source)


def read_key(text: str, source: str) -> bytes:
    """Decode a key; `source` identifies it in errors. Raises StateError for an invalid key."""
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise StateError(
            f"{source} is not a valid key: expected {KEY_BYTES} bytes in base64",
            hints=("generate one with `openssl rand -base64 32`",),
        )
    return key


def _write_key(path: Path) -> str:
    """Generate the key atomically, so that concurrent processes read the same key."""
    aside = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(aside, path)
        except FileExistsError:
            pass
    finally:
        aside.unlink(missing_ok=True)
    return path.read_text()


class SecretBox:
    """Encrypts and decrypts the secrets of one job."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # only jobs with secrets need it

        self._cipher = AESGCM(key)
        self.fingerprint = hashlib.sha256(b"broker secret key" + key).hexdigest()[:16]

    def seal(self, name: str, values: Mapping[str, str]) -> str:
        """Encrypt values with AES-256-GCM and a random nonce; `name` is authenticated with them."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, msgspec.json.encode(dict(values)), name.encode())
        return base64.b64encode(nonce + sealed).decode()

    def open(self, name: str, text: str) -> Mapping[str, str]:
        """Decrypt. Raises ValueError for text that was not sealed with this key for this job."""
        from cryptography.exceptions import InvalidTag

        data = base64.b64decode(text, validate=True)
        try:
            plain = self._cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], name.encode())
        except InvalidTag:
            raise ValueError("sealed with another key, or damaged") from None
        return msgspec.json.decode(plain, type=dict[str, str])


def check_key(database: Database, box: SecretBox) -> None:
    """Record the key of this store's secrets. Raises StateError if the key differs from the first one.

    Called in the transaction that writes secrets.
    """
    database.execute(
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO NOTHING", (KNOWN_KEY, box.fingerprint)
    )
    row = database.row("SELECT value FROM meta WHERE key = ?", (KNOWN_KEY,))
    if row is None or row["value"] != box.fingerprint:
        raise StateError(
            "the secrets in the database are encrypted with another key",
            hints=(f"copy `secret.key` from the machine that submitted the first job to {database.path.parent}",),
        )


class SecretRows:
    """Secrets of live jobs in the database, encrypted with the key of the state folder."""

    def __init__(self, database: Database) -> None:
        self._database = database

    _box: SecretBox | None = None

    def write(self, job_id: int, uid: str, values: Mapping[str, str]) -> None:
        """Write the secrets, in the transaction that adds the job. Raises StateError for a key other than the first."""
        box = self._load_box()
        with self._database.transaction():
            check_key(self._database, box)
            self._database.execute(
                "INSERT INTO secrets (job_id, body) VALUES (?, ?) "
                "ON CONFLICT (job_id) DO UPDATE SET body = excluded.body",
                (job_id, box.seal(name_job(job_id, uid), values)),
            )

    def forget(self, job_id: int, uid: str) -> None:
        """Delete the secrets of a job; no effect if already deleted."""
        self._database.write("DELETE FROM secrets WHERE job_id = ?", (job_id,))

    def read(self, job_id: int, uid: str, names: Sequence[str]) -> Mapping[str, str]:
        """Return the secrets by name, with empty values after the job has ended. Raises DamagedRowError."""
        row = self._database.row("SELECT body FROM secrets WHERE job_id = ?", (job_id,))
        try:
            values = self._load_box().open(name_job(job_id, uid), str(row["body"])) if row else {}
        except ValueError as error:
            raise DamagedRowError("jobs", str(job_id), f"its secrets: {error}") from error
        return {name: values.get(name, "") for name in names}

    def has(self, job_id: int, uid: str) -> bool:
        """Return whether there is a row."""
        return self._database.row("SELECT 1 FROM secrets WHERE job_id = ?", (job_id,)) is not None

    def _load_box(self) -> SecretBox:
        if self._box is None:
            self._box = SecretBox(load_key(self._database.path.parent))
        return self._box
