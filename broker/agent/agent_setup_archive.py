"""Pack the changes of a setup into parts with a manifest, and restore them on another node. Standard library only.

An archive is a set of parts, named by their SHA-256, and a manifest that is written last: without it no part is used.
A reader verifies each part before it uses a byte of it, builds all files in a staging folder, and only then moves them
into place. A process that is killed in between leaves either nothing that is used or a complete staging folder, from
which the next start continues.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from broker.agent import agent_files, agent_setup_files
    from broker.agent.agent_setup_files import FILE, FOLDER, HARD, LINK, REMOVED, Change, FileState, NotCacheable
else:
    import agent_files
    import agent_setup_files
    from agent_setup_files import FILE, FOLDER, HARD, LINK, REMOVED, Change, NotCacheable

VERSION = 1
PART_BYTES = 32 << 20
PARTS_AT_ONCE = 6  # in memory; one request of an object store carries 85 to 90 MB/s (S3's performance guidelines)
COMPLETE, TREE = "complete.json", "tree"


class DamagedArchive(Exception):
    """An archive that cannot be used: incomplete, damaged, or of another version."""


def find_texts(path: Path, needles: Sequence[bytes]) -> list[bytes]:
    """Return those of the texts that a file contains."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return [each for each in needles if content.find(each) >= 0]


def search(entries: Sequence[Change], home: Path, secrets: Sequence[bytes]) -> bool:
    """Return whether the changes name the home folder, so that they only work below the same path.

    Raises NotCacheable if one of them contains a secret.
    """
    is_bound, place = False, os.fsencode(str(home))
    for entry in entries:
        if entry.type == LINK:
            found = [each for each in (place, *secrets) if each in os.fsencode(entry.target)]
        elif entry.type == FILE:
            found = find_texts(home / entry.path, [place, *secrets])
        else:
            continue
        is_bound = is_bound or place in found
        if set(found) & set(secrets):
            raise NotCacheable(f"setup wrote a secret to ~/{entry.path}")
    return is_bound


def pack(
    entries: Sequence[Change], home: Path, seen: Mapping[str, FileState], put: Callable[[str, bytes], None]
) -> list[list[Any]]:
    """Store the content of all files in parts; return the digest and size of each, in order.

    Raises NotCacheable if a file is no longer as it was seen after setup: the program has begun and may change it.
    """
    parts: list[list[Any]] = []
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
        for part in _cut(_read_files(entries, home, seen)):
            digest = hashlib.sha256(part).hexdigest()
            parts.append([digest, len(part)])
            waiting.append(pool.submit(put, name_part(digest), part))
            if len(waiting) >= PARTS_AT_ONCE:
                waiting.popleft().result()
        while waiting:
            waiting.popleft().result()
    return parts


def name_part(digest: str) -> str:
    """Return the name of a part below its archive."""
    return f"{digest}.part"


def encode(manifest: Mapping[str, Any]) -> bytes:
    """Return a manifest as text with its own digest in front."""
    body = zlib.compress(json.dumps({**manifest, "version": VERSION}).encode(), 1)
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode(content: bytes) -> dict[str, Any]:
    """Return the manifest. Raises DamagedArchive."""
    digest, _, body = content.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise DamagedArchive("its manifest is damaged")
    manifest = json.loads(zlib.decompress(body))
    if manifest.get("version") != VERSION:
        raise DamagedArchive("it was written by another version of broker")
    manifest["entries"] = [Change(*each) for each in manifest["entries"]]
    return dict(manifest)


def stage(manifest: Mapping[str, Any], get: Callable[[str], bytes | None], folder: Path, digest: str) -> None:
    """Build all files of an archive below `folder`, and mark it complete for a setup's digest.

    Raises DamagedArchive.
    """
    entries: list[Change] = manifest["entries"]
    check_paths(entries)
    shutil.rmtree(str(folder), ignore_errors=True)
    tree = folder / TREE
    tree.mkdir(mode=0o700, parents=True)
    content = _Reader(_fetch(manifest["parts"], get))
    for entry in entries:
        place = tree / entry.path
        if entry.type != REMOVED:
            place.parent.mkdir(parents=True, exist_ok=True)
        if entry.type == FOLDER:
            place.mkdir(exist_ok=True)
        elif entry.type == LINK:
            place.symlink_to(entry.target)
        elif entry.type == HARD:
            os.link(str(tree / entry.target), str(place))
        elif entry.type == FILE:
            with place.open("xb") as file:
                content.copy(entry.size, file.write)
            place.chmod(entry.mode)
            os.utime(str(place), ns=(entry.mtime_ns, entry.mtime_ns))
    content.finish()
    marker = {"digest": digest, "entries": entries, "boot": agent_files.read_boot()}
    agent_files.write_json(folder / COMPLETE, marker, is_durable=False)


def merge(folder: Path, home: Path) -> str:
    """Move a complete staging folder to its places and return its digest; "" if there is none.

    A repeated call continues. A folder of an earlier boot does not count: a power loss may have left its files empty,
    because they are not flushed one by one. Raises DamagedArchive for a path that leads outside of the home folder.
    """
    marker = agent_files.read_of_this_boot(folder / COMPLETE)
    if marker is None:
        return ""
    entries = [Change(*each) for each in marker["entries"]]
    check_paths(entries)
    for entry in entries:  # all, before the first is moved
        if not _is_below(os.path.realpath(str((home / entry.path).parent)), home):
            raise DamagedArchive(f"its path {entry.path} leads outside of the home folder")
    for entry in entries:
        place = home / entry.path
        if entry.type == REMOVED:
            _remove(place)
        elif entry.type == FOLDER:
            if not place.is_dir() or place.is_symlink():
                _remove(place)
                place.mkdir(parents=True)
        else:
            source = folder / TREE / entry.path
            if os.path.lexists(str(source)):  # else an interrupted call has moved it
                if place.is_dir() and not place.is_symlink():
                    shutil.rmtree(str(place))
                place.parent.mkdir(parents=True, exist_ok=True)
                source.replace(place)
    for entry in reversed(entries):
        if entry.type == FOLDER:  # last: a folder may be read-only
            (home / entry.path).chmod(entry.mode)
    shutil.rmtree(str(folder), ignore_errors=True)
    return str(marker["digest"])


def check_paths(entries: Sequence[Change]) -> None:
    """Raise DamagedArchive for a path outside the home folder, of ours, below a link, or where tools keep logins."""
    leaves = {entry.path for entry in entries if entry.type in (FILE, LINK, HARD)}
    for entry in entries:
        parts = entry.path.split("/")
        is_ours = parts[0] == agent_setup_files.OURS and not entry.path.startswith(f"{agent_setup_files.OURS_KEPT}/")
        is_above = any("/".join(parts[:count]) in leaves for count in range(1, len(parts)))
        if is_ours or is_above or {"", ".", ".."} & set(parts) or agent_setup_files.is_private(entry.path):
            raise DamagedArchive(f"it has the path {entry.path}")
        if entry.type == HARD and entry.target not in leaves:
            raise DamagedArchive(f"it has a link to {entry.target}")


def _is_below(path: str, home: Path) -> bool:
    root = os.path.realpath(str(home))
    return path == root or path.startswith(f"{root}{os.sep}")


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(str(place), ignore_errors=True)
    elif os.path.lexists(str(place)):
        place.unlink()


def _read_files(entries: Sequence[Change], home: Path, seen: Mapping[str, FileState]) -> Iterator[bytes]:
    for entry in entries:
        if entry.type != FILE:
            continue
        size = 0
        try:
            with (home / entry.path).open("rb") as file:
                while chunk := file.read(agent_setup_files.CHUNK_BYTES):
                    size += len(chunk)
                    yield chunk
                found = os.fstat(file.fileno())
        except OSError as error:
            raise NotCacheable(f"~/{entry.path} cannot be read: {error.strerror}") from error
        known = seen[entry.path]
        if (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, size) != (
            known.inode, known.mtime_ns, known.ctime_ns, entry.size,
        ):  # fmt: skip
            raise NotCacheable(f"~/{entry.path} changed after setup")


def _cut(chunks: Iterator[bytes]) -> Iterator[bytes]:
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= PART_BYTES:
            yield bytes(buffer[:PART_BYTES])
            del buffer[:PART_BYTES]
    if buffer:
        yield bytes(buffer)


def _fetch(parts: Sequence[Sequence[Any]], get: Callable[[str], bytes | None]) -> Iterator[bytes]:
    """Yield verified parts in order, of which a few are fetched ahead."""

    def fetch(digest: str, size: int) -> bytes:
        content = get(name_part(digest))
        if content is None or len(content) != size or hashlib.sha256(content).hexdigest() != digest:
            raise DamagedArchive("a part of it is missing or damaged")
        return content

    with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
        waiting: deque[Future[bytes]] = deque()
        for digest, size in parts:
            waiting.append(pool.submit(fetch, str(digest), int(size)))
            if len(waiting) >= PARTS_AT_ONCE:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Reader:
    """Read consecutive bytes from parts."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._rest = memoryview(b"")

    def copy(self, size: int, write: Callable[[memoryview], object]) -> None:
        while size:
            if not self._rest:
                part = next(self._parts, b"")
                if not part:
                    raise DamagedArchive("its parts are shorter than its files")
                self._rest = memoryview(part)
            write(self._rest[:size])
            taken = min(size, len(self._rest))
            self._rest, size = self._rest[taken:], size - taken

    def finish(self) -> None:
        if self._rest or any(self._parts):
            raise DamagedArchive("its parts are longer than its files")
