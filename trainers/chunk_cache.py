"""A cache of data-set chunks on a node's disk, shared by its ranks. It outlives their processes.

Each file ends with a digest of its content, so that only files that a crash left incomplete are fetched again. While
the disk is full, chunks are kept in the memory of the process that reads them.
"""

import contextlib
import errno
import hashlib
import mmap
import os
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainers.errors import TrainerError

try:
    import fcntl
except ImportError:  # Windows: ranks may fetch a chunk twice
    fcntl = None  # type: ignore[assignment]

DIGEST_BYTES = 32
FETCH_THREADS = 4
ATTEMPTS_MAX = 5  # another process may evict a chunk between its arrival and its use
LOCK_COUNT = 64  # lock files are never removed, so there is a fixed number of them
# A file whose last use is later than this from now was used before the clock was set back. That of a file server may
# differ from ours by less.
FUTURE_NS_MAX = 60 * 10**9
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class ChunkCache:
    """Chunks by number, fetched once per node and evicted by least recent use."""

    def __init__(self, folder: Path, fetch: Callable[[int], bytes], *, bytes_max: int, open_max: int) -> None:
        """Keep at most `bytes_max` bytes on disk for all ranks, and at most `open_max` files mapped by this process."""
        self._folder, self._fetch, self._bytes_max, self._open_max = folder, fetch, bytes_max, open_max
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch")
        self._asked: set[int] = set()
        self._is_full = False  # whether the disk had no space for the last chunk
        self._reading = threading.Lock()  # guards `_maps`
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, chunk: int) -> mmap.mmap:
        """Return the content of a chunk, followed by its digest. Fetch it if it is not cached."""
        with self._reading:
            content = self._maps.get(chunk)
            if content is None:
                content = self._maps[chunk] = self._open(chunk)
                while len(self._maps) > self._open_max:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(chunk)
            return content

    def prefetch(self, chunks: Iterable[int]) -> None:
        """Fetch chunks in the background unless another rank does. The read that needs a chunk raises its error."""
        wanted = set() if self._is_full else set(chunks)
        new = wanted - self._asked
        self._asked = wanted
        for chunk in sorted(new):
            self._pool.submit(self._ensure, chunk, is_waiting=False)

    def _open(self, chunk: int) -> mmap.mmap:
        for _ in range(ATTEMPTS_MAX):
            content = self._map(chunk)
            if content is not None:
                return content
            fetched = self._ensure(chunk, is_waiting=True)
            if fetched is not None:
                content = mmap.mmap(-1, len(fetched))
                content[:] = fetched
                return content
        raise TrainerError(f"`{self._path(chunk)}` keeps being removed or damaged; is `--data.cache` on a local disk?")

    def _ensure(self, chunk: int, *, is_waiting: bool) -> bytes | None:
        """Fetch a chunk unless it is cached; return its content and digest only if the disk is full."""
        path = self._path(chunk)
        with self._lock(chunk, is_waiting=is_waiting) as is_mine:
            if not is_mine or path.exists():
                return None
            content = self._fetch(chunk)
            content += digest(content)
            self._make_room(len(content))
            if not self._store(path, content):
                self._make_room(self._bytes_max)  # something else takes the space: do without the older chunks
                if not self._store(path, content):
                    self._note_full()
                    return content
            self._is_full = False
            return None

    def _store(self, path: Path, content: bytes) -> bool:
        """Write a file; return whether there was space. Raises TrainerError for any other error."""
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)  # on a full disk, each try would take more of it
            # Another rank that finds the disk full deletes all files, and those that are being written with them.
            if error.errno in (*FULL_ERRNOS, errno.ENOENT):
                return False
            raise TrainerError(
                f"`{path}` cannot be written: {error.strerror}\n\nhint: `--data.cache` on another disk"
            ) from error
        return True

    def _note_full(self) -> None:
        if not self._is_full:
            print(
                f"warning: the disk of `{self._folder}` is full: chunks of the data are kept in memory, and fetched "
                "again by each rank",
                file=sys.stderr,
                flush=True,
            )
        self._is_full = True

    @contextlib.contextmanager
    def _lock(self, chunk: int, *, is_waiting: bool) -> Iterator[bool]:
        """Hold a lock that ends with this process; yield False if it is taken and `is_waiting` is false."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context((self._folder / f"{chunk % LOCK_COUNT}.lock").open("wb"))
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX if is_waiting else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError as error:
                if error.errno not in FULL_ERRNOS:  # then nothing can be written that needs a lock
                    raise
            yield True

    def _map(self, chunk: int) -> mmap.mmap | None:
        path = self._path(chunk)
        try:
            with path.open("rb") as file:
                # A private writable mapping: torch warns about read-only ones.
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            os.utime(path)
        except (FileNotFoundError, ValueError):  # an empty file cannot be mapped
            path.unlink(missing_ok=True)
            return None
        if digest(memoryview(content)[:-DIGEST_BYTES]) != content[-DIGEST_BYTES:]:
            path.unlink(missing_ok=True)
            return None
        return content

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files. A file in use stays readable for processes that have it mapped."""
        files = []
        latest_ns = time.time_ns() + FUTURE_NS_MAX
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                # Files from before the clock was set back go first: they would outlive all that are in use now.
                used_ns = about.st_mtime_ns if about.st_mtime_ns <= latest_ns else 0
                files.append((used_ns, about.st_size, path))
        total = size + sum(each for _, each, _ in files)
        for _, each, path in sorted(files):
            if total <= self._bytes_max:
                return
            if path.suffix != ".lock":
                path.unlink(missing_ok=True)
                total -= each

    def _path(self, chunk: int) -> Path:
        return self._folder / f"{chunk}.chunk"


def digest(content: "bytes | memoryview") -> bytes:
    """Return the digest that is appended to a chunk."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def find_cache_folder(configured: str) -> Path:
    """Return the folder for chunks: the configured one, or a temporary folder of this user."""
    if configured:
        return Path(configured)
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"trainers-data-{user}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid != user:
        raise TrainerError(f"`{folder}` belongs to another user; name a folder with `--data.cache`")
    return folder
