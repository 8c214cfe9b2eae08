"""Read and verify a checkpoint in one pass: bytes for torch.distributed.checkpoint are hashed as they arrive.

Every rank verifies the files that it reads, so the work is distributed like the state. Only a run that resumes imports
this module, because the import of torch's library takes 0.6 s.
"""

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from trainers.manifest import CheckpointName, Contents, DamagedFile, check_seal
from trainers.storage import Storage

# Files that one rank reads concurrently: a single stream from a bucket reaches 100 to 250 MB/s.
STREAMS = 4


class VerifiedReader(FileSystemReader):
    """Torch's reader of a checkpoint, with verified bytes from our storage.

    The result may be used only if `problem` is None on every rank.
    """

    def __init__(
        self,
        storage: Storage,
        name: CheckpointName,
        contents: Contents,
        index: bytes,
        *,
        note_wanted: Callable[[int], None] = lambda count: None,
        note_read: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Read with `index`, the verified content of the index file. The callbacks get numbers of bytes."""
        super().__init__(str(name))
        self.fs = IndexFile(index)
        self._storage, self._name, self._contents = storage, name, contents
        self._note_wanted, self._note_read = note_wanted, note_read
        self.verified: set[str] = set()
        self.problem: Exception | None = None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read and verify every file that this rank needs. An error is kept in `problem`."""
        wanted: dict[str, dict[int, list[ReadItem]]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            wanted.setdefault(place.relative_path, {}).setdefault(place.offset, []).append(item)
        self._run(lambda file: self._load_file(file, wanted[file], planner), list(wanted))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def verify_files(self, files: list[str]) -> None:
        """Verify files that no rank needs: a checkpoint is valid only if all of its files are intact."""
        self._run(lambda file: self._open(file).finish(), files)

    def _run(self, read: Callable[[str], None], files: list[str]) -> None:
        """Read several files concurrently; keep the first error."""

        def attempt(file: str) -> None:
            if self.problem is not None:  # skip the rest of a damaged checkpoint
                return
            try:
                read(file)
            except Exception as error:
                self.problem = self.problem or error
                return
            self.verified.add(file)

        self._note_wanted(sum(self._contents.files[file].size for file in files if file in self._contents.files))
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(attempt, files))

    def _open(self, file: str) -> "HashedFile":
        seal = self._contents.files.get(file)
        if seal is None:
            raise DamagedFile(f"`{file}` is not in its manifest")
        chunks = self._storage.stream(f"{self._name}/{file}")
        return HashedFile(chunks, note_read=self._note_read, check=lambda actual: check_seal(file, seal, actual))

    def _load_file(self, file: str, wanted: Mapping[int, list[ReadItem]], planner: LoadPlanner) -> None:
        """Load all items of one file, in file order."""
        source = self._open(file)
        objects: list[tuple[ReadItem, io.BytesIO]] = []
        failure: Exception | None = None
        for offset, items in sorted(wanted.items()):
            content = source.read_part(offset, self.storage_data[items[0].storage_index].length)
            try:
                if items[0].type == LoadItemType.BYTE_IO:
                    objects += [(item, content) for item in items]
                else:
                    _load_tensor(content, items, planner)
            except Exception as error:  # raised only if the file proves to be intact
                failure = failure or error
        source.finish()
        if failure is not None:
            raise failure
        for item, content in objects:  # unpickled, so only from a verified file
            content.seek(0)
            planner.load_bytes(item, content)


class IndexFile(FileSystem):
    """The index, the only file that torch's reader opens itself; the caller has verified it."""

    def __init__(self, index: bytes) -> None:
        """Set the content of the index."""
        self._index = index

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """Return the index for any path."""
        yield io.BytesIO(self._index)


class HashedFile:
    """A file that is read and hashed once, in order, while parts of it are returned."""

    def __init__(
        self,
        chunks: Iterator[bytes],
        *,
        note_read: Callable[[int], None],
        check: Callable[[tuple[str, int] | None], None],
    ) -> None:
        """At the end, call `check` with SHA-256 and size, or None for a missing file; it raises DamagedFile."""
        self._chunks, self._note_read, self._check = chunks, note_read, check
        self._digest, self._size = hashlib.sha256(), 0
        self._rest = memoryview(b"")  # hashed, but not yet consumed
        self._place = 0

    def read_part(self, offset: int, length: int) -> io.BytesIO:
        """Return `length` bytes from `offset`, which must not precede the end of the previous part.

        Raises DamagedFile if the file ends too early.
        """
        assert offset >= self._place, "parts are read in order and do not overlap"
        self._pass(offset - self._place, None)
        part = io.BytesIO()
        self._pass(length, part)
        part.seek(0)
        return part

    def finish(self) -> None:
        """Read the rest of the file and verify it. Raises DamagedFile."""
        self._rest = memoryview(b"")
        while self._read_chunk():
            pass
        self._check((self._digest.hexdigest(), self._size))

    def _pass(self, count: int, into: io.BytesIO | None) -> None:
        self._place += count
        while count:
            if not self._rest:
                self._rest = memoryview(self._read_chunk())
                if not self._rest:
                    return self._check((self._digest.hexdigest(), self._size))
            part = self._rest[:count]
            if into is not None:
                into.write(part)
            count, self._rest = count - len(part), self._rest[len(part) :]

    def _read_chunk(self) -> bytes:
        """Read and hash the next bytes; return them, or nothing at the end."""
        try:
            chunk = next(self._chunks, b"")
        except FileNotFoundError:
            self._check(None)
            raise
        self._digest.update(chunk)
        self._size += len(chunk)
        self._note_read(len(chunk))
        return chunk


def _load_tensor(content: io.BytesIO, items: list[ReadItem], planner: LoadPlanner) -> None:
    """Copy one stored tensor, or the requested parts of it, into the state."""
    stored: torch.Tensor = torch.load(content, map_location="cpu", weights_only=True)
    for item in items:
        part = stored
        for axis, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(axis, begin, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != part.size():
            raise ValueError(
                f"a tensor was saved with the shape {tuple(part.size())}, but the model has {tuple(target.size())}"
            )
        target.copy_(part)
        planner.commit_tensor(item, target)
