"""The seam to storage: seven verbs on keys below one prefix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from broker.nouns import noun


@noun
class StoredKey:
    """A key, relative to the bucket's own prefix, with `/` between its parts."""

    key: str
    size_bytes: int
    modified_s: float = 0.0  # epoch


class Bucket(Protocol):
    """Every verb may be repeated, from several threads at once, and waits.

    Raises AuthError for a login that is missing or too weak, InvalidRequestError for a bucket that does not exist,
    and TransientError when the network stays at fault. A write is seen by every later read and listing, or not at all.
    """

    def list_keys(self, prefix: str = "") -> Sequence[StoredKey]:
        """All keys that begin with whole parts of `prefix`, sorted; none is no error."""
        ...

    def read(self, key: str) -> bytes | None:
        """A small object; None where there is none."""
        ...

    def write(self, key: str, content: bytes) -> None:
        """Put an object there, whatever was before."""
        ...

    def write_if_absent(self, key: str, content: bytes) -> bool:
        """Put an object where there is none, in one step; False, and nothing changed, where there is one.

        Of several at once exactly one hears True. After an error it may have worked: read before trying again.
        """
        ...

    def upload(self, source: Path, key: str) -> None:
        """Put a file there, in parts where it is large; nothing appears before all of it is sent."""
        ...

    def download(self, key: str, target: Path) -> bool:
        """Fetch an object into a file that appears whole; False, and no file, where there is none."""
        ...

    def delete(self, key: str) -> None:
        """Already gone is success."""
        ...


class MakeBucket(Protocol):
    """What `BUCKETS` names. Asks the network for nothing that can wait for the first verb."""

    def __call__(self, url: str) -> Bucket: ...
