"""Ranged reads of token files that are too large to copy to a node, from a bucket or a folder on any mount."""

import hashlib
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from trainers.errors import TrainerError

UNFINISHED = "tokens.json.partial"  # beside token files that `trainers.prepare` has not completed
UNFINISHED_HINT = "hint: `trainers.prepare` was interrupted there; remove the folder, and run it again"
# A fingerprint reads the beginning and the end of this many files: each costs a request.
PROBE_BYTES, PROBE_FILES = 4096, 32


class ByteSource(Protocol):
    """Files that do not change during a run. Every method may be repeated and is thread-safe."""

    def list_sizes(self) -> dict[str, int]:
        """Return the size of each file directly under the source, by name. Raises OSError if the source is missing."""
        ...

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a file, or fewer at its end. Raises OSError if it is missing."""
        ...


class FolderSource:
    """Token files in a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def list_sizes(self) -> dict[str, int]:
        """Return the size of each file by name."""
        return {path.name: path.stat().st_size for path in self._root.iterdir() if path.is_file()}

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a file from `start`."""
        with (self._root / name).open("rb", buffering=0) as file:
            file.seek(start)
            parts = []
            while length and (part := file.read(length)):
                parts.append(part)
                length -= len(part)
        return b"".join(parts)


def open_source(url: str) -> ByteSource:
    """Return the source for a URL or folder. Raises TrainerError if it is neither."""
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
