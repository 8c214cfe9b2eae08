"""Where setup archives are kept: a folder that outlives the node, or a bucket. Standard library only."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from broker.agent import agent_bucket
else:
    import agent_bucket


class FolderStore:
    """Archives as files of one folder. Every file appears complete or not at all."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def get(self, name: str) -> bytes | None:
        """Return a file; None if there is none."""
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, name: str, content: bytes) -> None:
        """Replace a file atomically."""
        path = self._root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.aside")  # expires as an archive does
        fd = os.open(str(aside), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


class BucketStore:
    """Archives as objects below one URL. An object store shows a whole object or none."""

    def __init__(self, url: str, variables: Mapping[str, str]) -> None:
        self._url, self._variables = url.rstrip("/"), dict(variables)
        if url.startswith("s3://"):  # asked once, not per part
            bucket = url[len("s3://") :].partition("/")[0]
            self._variables[agent_bucket.KNOWN_REGION] = agent_bucket.find_region(bucket, self._variables)

    def get(self, name: str) -> bytes | None:
        """Return an object; None if there is none. Raises Refused."""
        return agent_bucket.get(f"{self._url}/{name}", self._variables)

    def put(self, name: str, content: bytes) -> None:
        """Write an object. Raises Refused."""
        agent_bucket.put(f"{self._url}/{name}", content, self._variables)


def open_store(place: str, variables: Mapping[str, str]) -> FolderStore | BucketStore:
    """Return the store at a bucket URL, a folder, or a `file://` URL."""
    if place.startswith("file://"):
        place = place[len("file://") :]
    return BucketStore(place, variables) if "://" in place else FolderStore(Path(place))
