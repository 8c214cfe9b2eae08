"""The uploaded files of live work in a server's backup: each upload once, by its digest, encrypted in blocks.

    URL/files/DIGEST    a tar archive as sealed blocks: a flag (1: the last one), length, nonce, AES-256-GCM ciphertext

Copies of the state name uploads by `MARK` instead of a folder of this machine, because a restored server may have
another one. Files are written before the first state that names them, and deleted an hour after the last one.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import secrets
import shutil
import sqlite3
import struct
import tarfile
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from broker.clock import Clock
from broker.errors import StateError
from broker.storage.base import Bucket

UPLOADS = "uploads"  # folder of the state folder; `server/files.py` fills it
PREFIX = "files"
ASIDE = ".backup-"  # prefix of temporary folders in the state folder, which a killed server leaves behind
ASIDE_S = 86400.0
MARK = "broker-upload:"
DIGEST = "[0-9a-f]{64}"
BLOCK_BYTES = 8 * 2**20
NONCE_BYTES = 12
HEADER = struct.Struct(">BI")
KEPT_S = 3600.0  # unused files stay this long: a restore may be reading a state that names them
# The rows whose tasks name files that a later attempt sends to its nodes.
LIVE_TASKS = {"jobs": "NOT is_terminal", "service_versions": "true", "schedules": "true"}


def detach_uploads(connection: sqlite3.Connection, home: Path) -> frozenset[str]:
    """Replace the folder of uploads by `MARK` in the tasks of live work of a copy; return the digests they name."""
    folder = json.dumps(str(home / UPLOADS), ensure_ascii=False)[1:-1]
    return _replace(connection, re.compile(f'"{re.escape(folder)}/({DIGEST})/'), f'"{MARK}')


def attach_uploads(connection: sqlite3.Connection, home: Path) -> frozenset[str]:
    """Replace `MARK` by this machine's folder of uploads; return the digests that the tasks of live work name."""
    folder = json.dumps(str(home / UPLOADS), ensure_ascii=False)[1:-1]
    return _replace(connection, re.compile(f'"{MARK}({DIGEST})/'), f'"{folder}/')


def forget_asides(home: Path, *, now_s: float) -> None:
    """Delete the temporary folders of backups that were killed: each holds a copy of the state or of an upload."""
    for path in home.glob(f"{ASIDE}*"):
        with contextlib.suppress(OSError):
            if now_s - path.stat().st_mtime >= ASIDE_S:
                shutil.rmtree(path)


def _replace(connection: sqlite3.Connection, pattern: re.Pattern[str], start: str) -> frozenset[str]:
    found: set[str] = set()
    for table, where in LIVE_TASKS.items():
        for row_id, text in connection.execute(f"SELECT rowid, task FROM {table} WHERE {where}").fetchall():
            if isinstance(text, str) and (named := pattern.findall(text)):
                found.update(named)
                new = pattern.sub(lambda match: f"{start}{match[1]}/", text)
                connection.execute(f"UPDATE {table} SET task = ? WHERE rowid = ?", (new, row_id))
    return frozenset(found)


class BackupFiles:
    """The uploads of one state folder in the bucket of its backups. Methods raise CloudError and StateError."""

    def __init__(self, home: Path, bucket: Bucket, *, clock: Clock, load_key: Callable[[], bytes]) -> None:
        self._home = home
        self._bucket = bucket
        self._clock = clock
        self._load_key = load_key
        self._sent: set[str] | None = None  # once the bucket was listed
        self._unused_since_s: dict[str, float] = {}

    def send(self, digests: Collection[str]) -> None:
        """Write the uploads that the bucket lacks, except any deleted here, whose jobs fail here as well."""
        if self._sent is None:
            self._sent = {each.key.rpartition("/")[2] for each in self._bucket.list_keys(PREFIX)}
        for digest in sorted(set(digests) - self._sent):
            folder = self._home / UPLOADS / digest
            if not folder.is_dir():
                continue
            with tempfile.TemporaryDirectory(dir=self._home, prefix=ASIDE) as aside:
                sealed = Path(aside) / digest
                seal_folder(folder, sealed, digest=digest, key=self._load_key())
                self._bucket.upload(sealed, f"{PREFIX}/{digest}")
            self._sent.add(digest)

    def forget_unused(self, digests: Collection[str]) -> None:
        """Delete the uploads that no state has named for an hour; call this after the state was written."""
        now_s = self._clock.now_s()
        unused = (self._sent or set()) - set(digests)
        self._unused_since_s = {each: min(now_s, self._unused_since_s.get(each, now_s)) for each in unused}
        for digest in sorted(each for each, since_s in self._unused_since_s.items() if now_s - since_s >= KEPT_S):
            self._bucket.delete(f"{PREFIX}/{digest}")
            assert self._sent is not None
            self._sent.discard(digest)
            del self._unused_since_s[digest]

    def fetch(self, digests: Collection[str]) -> tuple[str, ...]:
        """Unpack these uploads into the state folder; return those that the backup lacks."""
        missing = []
        for digest in sorted(digests):
            target = self._home / UPLOADS / digest
            if target.is_dir():
                continue
            with tempfile.TemporaryDirectory(dir=self._home, prefix=ASIDE) as aside:
                sealed, folder = Path(aside) / "sealed", Path(aside) / "folder"
                if not self._bucket.download(f"{PREFIX}/{digest}", sealed):
                    missing.append(digest)
                    continue
                unseal_folder(sealed, folder, digest=digest, key=self._load_key())
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.rename(target)
        return tuple(missing)


def seal_folder(folder: Path, target: Path, *, digest: str, key: bytes) -> None:
    """Write the content of a folder as one encrypted archive."""
    with target.open("wb") as file:
        sealed = _SealedWriter(file, digest, key)
        with tarfile.open(fileobj=sealed, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(folder.iterdir()):
                archive.add(path, arcname=path.name)
        sealed.finish()


def unseal_folder(source: Path, folder: Path, *, digest: str, key: bytes) -> None:
    """Unpack an archive of `seal_folder`. Raises StateError for another key, or a damaged or incomplete archive."""
    from cryptography.exceptions import InvalidTag

    folder.mkdir(mode=0o700)
    try:
        with source.open("rb") as file:
            reader = _SealedReader(file, digest, key)
            with tarfile.open(fileobj=io.BufferedReader(reader), mode="r|") as archive:
                archive.extractall(folder, filter="data")
            while reader.read(BLOCK_BYTES):  # the last block must have come
                pass
    except (InvalidTag, tarfile.TarError, struct.error, ValueError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise StateError(f"the uploaded files {digest[:12]} in the backup are damaged: {error!r}") from error


def _bind(digest: str, index: int, *, is_last: bool) -> bytes:
    """Return the associated data of a block, so that one of another upload, or in another order, is refused."""
    return f"broker upload 1 {digest} {index} {is_last}".encode()


class _SealedWriter(io.RawIOBase):
    """A binary file for writing whose blocks are encrypted."""

    def __init__(self, file: io.BufferedWriter, digest: str, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._file, self._digest, self._cipher = file, digest, AESGCM(key)
        self._index = 0
        self._rest = bytearray()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, content: Any) -> int:
        """Write all full blocks, and keep the rest."""
        self._rest += content
        while len(self._rest) >= BLOCK_BYTES:
            self._put(bytes(self._rest[:BLOCK_BYTES]), is_last=False)
            del self._rest[:BLOCK_BYTES]
        return len(content)

    def finish(self) -> None:
        """Write the last block."""
        self._put(bytes(self._rest), is_last=True)

    def _put(self, content: bytes, *, is_last: bool) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, content, _bind(self._digest, self._index, is_last=is_last))
        self._file.write(HEADER.pack(is_last, len(sealed)) + nonce + sealed)
        self._index += 1


class _SealedReader(io.RawIOBase):
    """A binary file for reading whose blocks are decrypted. Raises InvalidTag, ValueError and struct.error."""

    def __init__(self, file: io.BufferedReader, digest: str, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._file, self._digest, self._cipher = file, digest, AESGCM(key)
        self._index = 0
        self._is_over = False
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill `target` from the current block; return 0 only after the last one."""
        view = memoryview(target).cast("B")
        while not self._rest and not self._is_over:
            self._read_block()
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def _read_block(self) -> None:
        flag, length = HEADER.unpack(self._file.read(HEADER.size))
        if length > 2 * BLOCK_BYTES:
            raise ValueError("a block is too long")
        nonce, sealed = self._file.read(NONCE_BYTES), self._file.read(length)
        content = self._cipher.decrypt(nonce, sealed, _bind(self._digest, self._index, is_last=bool(flag)))
        self._rest, self._is_over = memoryview(content), bool(flag)
        self._index += 1
