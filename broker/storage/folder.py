"""Use a folder as a bucket, for rehearsals and shared disks."""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from broker.errors import AuthError, InvalidRequestError
from broker.storage.base import StoredKey

PARTIAL = ".partial"


class FolderBucket:
    """Implement `Bucket` for a local folder."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def list_keys(self, prefix: str = "") -> Sequence[StoredKey]:
        """List files below the prefix; unfinished writes are skipped."""
        place = self._find(prefix)
        keys = []
        for path in [place] if place.is_file() else place.rglob("*"):
            with suppress(FileNotFoundError):  # deleted or renamed since: workers of a map delete their leases
                status = path.stat()
                if stat.S_ISREG(status.st_mode) and not path.name.endswith(PARTIAL):
                    key = path.relative_to(self._root).as_posix()
                    keys.append(StoredKey(key=key, size_bytes=status.st_size, modified_s=status.st_mtime))
        return sorted(keys, key=lambda each: each.key)

    def read(self, key: str) -> bytes | None:
        """Return the content; None if there is no such file."""
        try:
            return self._find(key).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            return None

    def write(self, key: str, content: bytes) -> None:
        """Replace the file atomically."""
        self._put(key, lambda aside: _write(aside, content), is_new=False)

    def write_if_absent(self, key: str, content: bytes) -> bool:
        """Create the file by a hard link, which fails if it exists; return whether it was created."""
        return self._put(key, lambda aside: _write(aside, content), is_new=True)

    def upload(self, source: Path, key: str) -> None:
        """Copy a file in, and replace the target atomically."""
        self._put(key, lambda aside: shutil.copyfile(source, aside), is_new=False)

    def download(self, key: str, target: Path) -> bool:
        """Copy a file out, and replace the target atomically; return False if there is none."""
        aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}{PARTIAL}")
        try:
            shutil.copyfile(self._find(key), aside)
            aside.replace(target)
        except (FileNotFoundError, IsADirectoryError):  # a folder is not an object
            return False
        finally:
            aside.unlink(missing_ok=True)
        return True

    def delete(self, key: str) -> None:
        """Delete the file; already gone is success."""
        self._find(key).unlink(missing_ok=True)

    def _find(self, key: str) -> Path:
        path = self._root / key
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise InvalidRequestError(f"`{key}` is outside `{self._root}`")
        return path

    def _put(self, key: str, fill: Callable[[Path], object], *, is_new: bool) -> bool:
        """Write a temporary file, and rename or link it, so that the target appears in one step.

        `is_new` keeps an existing target; return whether the target was written.
        """
        target = self._find(key)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}{PARTIAL}")
            try:
                fill(aside)
                if not is_new:
                    aside.replace(target)
                    return True
                os.link(aside, target)
            except FileExistsError:
                return False
            finally:
                aside.unlink(missing_ok=True)
        except PermissionError as error:
            raise AuthError(f"cannot write to `{target}`: {error.strerror}") from error
        return True


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_bucket(url: str) -> FolderBucket:
    """Make the bucket of `file:///path`."""
    return FolderBucket(Path(url.removeprefix("file://")))
