"""Token files that are too large to be copied to a node, read by ranges: from a bucket, or a folder on any mount."""

import hashlib
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from trainers.errors import TrainerError

# A fingerprint takes in the beginning and the end of this many files: each costs a request.
PROBE_BYTES, PROBE_FILES = 4096, 32


class ByteSource(Protocol):
    """Files that never change while a run lasts. Every method may be repeated, and called by several threads."""

    def list_sizes(self) -> dict[str, int]:
        """Return the size of each file directly under the source, by name; an OSError if that is missing."""
        ...

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a file; fewer, or an OSError, if it is shorter or missing."""
        ...


class FolderSource:
    """A folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def list_sizes(self) -> dict[str, int]:
        """Return sizes of files."""
        return {path.name: path.stat().st_size for path in self._root.iterdir() if path.is_file()}

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Read part of a file."""
        with (self._root / name).open("rb", buffering=0) as file:
            file.seek(start)
            parts = []
            while length and (part := file.read(length)):
                parts.append(part)
                length -= len(part)
        return b"".join(parts)


def open_source(url: str) -> ByteSource:
    """Return the source that a URL or plain folder names; one that cannot be read at all is a TrainerError."""
    if urlsplit(url).scheme in ("", "file"):
        return FolderSource(Path(url.removeprefix("file://")))
    from trainers.buckets import SCHEMES, open_bucket

    if urlsplit(url).scheme not in SCHEMES:
        raise TrainerError(f"`--data.stream {url}` is neither a folder nor one of {', '.join(SCHEMES)}")
    source: Any = open_bucket(url)
    return source  # type: ignore[no-any-return]


def probe_source(source: ByteSource, sizes: dict[str, int]) -> str:
    """Return a digest of names, sizes and a few pieces of content."""
    digest = hashlib.sha256()
    names = sorted(sizes)
    probed = set(names[:: max(1, -(-len(names) // PROBE_FILES))])
    for name in names:
        digest.update(f"{name}:{sizes[name]}:".encode())
        if name in probed:
            for start in (0, max(0, sizes[name] - PROBE_BYTES)):
                digest.update(source.read_range(name, start, min(PROBE_BYTES, sizes[name])))
    return digest.hexdigest()
