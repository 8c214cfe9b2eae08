"""The manifest of a checkpoint: its files and their checksums.

`manifest.json` is written last, by one conditional write: a checkpoint without one is incomplete. It contains the
SHA-256 and the size of every other file, and a SHA-256 of its own content.
"""

import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainers.errors import CheckpointError
from trainers.storage import Storage

MANIFEST_VERSION = 2
INDEX = ".metadata"  # torch's name for the file with the location of each tensor
NAME_PATTERN = re.compile(r"step-(\d{8,})-attempt-(\d{4,})-([0-9a-f]{8})")


@dataclass(frozen=True, kw_only=True)
class CheckpointName:
    """The parts of a checkpoint folder's name."""

    step: int
    attempt: int
    run: str

    def __str__(self) -> str:
        return f"step-{self.step:08d}-attempt-{self.attempt:04d}-{self.run}"


@dataclass(frozen=True, kw_only=True)
class FileChecksum:
    """SHA-256 and size in bytes of a file as it was written."""

    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The files that a manifest lists, and their writer."""

    world_size: int
    shared: frozenset[str]
    own: frozenset[str]
    files: Mapping[str, FileChecksum]
    about: Mapping[str, Any]  # from the recipe; empty before 0.1


class DamagedFile(Exception):
    """A checkpoint is incomplete or differs from what was written; the message names the file and the difference."""


def find_newest(storage: Storage) -> tuple[CheckpointName, Contents] | None:
    """Return the newest complete checkpoint and its contents; skip incomplete and corrupt ones. Reads every file."""
    for name in list_checkpoints(storage):
        try:
            contents = read_manifest(storage, name)
            for file, seal in contents.files.items():
                check_seal(file, seal, storage.checksum(f"{name}/{file}"))
            return name, contents
        except DamagedFile as damage:
            warn_skipped(name, damage)
    return None


def list_checkpoints(storage: Storage) -> list[CheckpointName]:
    """Return all checkpoint folders, complete or not, newest first."""
    matches = [match for match in map(NAME_PATTERN.fullmatch, storage.list_names("")) if match]
    names = [CheckpointName(step=int(match[1]), attempt=int(match[2]), run=match[3]) for match in matches]
    return sorted(names, key=lambda name: (name.step, name.attempt, name.run), reverse=True)


def read_manifest(storage: Storage, name: CheckpointName) -> Contents:
    """Return the contents of the checkpoint. Raises DamagedFile if the manifest is missing or damaged.

    Raises CheckpointError for the whole manifest of another version: the checkpoint is intact, and must neither be
    skipped in favour of an older one nor be removed.
    """
    content = storage.read(f"{name}/manifest.json")
    if content is None:
        raise DamagedFile("it has no manifest, so its write was interrupted")
    try:
        manifest = json.loads(content)
        version, files = manifest["version"], dict(manifest["files"])
        seal = manifest.pop("seal", None)
        if version != MANIFEST_VERSION and seal == seal_manifest(manifest):  # its other fields may have another form
            raise make_version_error(name, version)
        contents = Contents(
            world_size=int(manifest["world_size"]),
            shared=frozenset(manifest["shared"]),
            own=frozenset(manifest["own"]),
            files={
                str(file): FileChecksum(sha256=str(sha256), size=int(size)) for file, (sha256, size) in files.items()
            },
            about=dict(manifest.get("about") or {}),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"its manifest cannot be read ({error})") from error
    if seal != seal_manifest(manifest):
        raise DamagedFile("its manifest does not match its own checksum")
    return contents


def make_version_error(name: CheckpointName, version: object) -> CheckpointError:
    """Return the error for a checkpoint of another version."""
    return CheckpointError(
        f"`{name}` was written by another version of the trainers: its manifest has version {version}, not "
        f"{MANIFEST_VERSION}\n\nhint: continue with the version that wrote it, or name another folder for checkpoints"
    )


def read_index(storage: Storage, name: CheckpointName, contents: Contents) -> bytes:
    """Return the file with the location of each tensor. Raises DamagedFile if it is missing or damaged."""
    content = storage.read(f"{name}/{INDEX}")
    if INDEX not in contents.files:
        raise DamagedFile(f"`{INDEX}` is not in its manifest")
    actual = None if content is None else (hashlib.sha256(content).hexdigest(), len(content))
    check_seal(INDEX, contents.files[INDEX], actual)
    assert content is not None, "its checksum was verified"
    return content


def check_seal(file: str, seal: FileChecksum, actual: tuple[str, int] | None) -> None:
    """Raise DamagedFile unless `actual` equals the expected checksum and size; None means that the file is missing."""
    if actual is None:
        raise DamagedFile(f"`{file}` is missing")
    if actual != (seal.sha256, seal.size):
        raise DamagedFile(f"`{file}` does not match its checksum")


def seal_manifest(manifest: Mapping[str, object]) -> str:
    """Return the SHA-256 of the content of a manifest: a flipped bit may still be valid JSON."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def divide(files: Iterable[str], *, rank: int, world_size: int) -> list[str]:
    """Return the files of one rank. Every file belongs to exactly one rank, and all ranks agree on it."""
    return sorted(files)[rank::world_size]


def remove_old(
    storage: Storage, *, newest: CheckpointName, keep: int, damaged: Collection[CheckpointName] = ()
) -> None:
    """Keep the `keep` newest complete checkpoints; remove older ones, and incomplete ones left behind.

    `damaged` ones have a manifest but cannot be restored: they do not count, and are removed as well.
    """
    kept = 0
    for name in list_checkpoints(storage):
        is_complete = name not in damaged and storage.read(f"{name}/manifest.json") is not None
        kept += is_complete
        # Checkpoints of later attempts are not touched, and our own save is the newest.
        if name.attempt > newest.attempt or name == newest:
            continue
        # Ours is the newest unless this machine was paused, and the others of an elastic run write this one by now.
        if not is_complete and name not in damaged and name.attempt == newest.attempt and name.step > newest.step:
            continue
        if kept > keep or not is_complete:
            # The manifest is removed first: an interrupted removal leaves an incomplete checkpoint, not a corrupt one.
            storage.delete(f"{name}/manifest.json")
            storage.delete(str(name))


def warn_skipped(name: CheckpointName, damage: object) -> None:
    """Warn that a checkpoint is skipped in favour of an older one."""
    warn(f"skipping checkpoint `{name}`: {damage}")


def warn(message: str) -> None:
    """Print a warning and flush it, because the process may be killed at any moment."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
