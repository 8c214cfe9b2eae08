"""Save checkpoints in the background, atomically, and restore them.

This module knows no strategy: it receives objects with a `state_dict`, by name. Layout of the storage:
`attempts/<number>` registers attempts; `step-<n>-attempt-<n>-<run>/` holds shards and, written last, `manifest.json`.
"""

import json
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from trainers.errors import CheckpointError, StaleAttemptError
from trainers.extra_state import pack_extra_state
from trainers.manifest import (
    INDEX,
    MANIFEST_VERSION,
    CheckpointName,
    Contents,
    DamagedFile,
    find_newest,
    list_checkpoints,
    read_manifest,
    remove_old,
    seal_manifest,
    warn,
)
from trainers.ranks import Ranks
from trainers.restore import Restorer, Stateful, decide, name_own
from trainers.restore_progress import LocalCounter, RestoreProgress
from trainers.snapshot import CudaStreams, Snapshot, find_addresses, hold_still
from trainers.storage import Storage

__all__ = ["CheckpointManager", "CheckpointName", "Contents", "find_newest", "list_checkpoints"]

# Consecutive failed saves after which the run fails: unsaved work is paid for again after a preemption.
FAILURES_MAX = 3

# Intended: one process trains alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # one that failed, written again


class HeldByOne:
    """State that differs between ranks; one rank writes its values, and all ranks read them."""

    def __init__(self, state: Stateful, *, is_holder: bool) -> None:
        """Wrap `state`; only the holder contributes values to a checkpoint."""
        self._state, self.is_holder = state, is_holder

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the state."""
        return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the values that the holder wrote."""
        self._state.load_state_dict(state)


class CheckpointManager:
    """The checkpoints of a job, as seen by one attempt. All ranks call the same methods in the same order."""

    def __init__(
        self,
        storage: Storage,
        ranks: Ranks,
        *,
        attempt: int,
        keep: int,
        shared: Mapping[str, Stateful],
        own: Mapping[str, Stateful],
        about: Mapping[str, Any] | None = None,
        buffers: Callable[[], Iterable[Tensor]] = tuple,
        find_conflict: Callable[[Mapping[str, Any]], str] = lambda about: "",
    ) -> None:
        """Register the attempt. `shared` state is common to all ranks; `own` differs from rank to rank.

        `about` is JSON that is stored with each checkpoint. `buffers` returns the tensors of the state that forward
        passes change, such as BatchNorm's statistics: it is called in each save, because a pass may replace them.
        `find_conflict` takes the `about` of a checkpoint, and returns why this run must not continue from it, or "".
        """
        self._about = dict(about or {})
        self._storage, self._ranks = storage, ranks
        self._attempt, self._keep = attempt, keep
        self._shared, self._own = shared, own
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._failures = 0  # in a row
        self._damaged: Collection[CheckpointName] = ()
        self._removal_problem = ""
        self._step_saved: int | None = None
        self.step_committed: int | None = None
        self._find_buffers, self._find_conflict = buffers, find_conflict
        self._snapshot = Snapshot(CudaStreams(ranks.device) if ranks.device.type == "cuda" else None)
        self.stall_s = 0.0  # time for which the last `save` and the following `wait_for_copy` blocked their caller
        self.write_s = 0.0  # time from the start of the last committed save to its commit; training continues meanwhile
        self._run = ranks.share(uuid.uuid4().hex[:8])
        decide(ranks, self._register)

    def _register(self) -> None:
        self._storage.create(f"attempts/{self._attempt:010d}", b"")
        if newer := self._find_newer_attempt():
            raise StaleAttemptError(newer)

    def restore(self, progress: RestoreProgress | None = None) -> int | None:
        """Load the newest complete checkpoint into the objects and return its step; None if there is none.

        All ranks skip incomplete and corrupt checkpoints, with a warning. `progress` reports bytes read by all ranks.
        """
        restorer = Restorer(
            self._storage, self._ranks, shared=self._shared, own=self._own, find_conflict=self._find_conflict
        )
        silent = RestoreProgress(LocalCounter(), beat=lambda doing: None, report=lambda status: None)
        name = restorer.restore(progress or silent)
        self._damaged = frozenset(restorer.skipped)
        if name is None:
            return None
        self._step_saved = self.step_committed = name.step
        return name.step

    def find_newest_step(self) -> int:
        """Return the step of the newest checkpoint with a manifest; -1 if there is none. A collective call."""

        def find() -> int:
            for name in list_checkpoints(self._storage):
                with suppress(DamagedFile):
                    read_manifest(self._storage, name)
                    return name.step
            return -1

        return decide(self._ranks, find)

    def save(self, step: int, *, is_last: bool = False) -> None:
        """Copy and write the state in the background. Wait for a save in progress first.

        A failed save is only a warning, because training is worth more than one checkpoint; it raises if the attempt is
        stale or several consecutive saves failed. `is_last`: no other save follows, so this one is tried even after
        that; the storage may be available again. No tensor of the state may change before `wait_for_copy` returns:
        forward and backward may run, but not the optimizer. Saving the step that was saved last has no effect.
        """
        begin = time.perf_counter()
        try:
            self.wait()
        except StaleAttemptError:
            raise
        except CheckpointError as error:
            if self._failures >= FAILURES_MAX and not is_last:
                raise
            if self._ranks.is_first:
                warn(
                    f"{error}; "
                    + ("a last save is tried" if is_last else "training continues until the next checkpoint")
                )
        if step == self._step_saved:
            return
        # On every rank: for some strategies `state_dict` is a collective call.
        states = {key: (holder, holder.state_dict()) for key, holder in self._shared.items()}
        live = {key: state for key, (holder, state) in states.items() if getattr(holder, "is_holder", True)}
        live[name_own(self._ranks)] = {key: holder.state_dict() for key, holder in self._own.items()}
        live = hold_still(pack_extra_state(live), find_addresses(self._find_buffers()))
        self._step_saved = step
        name = CheckpointName(step=step, attempt=self._attempt, run=self._run)
        self._thread = threading.Thread(target=self._write, args=(name, live), name=f"checkpoint-{step}")
        self._snapshot.begin()
        self._thread.start()
        self.stall_s = time.perf_counter() - begin

    def wait_for_copy(self) -> None:
        """Block until the state may change: it has been copied, though perhaps not written.

        On a GPU the device orders the change after the copy, and the host does not wait for it.
        """
        if not self._snapshot.is_copied:
            begin = time.perf_counter()
            self._snapshot.wait_for_copy()
            self.stall_s += time.perf_counter() - begin

    def wait(self) -> None:
        """Wait until the current save is committed; raise its error, on every rank."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._failures += 1
            self._step_saved = self.step_committed
            raise failure
        if self._step_saved is not None and self._step_saved == self.step_committed:
            self._failures = 0

    def _write(self, name: CheckpointName, live: dict[str, Any]) -> None:
        """Copy, write and commit, in the background thread; keep an error for the next `wait`."""
        begin = time.perf_counter()
        is_committing = False
        try:
            state, writer = self._take(name, live)
            import torch.distributed.checkpoint as dcp

            is_alone = self._ranks.world_size == 1
            dcp.save(state, storage_writer=writer, process_group=self._ranks.background_group, no_dist=is_alone)
            files = self._collect_files(str(name))
            is_committing = True
            problem = self._commit(name, files) if self._ranks.is_first else None
            problem = self._ranks.share(problem, is_background=True)
            if problem is not None:
                raise problem
            self.step_committed = name.step
            self.write_s = time.perf_counter() - begin
            if self._ranks.is_first:
                self._remove_old(name)
        except CheckpointError as error:
            self._failure = error
        except BaseException as error:  # the library's own failure is not an Exception
            self._failure = CheckpointError(f"`{name}` was not written: {error}")
            self._failure.__cause__ = error
        if self._failure is not None and not is_committing and self._ranks.is_first:
            with suppress(Exception):  # on a full disk, it would leave no room for the next one
                self._storage.delete(str(name))

    def _take(self, name: CheckpointName, live: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the copy of the state, and its writer.

        If one fails on one rank, all raise: the others would write without it, and its next save would meet theirs of
        this step.
        """
        state: dict[str, Any] = {}
        writer: Any = None
        problem: CheckpointError | None = None
        failed = f"the state was not copied on rank {self._ranks.rank}"
        try:
            state = self._snapshot.take(live)
            failed = f"`{name}` was not written"
            writer = self._storage.open_writer(str(name))
        except Exception as error:
            problem = CheckpointError(f"{failed}: {error or repr(error)}")
        for failure in self._ranks.collect(problem):
            if failure is not None:
                raise failure
        return state, writer

    def _remove_old(self, name: CheckpointName) -> None:
        """Remove old checkpoints after a commit. A failure is a warning, once: the new checkpoint is complete."""
        try:
            if self._find_newer_attempt() is None:  # it may be reading one of them
                remove_old(self._storage, newest=name, keep=self._keep, damaged=self._damaged)
        except Exception as error:  # a role without the right to delete; libraries of buckets have errors of their own
            problem = str(error)
            if problem != self._removal_problem:
                warn(f"old checkpoints were not removed: {problem}")
            self._removal_problem = problem

    def _collect_files(self, name: str) -> dict[str, list[Any]]:
        """Return every file with its checksum. Each rank computes the checksums of its own files."""
        mine: dict[str, Any] = {}
        problem: CheckpointError | None = None
        try:
            for file in self._storage.list_names(name):
                # The library names a rank's files `__<rank>_<n>.distcp`; the first rank writes the index beside them.
                if file.startswith(f"__{self._ranks.rank}_") or (self._ranks.is_first and file == INDEX):
                    mine[file] = self._storage.seal(f"{name}/{file}")
            if None in mine.values() or (self._ranks.is_first and INDEX not in mine):
                raise FileNotFoundError("a file that was written is missing")
        except Exception as error:  # whatever it is, all ranks wait for this rank's answer
            problem = CheckpointError(f"the checksums of `{name}` were not computed: {error or repr(error)}")
        parts = self._ranks.collect((mine, problem))
        for _, failure in parts:
            if failure is not None:
                raise failure
        return {file: seal for part, _ in parts for file, seal in part.items()}

    def _commit(self, name: CheckpointName, files: dict[str, list[Any]]) -> CheckpointError | None:
        manifest = {
            "version": MANIFEST_VERSION,
            "step": name.step,
            "attempt": name.attempt,
            "world_size": self._ranks.world_size,
            "shared": sorted(self._shared),
            "own": sorted(self._own),
            "about": self._about,
            "files": files,
        }
        try:
            manifest = json.loads(json.dumps(manifest))  # as a reader sees it: JSON turns every key into text
            content = json.dumps({**manifest, "seal": seal_manifest(manifest)}, indent=1).encode()
            if newer := self._find_newer_attempt():
                return StaleAttemptError(newer)
            is_ours = self._storage.create(f"{name}/manifest.json", content)
            # A write whose response was lost was retried, and the retry found its own object.
            is_ours = is_ours or self._storage.read(f"{name}/manifest.json") == content
        except Exception as error:  # whatever it is, all ranks wait for it
            return CheckpointError(f"the manifest of `{name}` was not written: {error or repr(error)}")
        if not is_ours:
            return CheckpointError(f"`{name}` was already committed by another process")
        return None

    def _find_newer_attempt(self) -> str | None:
        # Attempts are registered by files that are never deleted, so the highest number is a monotonic fence.
        highest = max((int(number) for number in self._storage.list_names("attempts") if number.isdigit()), default=0)
        if highest <= self._attempt:
            return None
        return f"attempt {self._attempt} is stale: attempt {highest} of this job has started"
