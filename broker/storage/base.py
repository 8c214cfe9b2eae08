"""Define the interface to storage: seven verbs on keys below one prefix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from broker.frozen import frozen


@frozen
class StoredKey:
    """A key, relative to the bucket's own prefix, with `/` between its parts."""

    key: str
    size_bytes: int
    modified_s: float = 0.0  # Unix time
    etag: str = ""  # another value for other content; none in folders


class Bucket(Protocol):
    """A bucket. Every verb blocks, and is idempotent and thread-safe.

    Raises AuthError for a missing or insufficient login, InvalidRequestError for a bucket that does not exist, and
    TransientError if the network keeps failing. Every later read and listing sees a write completely, or not at all.
    """

    def list_keys(self, prefix: str = "") -> Sequence[StoredKey]:
        """Return all keys whose first parts are `prefix`, sorted; an empty result is not an error."""
        ...

    def read(self, key: str) -> bytes | None:
        """Return a small object; None if it does not exist."""
        ...

    def write(self, key: str, content: bytes) -> None:
        """Write an object, replacing an existing one."""
        ...

    def write_if_absent(self, key: str, content: bytes) -> bool:
        """Write an object atomically unless it exists; if it does, change nothing and return False.

        Of several concurrent calls, exactly one returns True. The write may have happened despite an error: read before
        retrying.
        """
        ...

    def upload(self, source: Path, key: str) -> None:
        """Upload a file, in parts if it is large; the object appears only when it is complete."""
        ...

    def download(self, key: str, target: Path) -> bool:
        """Download an object into a file that appears complete; return False, without a file, if there is no object."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; already gone is success."""
        ...


class MakeBucket(Protocol):
    """The type of the makers in `BUCKETS`, which leave network calls to the first verb if they can."""

    def __call__(self, url: str) -> Bucket:
        """Return the bucket of a URL. Raises CloudError if its library or login is missing."""
