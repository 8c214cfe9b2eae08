"""The setup archives of this installation: where they may be, and which have expired.

Nodes write and read them (`agent/agent_setup_steps.py`). Each archive is a folder of objects; the newest of them (its
manifest, or the note of its last use) determines its age. An interrupted upload expires in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from broker.errors import CloudError
from broker.frozen import frozen
from broker.state.store import Store
from broker.storage import open_bucket
from broker.storage.base import Bucket, StoredKey

ROW = "setup_places"  # in the store's table `meta`
KEPT_DAYS = 14.0  # after the last use; our choice: a job that is paused for a week still finds it
MANIFEST = "manifest"  # as in `agent_setup_steps.py`


@frozen
class SetupArchive:
    """An archive, or the remains of an interrupted upload. `used_s`: time when it was last written or read."""

    place: str
    name: str
    size_bytes: int
    used_s: float
    keys: tuple[str, ...]


def record_place(store: Store, place: str) -> None:
    """Remember a bucket URL or folder before a node may write there: its archives outlive the records of jobs."""
    known = list_places(store)
    if place not in known:
        store.meta.put(ROW, json.dumps([*known, place]))


def list_places(store: Store) -> Sequence[str]:
    """Return every place that may contain archives; a damaged row counts as empty, and is replaced."""
    try:
        return [str(each) for each in json.loads(store.meta.get(ROW) or "[]")]
    except (ValueError, TypeError):
        return []


def list_archives(place: str) -> Sequence[SetupArchive]:
    """Return the archives at a place, least recently used first. Raises CloudError."""
    found: dict[str, list[StoredKey]] = {}
    for each in _open(place).list_keys():
        found.setdefault(each.key.partition("/")[0], []).append(each)
    archives = [
        SetupArchive(
            place=place,
            name=name,
            size_bytes=sum(each.size_bytes for each in keys),
            used_s=max(each.modified_s for each in keys),
            keys=tuple(sorted((each.key for each in keys), key=lambda key: (not key.endswith(f"/{MANIFEST}"), key))),
        )
        for name, keys in found.items()
    ]
    return sorted(archives, key=lambda each: (each.used_s, each.name))


def choose_expired(archives: Iterable[SetupArchive], *, now_s: float) -> Sequence[SetupArchive]:
    """Return the archives that have not been used for KEPT_DAYS."""
    return [each for each in archives if now_s - each.used_s > KEPT_DAYS * 86400]


def delete_archive(archive: SetupArchive) -> None:
    """Delete an archive, its manifest first: a node that is reading it then runs `setup`. Raises CloudError."""
    bucket = _open(archive.place)
    for key in archive.keys:
        bucket.delete(key)


def forget_archives(places: Iterable[str], *, now_s: float) -> Mapping[str, str]:
    """Delete expired archives at these places; return those that could not be read, with the reason."""
    failed = {}
    for place in places:
        try:
            for archive in choose_expired(list_archives(place), now_s=now_s):
                delete_archive(archive)
        except CloudError as error:
            failed[place] = error.message
    return failed


def _open(place: str) -> Bucket:
    return open_bucket(place if "://" in place else Path(place).as_uri())
