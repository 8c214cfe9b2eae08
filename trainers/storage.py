"""The storage of checkpoints: a folder here, a bucket in `buckets.py`, behind the verbs that both offer.

Paths are relative, with `/`. Files are written once and never changed.
"""

import errno
import hashlib
import io
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from trainers.errors import TrainerError

READ_BYTES = 8 * 2**20
# What file systems without hard links answer, bucket mounts among them.
NO_LINK_ERRNOS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
HASH_BYTES = 1 << 20


class Storage(Protocol):
    """A place that outlives the machine. Every verb may be repeated."""

    def list_names(self, path: str) -> list[str]:
        """Return names directly under a path, sorted; none if the path does not exist."""
        ...

    def read(self, path: str) -> bytes | None:
        """Return a whole small file, or None if there is none."""
        ...

    def stream(self, path: str) -> Iterator[bytes]:
        """Return a file from its beginning to its end, in parts. FileNotFoundError, at the first part, if missing."""
        ...

    def create(self, path: str, content: bytes) -> bool:
        """Write a file at once, durably; False, and nothing changed, where it already exists."""
        ...

    def checksum(self, path: str) -> tuple[str, int] | None:
        """SHA-256 and size of a file, or None if there is none."""
        ...

    def seal(self, path: str) -> tuple[str, int] | None:
        """SHA-256 and size of a file that this process just wrote with `open_writer`. To be asked once."""
        ...

    def delete(self, path: str) -> None:
        """Remove a path and all under it; nothing happens where it does not exist."""
        ...

    def open_writer(self, path: str) -> Any:
        """Return a torch.distributed.checkpoint StorageWriter below a path. Imports that library: 0.6 s."""
        ...


def open_storage(url: str) -> Storage:
    """Return the storage a URL or plain folder names; a scheme we have no storage for is a TrainerError."""
    scheme = urlsplit(url).scheme
    if scheme in ("", "file"):
        return FolderStorage(Path(url.removeprefix("file://")))
    from trainers.buckets import SCHEMES, open_bucket

    if scheme in SCHEMES:
        return open_bucket(url)
    schemes = ", ".join(f"`{scheme}://`" for scheme in SCHEMES)
    raise TrainerError(f"no checkpoint storage for `{scheme}://` in `{url}`; name a folder or one of {schemes}")


class FolderStorage:
    """A folder on a disk that every rank sees."""

    def __init__(self, root: Path) -> None:
        """Use `root`, made now where it is missing."""
        self._root = root.absolute()
        self._root.mkdir(parents=True, exist_ok=True)

    def list_names(self, path: str) -> list[str]:
        """Return names in a folder, without the files still being written."""
        try:
            return sorted(entry.name for entry in (self._root / path).iterdir() if not entry.name.endswith(".partial"))
        except FileNotFoundError:
            return []

    def read(self, path: str) -> bytes | None:
        """Return a whole file."""
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None

    def stream(self, path: str) -> Iterator[bytes]:
        """Read the file in order."""
        with (self._root / path).open("rb", buffering=0) as file:
            while part := file.read(READ_BYTES):
                yield part

    def create(self, path: str, content: bytes) -> bool:
        """Write to a temporary file, flush, then link it to its name: the file appears at that moment."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            _link(partial, target)
        except FileExistsError:
            return False
        finally:
            partial.unlink(missing_ok=True)
        _flush_folder(target.parent)
        _flush_folder(target.parent.parent)  # the folder itself may be new
        return True

    def checksum(self, path: str) -> tuple[str, int] | None:
        """Read the file through."""
        try:
            with (self._root / path).open("rb") as file:
                return hash_file(file), os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return None

    def seal(self, path: str) -> tuple[str, int] | None:
        """Return the checksum of what the disk gives back."""
        return self.checksum(path)

    def delete(self, path: str) -> None:
        """Remove a file or a tree; another process may be removing it too."""
        target = self._root / path
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)

    def open_writer(self, path: str) -> Any:
        """Return a writer of one file for each rank, flushed to the disk."""
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(self._root / path, sync_files=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINK_ERRNOS:
            raise
        # Without links the check and the rename are two moments. Two writers of one name cannot meet here:
        # names of checkpoints are unique to a process, and an attempt's name always has the same content.
        if target.exists():
            raise FileExistsError(errno.EEXIST, "already there", str(target)) from error
        source.rename(target)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some mounts cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def hash_file(file: io.BufferedReader) -> str:
    """Return the SHA-256 of what is left to read: `hashlib.file_digest`, which Python 3.10 does not have."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(HASH_BYTES))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()
