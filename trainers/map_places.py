"""Read the input and write the results of a map, in a folder or a bucket, with the few operations that workers need.

Keys are relative and separated by `/`. Every operation may be repeated, and raises OSError if the place keeps failing.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

PARTIAL = ".partial"
Answer = TypeVar("Answer")


class ReplacedError(OSError):
    """The object was written again since the map began, so its parts would be results of two contents."""


class Entry(NamedTuple):
    """A key with its size and the time of its last write, by the clock of the place."""

    key: str
    size_bytes: int
    modified_s: float


class Place(Protocol):
    """A folder or bucket that the workers of a map share. Every operation raises OSError if it is unreachable."""

    def list_entries(self, folder: str) -> list[Entry]:
        """Return all keys below a folder; none if it does not exist."""
        ...

    def list_files(self) -> list[str]:
        """Return the keys at the top level, without those in folders."""
        ...

    def has(self, key: str) -> bool:
        """Return whether the key exists."""
        ...

    def read(self, key: str) -> bytes | None:
        """Return the object's bytes; None if it does not exist."""
        ...

    def read_range(self, key: str, start: int, end: int, mark: str = "") -> bytes:
        """Return the bytes from `start` to before `end`; fewer at the end of the object.

        Raises ReplacedError if the object's mark is another one: its ETag, or in a folder the second of its last write.
        """
        ...

    def create(self, key: str, content: bytes) -> bool:
        """Write unless the key exists, and return whether it was written. Of concurrent calls, exactly one succeeds."""
        ...

    def write(self, key: str, content: bytes) -> None:
        """Create or replace the object in one atomic step."""
        ...

    def delete(self, key: str) -> None:
        """Delete the object; a missing object counts as success."""
        ...


def open_place(url: str) -> Place:
    """Return the storage for `file:///folder` or a bucket's URL."""
    if urlsplit(url).scheme in ("", "file"):
        return FolderPlace(Path(url[len("file://") :] if url.startswith("file://") else url))
    from trainers.buckets import open_store

    return BucketPlace(open_store(url), url)


def compare_marks(key: str, planned: str, found: str) -> None:
    """Raise ReplacedError if an object is not the one that was planned; an unknown mark is accepted."""
    if planned and found and planned != found:
        raise ReplacedError(f"`{key}` was written again since the map began: start another map, with another output")


class FolderPlace:
    """A folder that all workers see."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def list_entries(self, folder: str) -> list[Entry]:
        found = []
        for path in sorted((self._root / folder).rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # deleted or renamed since
                status = path.stat()
                if path.is_file() and not path.name.endswith(PARTIAL):
                    found.append(Entry(path.relative_to(self._root).as_posix(), status.st_size, status.st_mtime))
        return found

    def list_files(self) -> list[str]:
        if not self._root.is_dir():
            return []
        return sorted(each.name for each in os.scandir(self._root) if each.is_file() and PARTIAL not in each.name)

    def has(self, key: str) -> bool:
        return (self._root / key).exists()

    def read(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None

    def read_range(self, key: str, start: int, end: int, mark: str = "") -> bytes:
        with (self._root / key).open("rb") as file:
            file.seek(start)
            content = file.read(end - start)
            compare_marks(key, mark, str(int(os.fstat(file.fileno()).st_mtime)))  # after reading: a writer may be busy
            return content

    def create(self, key: str, content: bytes) -> bool:
        with self._write_aside(key, content) as aside:
            try:
                os.link(aside, self._root / key)
            except FileExistsError:
                return False
        return True

    def write(self, key: str, content: bytes) -> None:
        with self._write_aside(key, content) as aside:
            aside.replace(self._root / key)

    def delete(self, key: str) -> None:
        (self._root / key).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _write_aside(self, key: str, content: bytes) -> Any:
        target = self._root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}{PARTIAL}")
        try:
            with aside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            yield aside
        finally:
            aside.unlink(missing_ok=True)


class BucketPlace:
    """A bucket, or a folder in one, through obstore, which retries calls after network errors."""

    def __init__(self, store: Any, url: str) -> None:
        import obstore

        self._store, self._url, self._library = store, url, obstore

    def list_entries(self, folder: str) -> list[Entry]:
        def list_pages() -> list[Entry]:
            pages = self._library.list(self._store, folder or None, chunk_size=1000)
            return [
                Entry(each["path"], each["size"], each["last_modified"].timestamp()) for page in pages for each in page
            ]

        return self._call("list", list_pages)

    def list_files(self) -> list[str]:
        listing = self._call("list", lambda: self._library.list_with_delimiter(self._store, None))
        return sorted(each["path"] for each in listing["objects"])

    def has(self, key: str) -> bool:
        try:
            self._call("look up a key in", lambda: self._library.head(self._store, key))
        except FileNotFoundError:
            return False
        return True

    def read(self, key: str) -> bytes | None:
        try:
            return self._call("read from", lambda: bytes(self._library.get(self._store, key).bytes()))
        except FileNotFoundError:
            return None

    def read_range(self, key: str, start: int, end: int, mark: str = "") -> bytes:
        def get() -> bytes:
            answer = self._library.get(self._store, key, options={"range": (start, end)})
            compare_marks(key, mark, (answer.meta["e_tag"] or "").removeprefix("W/").strip('"'))
            return bytes(answer.bytes())

        return self._call("read from", get)

    def create(self, key: str, content: bytes) -> bool:
        from trainers.buckets import create_object

        return self._call("write to", lambda: create_object(self._store, key, content))

    def write(self, key: str, content: bytes) -> None:
        self._call("write to", lambda: self._library.put(self._store, key, content))

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call("delete from", lambda: self._library.delete(self._store, key))

    def _call(self, verb: str, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except FileNotFoundError:
            raise
        except self._library.exceptions.BaseError as error:
            first = str(error).strip().partition("\n")[0]
            raise OSError(f"could not {verb} `{self._url}`: {first or type(error).__name__}") from error
